//! The server on 10256: who asks is a load balancer, a kubelet or a person.

use axum::{
    Router,
    http::{
        StatusCode,
        header::{CONTENT_TYPE, HeaderName, X_CONTENT_TYPE_OPTIONS},
    },
    response::{IntoResponse as _, Response},
    routing::any,
};

use crate::observe::{
    health::{Moment, Probe, SharedHealth},
    metrics::Metrics,
};

/// Its paths, and nothing else.
pub fn router(health: &SharedHealth, metrics: &Metrics) -> Router {
    let probe = |probe: Probe| {
        let (health, metrics) = (health.clone(), metrics.clone());
        any(async move || answer(&health, &metrics, probe))
    };
    Router::new()
        .route("/healthz", probe(Probe::Healthz))
        .route("/livez", probe(Probe::Livez))
        .route("/readyz", probe(Probe::Readyz))
}

fn answer(health: &SharedHealth, metrics: &Metrics, probe: Probe) -> Response {
    let answer = health.with(|health| health.answer(probe, Moment::now()));
    let code = status(answer.is_well);
    match probe {
        Probe::Healthz => metrics.answered_healthz(code.as_u16()),
        Probe::Livez => metrics.answered_livez(code.as_u16()),
        Probe::Readyz => {}
    }
    let content = if probe == Probe::Readyz { "text/plain; charset=utf-8" } else { "application/json" };
    (code, [(CONTENT_TYPE, content), NO_SNIFFING], answer.body).into_response()
}

/// What kube-proxy's servers say to browsers.
pub const NO_SNIFFING: (HeaderName, &str) = (X_CONTENT_TYPE_OPTIONS, "nosniff");

/// 200 or 503.
#[must_use]
pub const fn status(is_well: bool) -> StatusCode {
    if is_well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}
