//! What a scraper sees: kube-proxy's names wherever they do not depend on its mode, so that dashboards and alerts keep
//! working, and our own under `sheave_`.
//!
//! Two kinds: [`Metrics`] are written as things happen; a [`Snapshot`] is taken from the engine when somebody asks.

mod flows;
mod meter;
mod process;
mod snapshot;
mod trigger;

use std::{
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use prometheus_client::{
    encoding::prometheus_text,
    metrics::{
        counter::Counter,
        family::Family,
        gauge::{ConstGauge, Gauge},
        histogram::Histogram,
    },
    registry::Registry,
};
use sheave_ebpf::{ABI_VERSION, names::ServiceName};

pub use flows::ServiceFlows;
pub use meter::{Meter, Pass};
pub use snapshot::{Connections, NoLocal, Snapshot};
pub use trigger::Triggers;

use crate::model;

/// A label of a fixed name.
type Label<V> = [(&'static str, V); 1];
/// Labels of fixed names.
type Labels<const N: usize> = [(&'static str, String); N];
/// A metric for each family.
type ByFamily<M> = Family<Label<&'static str>, M, fn() -> M>;
/// Seconds since 1970, or any other fraction.
type Seconds = Gauge<f64, AtomicU64>;

/// What is written as it happens. A clone writes to the same.
#[derive(Clone, Debug)]
pub struct Metrics {
    registry: Arc<Registry>,
    sync: ByFamily<Histogram>,
    sync_full: ByFamily<Histogram>,
    sync_partial: ByFamily<Histogram>,
    last_finished: ByFamily<Seconds>,
    last_requested: ByFamily<Seconds>,
    programming: ByFamily<Histogram>,
    endpoint_changes_pending: Gauge,
    endpoint_changes: Counter,
    service_changes_pending: Gauge,
    service_changes: Counter,
    healthz: Family<Label<u16>, Counter>,
    livez: Family<Label<u16>, Counter>,
    requests: Family<Labels<3>, Counter>,
    request_duration: Family<Labels<2>, Histogram, fn() -> Histogram>,
    reconcile: Histogram,
    closed_sockets: Counter,
    flows: Gauge,
    flow_capacity: Gauge,
    hidden_flows: Gauge,
    service_flows: ServiceFlows,
    collected_flows: Counter,
    conntrack_sync: ByFamily<Histogram>,
    conntrack_deleted: ByFamily<Counter>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let mut new = Self {
            registry: Arc::default(),
            sync: Family::new_with_constructor(sync_buckets),
            sync_full: Family::new_with_constructor(sync_buckets),
            sync_partial: Family::new_with_constructor(sync_buckets),
            last_finished: Family::new_with_constructor(Seconds::default),
            last_requested: Family::new_with_constructor(Seconds::default),
            programming: Family::new_with_constructor(programming_buckets),
            endpoint_changes_pending: Gauge::default(),
            endpoint_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            service_changes: Counter::default(),
            healthz: Family::default(),
            livez: Family::default(),
            requests: Family::default(),
            request_duration: Family::new_with_constructor(request_buckets),
            reconcile: Histogram::new((0..11).map(|i| 0.0001 * 4_f64.powi(i))),
            closed_sockets: Counter::default(),
            flows: Gauge::default(),
            flow_capacity: Gauge::default(),
            hidden_flows: Gauge::default(),
            service_flows: ServiceFlows::default(),
            collected_flows: Counter::default(),
            conntrack_sync: Family::new_with_constructor(sync_buckets),
            conntrack_deleted: Family::new_with_constructor(Counter::default),
        };
        new.register_kube_proxy(&mut registry);
        new.register_own(&mut registry);
        new.registry = Arc::new(registry);
        new
    }
}

impl Metrics {
    fn register_kube_proxy(&self, registry: &mut Registry) {
        let version = env!("CARGO_PKG_VERSION");
        let labels = [
            ("major", env!("CARGO_PKG_VERSION_MAJOR").to_owned()),
            ("minor", env!("CARGO_PKG_VERSION_MINOR").to_owned()),
            ("git_version", format!("v{version}")),
            ("compiler", "rustc".to_owned()),
            ("platform", format!("{}/{}", std::env::consts::OS, std::env::consts::ARCH)),
        ];
        let build = Family::<[(&str, String); 5], Gauge>::default();
        build.get_or_create(&labels).set(1);
        registry.register(
            "kubernetes_build_info",
            "Version of this program, where Kubernetes dashboards look for it",
            build,
        );

        registry.register(
            "rest_client_requests",
            "Requests to the API server; the code is <error> if there was no answer",
            self.requests.clone(),
        );
        registry.register(
            "rest_client_request_duration_seconds",
            "Time until the API server began to answer",
            self.request_duration.clone(),
        );

        let registry = registry.sub_registry_with_prefix("kubeproxy");
        registry.register(
            "sync_proxy_rules_duration_seconds",
            "Duration of passes that plan and write what changed",
            self.sync.clone(),
        );
        registry.register(
            "sync_full_proxy_rules_duration_seconds",
            "Duration of passes over all Services",
            self.sync_full.clone(),
        );
        registry.register(
            "sync_partial_proxy_rules_duration_seconds",
            "Duration of passes over what changed only",
            self.sync_partial.clone(),
        );
        registry.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "Unix time at which a pass last succeeded",
            self.last_finished.clone(),
        );
        registry.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "Unix time at which a pass was last requested",
            self.last_requested.clone(),
        );
        registry.register(
            "network_programming_duration_seconds",
            "Time from the change of a pod or Service, as dated by the EndpointSlice's annotation, until it is in the kernel",
            self.programming.clone(),
        );
        registry.register(
            "sync_proxy_rules_endpoint_changes_pending",
            "Changes of EndpointSlices that are not in the kernel yet",
            self.endpoint_changes_pending.clone(),
        );
        registry.register(
            "sync_proxy_rules_endpoint_changes",
            "Changes of EndpointSlices seen",
            self.endpoint_changes.clone(),
        );
        registry.register(
            "sync_proxy_rules_service_changes_pending",
            "Changes of Services that are not in the kernel yet",
            self.service_changes_pending.clone(),
        );
        registry.register("sync_proxy_rules_service_changes", "Changes of Services seen", self.service_changes.clone());
        registry.register(
            "conntrack_reconciler_sync_duration_seconds",
            "Time that a pass over the packet path's flow table took",
            self.conntrack_sync.clone(),
        );
        registry.register(
            "conntrack_reconciler_deleted_entries",
            "Entries removed because the flow had ended, or its backend was gone",
            self.conntrack_deleted.clone(),
        );
        registry.register("proxy_healthz", "Answers of /healthz, by code", self.healthz.clone());
        registry.register("proxy_livez", "Answers of /livez, by code", self.livez.clone());
    }

    fn register_own(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("sheave");
        let build = Family::<[(&str, String); 2], Gauge>::default();
        let labels = [("version", env!("CARGO_PKG_VERSION").to_owned()), ("abi", ABI_VERSION.to_string())];
        build.get_or_create(&labels).set(1);
        registry.register("build_info", "Version of this program and of its map layout", build);
        registry.register(
            "reconcile_duration_seconds",
            "Duration of passes, in finer steps than kube-proxy's",
            self.reconcile.clone(),
        );
        registry.register(
            "closed_sockets",
            "Sockets closed because their backend left its Service",
            self.closed_sockets.clone(),
        );
        registry.register(
            "conntrack_entries",
            "Entries in the packet path's flow table, as of the last pass over it",
            self.flows.clone(),
        );
        registry.register(
            "conntrack_capacity",
            "Entries that the flow table can hold; beyond that, new flows evict old ones",
            self.flow_capacity.clone(),
        );
        registry.register(
            "snat_ports_in_use",
            "Flows whose client is hidden behind a port of this node, when they were last looked through",
            self.hidden_flows.clone(),
        );
        registry.register(
            "service_flows",
            "Flows of clients outside to the busiest Service ports, see --max-metrics-series",
            self.service_flows.gauges.clone(),
        );
        registry.register(
            "conntrack_collected",
            "Entries removed because their flow had ended",
            self.collected_flows.clone(),
        );
    }

    /// A probe was answered with that code.
    pub fn answered_healthz(&self, code: u16) {
        self.healthz.get_or_create(&[("code", code)]).inc();
    }

    /// A probe was answered with that code.
    pub fn answered_livez(&self, code: u16) {
        self.livez.get_or_create(&[("code", code)]).inc();
    }

    /// A request to the API was answered with that code, or not at all.
    pub fn requested(&self, method: String, host: String, code: Option<u16>, took: Duration) {
        let code = code.map_or_else(|| "<error>".to_owned(), |code| code.to_string());
        self.request_duration
            .get_or_create(&[("verb", method.clone()), ("host", host.clone())])
            .observe(took.as_secs_f64());
        self.requests.get_or_create(&[("code", code), ("host", host), ("method", method)]).inc();
    }

    /// So many sockets were closed.
    pub fn closed_sockets(&self, count: u64) {
        self.closed_sockets.inc_by(count);
    }

    /// So many entries of flows there is room for.
    pub fn set_flow_capacity(&self, entries: u32) {
        self.flow_capacity.set(i64::from(entries));
    }

    /// So many flows hide their client, and so many belong to each Service port; the `most` busiest are shown.
    pub fn live_flows<'a>(&self, hidden: usize, services: impl Iterator<Item = (&'a ServiceName, u64)>, most: usize) {
        self.hidden_flows.set(hidden as i64);
        self.service_flows.set(services, most);
    }

    /// The flow table was looked through; what was removed, of IPv4 and of IPv6.
    pub fn collected_flows(&self, kept: usize, removed: [usize; 2], took: Duration) {
        self.flows.set(kept as i64);
        for (family, count) in model::Family::ALL.into_iter().zip(removed) {
            self.conntrack_sync.get_or_create(&ip_family(family)).observe(took.as_secs_f64());
            self.conntrack_deleted.get_or_create(&ip_family(family)).inc_by(count as u64);
            self.collected_flows.inc_by(count as u64);
        }
    }

    /// Everything in Prometheus' text format. Without a snapshot, as when the engine does not answer in time, what it
    /// would have told is missing.
    #[must_use]
    pub fn text(&self, snapshot: Option<Snapshot>) -> String {
        let mut text = String::new();
        let mut asked = Registry::default();
        asked.register_collector(Box::new(process::Process));
        if let Some(snapshot) = snapshot {
            asked.register_collector(Box::new(snapshot));
        }
        for registry in [&*self.registry, &asked] {
            // Writing to a string cannot fail.
            let _ = prometheus_text::encode(&mut text, registry);
        }
        text
    }
}

/// The label that tells families apart.
const fn ip_family(family: model::Family) -> Label<&'static str> {
    [("ip_family", family_name(family))]
}

const fn family_name(family: model::Family) -> &'static str {
    match family {
        model::Family::V4 => "IPv4",
        model::Family::V6 => "IPv6",
    }
}

/// Those of `counts` that have a series of their own: the `most` busiest, equally busy ones in order of their names.
fn busiest<K: Ord>(counts: impl IntoIterator<Item = (K, u64)>, most: usize) -> Vec<(K, u64)> {
    let mut busiest: Vec<_> = counts.into_iter().collect();
    busiest.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    busiest.truncate(most);
    busiest
}

/// kube-proxy's: 1 ms doubled up to 16 s.
fn sync_buckets() -> Histogram {
    Histogram::new((0..15).map(|i| 0.001 * 2_f64.powi(i)))
}

/// client-go's.
fn request_buckets() -> Histogram {
    Histogram::new([0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0])
}

/// kube-proxy's: finest where its promise lies.
fn programming_buckets() -> Histogram {
    let steps = (1..60).chain((60..120).step_by(5)).chain((120..=300).step_by(30));
    Histogram::new([0.25, 0.5].into_iter().chain(steps.map(f64::from)))
}

/// As a number of seconds that may be compared with a clock.
fn unix_seconds() -> f64 {
    std::time::UNIX_EPOCH.elapsed().as_ref().map_or(0.0, Duration::as_secs_f64)
}

/// A value that was read.
fn reading(value: f64) -> ConstGauge<f64> {
    ConstGauge::new(value)
}

#[cfg(test)]
pub(crate) mod tests;
