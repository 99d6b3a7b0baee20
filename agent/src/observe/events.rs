//! Events: what `kubectl describe` shows the operator on a Service or Node, with kube-proxy's reasons.

use std::{io, net::SocketAddr};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::model::ServiceName;

/// The action of events on the Node.
const START: &str = "StartSheave";

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A Service.
    Service(ServiceName),
    /// This node.
    Node,
}

/// One event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// On which object.
    pub subject: Subject,
    /// Somebody may have to do something.
    pub is_warning: bool,
    /// One word, for machines.
    pub reason: &'static str,
    /// One word: what was tried.
    pub action: &'static str,
    /// A sentence, for people.
    pub message: String,
}

impl Event {
    /// A healthCheckNodePort cannot be served.
    #[must_use]
    pub fn cannot_listen(service: &ServiceName, port: u16, error: &io::Error) -> Self {
        Self {
            subject: Subject::Service(service.clone()),
            is_warning: true,
            reason: "FailedToStartServiceHealthcheck",
            action: "Listen",
            message: format!("cannot listen on the healthCheckNodePort {port}: {error}"),
        }
    }

    /// A server of the agent's own cannot be started yet; the reason is kube-proxy's.
    #[must_use]
    pub fn cannot_serve(reason: &'static str, address: SocketAddr, error: &io::Error) -> Self {
        let message = format!("cannot listen on {address} yet: {error}");
        Self { subject: Subject::Node, is_warning: true, reason, action: START, message }
    }

    /// The agent starts.
    #[must_use]
    pub fn starting() -> Self {
        let message = format!("sheave {} serves Services on this node", env!("CARGO_PKG_VERSION"));
        Self { subject: Subject::Node, is_warning: false, reason: "Starting", action: START, message }
    }
}

/// Where events go. There may be no listener: without a cluster there are no objects to attach them to.
#[derive(Clone, Debug)]
pub struct Sender(UnboundedSender<Event>);

impl Sender {
    /// Sends it, if somebody listens.
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
