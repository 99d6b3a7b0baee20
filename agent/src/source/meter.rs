//! Counts requests to the API, under the names that client-go's users know.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

use http::{Request, Response};
use tower::{Layer, Service};

use crate::observe::metrics::Metrics;

/// Counts the requests of a client.
#[derive(Clone, Debug)]
pub struct Meter(pub Metrics);

impl<S> Layer<S> for Meter {
    type Service = Metered<S>;

    fn layer(&self, inner: S) -> Metered<S> {
        Metered { inner, metrics: self.0.clone() }
    }
}

/// A service whose requests are counted.
#[derive(Clone, Debug)]
pub struct Metered<S> {
    inner: S,
    metrics: Metrics,
}

impl<S, B, R> Service<Request<B>> for Metered<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (method, host) = (request.method().to_string(), request.uri().authority().map(ToString::to_string));
        let (metrics, began, answer) = (self.metrics.clone(), Instant::now(), self.inner.call(request));
        Box::pin(async move {
            let answer = answer.await;
            let code = answer.as_ref().ok().map(|answer| answer.status().as_u16());
            metrics.requested(method, host.unwrap_or_default(), code, began.elapsed());
            answer
        })
    }
}
