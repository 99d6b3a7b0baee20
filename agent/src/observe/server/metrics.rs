//! The server on 10249: metrics, and what is running here with which settings.

use std::time::Duration;

use axum::{Router, extract::State, http::header::CONTENT_TYPE, response::IntoResponse, routing::get};
use prometheus_client::encoding::prometheus_text;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};

use super::{health::NO_SNIFFING, slis::Slis};
use crate::{
    api::Request,
    observe::metrics::{Metrics, Snapshot},
};

/// The engine answers between two events. If it does not, what else is known is better than no answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Neither iptables, ipvs nor nftables: whoever reads it must not mistake us for one of them.
const PROXY_MODE: &str = "sheave";

/// Where metrics come from.
#[derive(Clone, Debug)]
pub struct Exporter {
    /// What is counted.
    pub metrics: Metrics,
    /// Where the rest is asked for.
    pub requests: mpsc::Sender<Request>,
    /// At most so many services, and so many backends, are told apart by their connections.
    pub series: usize,
    /// What `/configz` shows, JSON.
    pub configuration: String,
    /// What `/metrics/slis` shows.
    pub slis: Slis,
}

/// Its paths.
pub fn router(exporter: Exporter) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/metrics/slis", get(slis))
        .route("/healthz", get(healthy))
        .route("/proxyMode", get(async || ([NO_SNIFFING], PROXY_MODE)))
        .route("/configz", get(configuration))
        .with_state(exporter)
}

async fn healthy(State(exporter): State<Exporter>) -> impl IntoResponse {
    exporter.slis.pinged();
    ([NO_SNIFFING], "ok")
}

async fn slis(State(exporter): State<Exporter>) -> impl IntoResponse {
    ([(CONTENT_TYPE, prometheus_text::CONTENT_TYPE), NO_SNIFFING], exporter.slis.text())
}

async fn configuration(State(exporter): State<Exporter>) -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json"), NO_SNIFFING], exporter.configuration)
}

async fn metrics(State(exporter): State<Exporter>) -> impl IntoResponse {
    let snapshot = exporter.snapshot().await;
    ([(CONTENT_TYPE, prometheus_text::CONTENT_TYPE), NO_SNIFFING], exporter.metrics.text(snapshot))
}

impl Exporter {
    async fn snapshot(&self) -> Option<Snapshot> {
        let (reply, answer) = oneshot::channel();
        let ask = async {
            self.requests.send(Request::Metrics { series: self.series, reply }).await.ok()?;
            answer.await.ok()
        };
        timeout(PATIENCE, ask).await.ok().flatten()
    }
}
