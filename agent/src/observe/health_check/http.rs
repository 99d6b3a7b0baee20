//! The listeners themselves.

use std::{
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Router,
    http::{HeaderName, StatusCode, header::CONTENT_TYPE},
    response::IntoResponse as _,
};
use tokio::{net::TcpListener, task::JoinSet};

use super::Listen;
use crate::{
    model::ServiceName,
    observe::{
        health::{Moment, SharedHealth},
        server::{
            Bounded, Stack, bind,
            health::{NO_SNIFFING, status},
        },
    },
};

/// Lets a balancer that understands it spread by endpoints.
const WEIGHT: HeaderName = HeaderName::from_static("x-load-balancing-endpoint-weight");

/// Answers over HTTP. Needs a tokio runtime.
#[derive(Clone, Debug)]
pub struct Http {
    /// No node is fit for traffic whose agent is stuck.
    pub health: SharedHealth,
}

impl Listen for Http {
    type Listener = JoinSet<()>;

    fn listen(
        &mut self,
        service: &ServiceName,
        addresses: &[SocketAddr],
        local_ready: &Arc<AtomicUsize>,
    ) -> io::Result<JoinSet<()>> {
        let listeners: Vec<TcpListener> =
            addresses.iter().map(|address| bind(*address, Stack::Single)).collect::<io::Result<_>>()?;
        let (health, service, local_ready) = (self.health.clone(), service.clone(), local_ready.clone());
        let router = Router::new().fallback(async move || {
            let healthy = health.with(|health| health.is_healthy(Moment::now()));
            let count = local_ready.load(Ordering::Relaxed);
            let (code, body) = reply(&service, count, healthy);
            let headers = [(CONTENT_TYPE, "application/json"), NO_SNIFFING];
            (code, headers, [(WEIGHT, count.to_string())], body).into_response()
        });
        let mut serving = JoinSet::new();
        for listener in listeners {
            let server = axum::serve(Bounded::new(listener), router.clone());
            serving.spawn(async move {
                if let Err(error) = server.await {
                    tracing::error!(%error, "the server of a healthCheckNodePort ended");
                }
            });
        }
        Ok(serving)
    }

    /// A task that is aborted holds its socket until it is its turn.
    async fn close(&mut self, mut listener: JoinSet<()>) {
        listener.shutdown().await;
    }
}

/// Code and body, byte for byte kube-proxy's.
#[must_use]
pub fn reply(service: &ServiceName, local_ready: usize, healthy: bool) -> (StatusCode, String) {
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let (namespace, name) = (quoted(&service.namespace), quoted(&service.name));
    let body = format!(
        "{{\n\t\"service\": {{\n\t\t\"namespace\": {namespace},\n\t\t\"name\": {name}\n\t}},\n\
         \t\"localEndpoints\": {local_ready},\n\t\"serviceProxyHealthy\": {healthy}\n}}"
    );
    (status(local_ready > 0 && healthy), body)
}
