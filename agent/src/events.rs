//! What the operator of a cluster is told on an object (`kubectl describe`), where kube-proxy tells it.

use std::{io, net::SocketAddr};

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::model::ServiceName;

/// What was tried when something is told on the Node.
const START: &str = "StartSheave";

/// The object that something is told on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Subject {
    /// A Service.
    Service(ServiceName),
    /// This node.
    Node,
}

/// What is told.
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

    /// The agent begins.
    #[must_use]
    pub fn starting() -> Self {
        let message = format!("sheave {} serves Services on this node", env!("CARGO_PKG_VERSION"));
        Self { subject: Subject::Node, is_warning: false, reason: "Starting", action: START, message }
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
