//! `/metrics/slis`, as every Kubernetes component has it: how often its health was asked for, and the answers.

use std::sync::Arc;

use prometheus_client::{
    encoding::prometheus_text,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

type Labels<const N: usize> = [(&'static str, &'static str); N];

/// Checks that were answered. As in kube-proxy there is one, `ping`, whose answer is always the same.
#[derive(Clone, Debug)]
pub struct Slis {
    registry: Arc<Registry>,
    last: Family<Labels<2>, Gauge>,
    answered: Family<Labels<3>, Counter>,
}

impl Default for Slis {
    fn default() -> Self {
        let (last, answered) = (Family::default(), Family::default());
        let mut registry = Registry::default();
        registry.register("kubernetes_healthcheck", "Result of the last check: 1 = well", Family::clone(&last));
        registry.register("kubernetes_healthchecks", "Checks by result", Family::clone(&answered));
        Self { registry: Arc::new(registry), last, answered }
    }
}

impl Slis {
    /// `/healthz` was answered.
    pub fn pinged(&self) {
        self.last.get_or_create(&[("name", "ping"), ("type", "healthz")]).set(1);
        self.answered.get_or_create(&[("name", "ping"), ("status", "success"), ("type", "healthz")]).inc();
    }

    /// As Prometheus reads it.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = prometheus_text::encode(&mut text, &self.registry);
        text
    }
}
