//! What the operator of a cluster is told on an object (`kubectl describe`), where kube-proxy tells it.

use std::io;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::model::ServiceName;

/// A warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// On which Service.
    pub service: ServiceName,
    /// One word, for machines.
    pub reason: &'static str,
    /// One word: what was tried.
    pub action: &'static str,
    /// A sentence, for people.
    pub message: String,
}

impl Event {
    /// A healthCheckNodePort cannot be served (`semantics.md` 11.1).
    #[must_use]
    pub fn cannot_listen(service: &ServiceName, port: u16, error: &io::Error) -> Self {
        Self {
            service: service.clone(),
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            message: format!("cannot listen on the healthCheckNodePort {port}: {error}"),
        }
    }
}

/// Where events go. Nobody may listen: without a cluster there is no object to tell them on.
#[derive(Clone, Debug)]
pub struct Sender(UnboundedSender<Event>);

impl Sender {
    /// Tells, if somebody listens.
    pub fn send(&self, event: Event) {
        let _ = self.0.send(event);
    }
}

/// Both ends.
#[must_use]
pub fn channel() -> (Sender, UnboundedReceiver<Event>) {
    let (send, receive) = unbounded_channel();
    (Sender(send), receive)
}
