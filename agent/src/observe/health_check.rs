//! healthCheckNodePort: a load balancer asks whether this node has endpoints of a Service.
//!
//! One listener for each Service that has such a port. [`Servers`] decides which are open; [`Listen`] opens them.

mod http;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync::watch, time::timeout};

pub use http::{Http, reply};

use crate::{
    model::ServiceName,
    observe::events::{self, Event},
};

/// A port that is taken is tried again so often.
const RETRY: Duration = Duration::from_secs(5);

/// What this node should answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HealthChecks {
    /// Where to listen: the node-port addresses; an unspecified one stands for every address of its family.
    pub addresses: Vec<IpAddr>,
    /// For whom.
    pub services: BTreeMap<ServiceName, HealthCheck>,
}

/// One Service with a healthCheckNodePort.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    /// The port.
    pub port: u16,
    /// How many endpoints it has here that are ready ([`local_ready`](crate::model::endpoint::local_ready)).
    pub local_ready: usize,
}

/// Opens listeners.
pub trait Listen {
    /// An open one.
    type Listener;

    /// Listens on all of these addresses, or on none, and answers with what `local_ready` is then.
    ///
    /// # Errors
    /// Of the first address that could not be had.
    fn listen(
        &mut self,
        service: &ServiceName,
        addresses: &[SocketAddr],
        local_ready: &Arc<AtomicUsize>,
    ) -> io::Result<Self::Listener>;

    /// Closes one: its addresses are free from then on.
    fn close(&mut self, listener: Self::Listener) -> impl Future<Output = ()> + Send;
}

/// The listeners of a node.
pub struct Servers<L: Listen> {
    listen: L,
    addresses: Vec<IpAddr>,
    open: BTreeMap<ServiceName, Server<L::Listener>>,
}

struct Server<T> {
    port: u16,
    local_ready: Arc<AtomicUsize>,
    listener: T,
}

/// A listener that could not be opened; the next sync tries again.
#[derive(Debug)]
pub struct Failed {
    /// Whose.
    pub service: ServiceName,
    /// Which.
    pub port: u16,
    /// Why.
    pub error: io::Error,
}

impl<L: Listen> Servers<L> {
    /// None are open.
    pub const fn new(listen: L) -> Self {
        Self { listen, addresses: Vec::new(), open: BTreeMap::new() }
    }

    /// Brings everything in line: Services first, then counts.
    pub async fn sync(&mut self, wanted: &HealthChecks) -> Vec<Failed> {
        let HealthChecks { addresses, services } = wanted;
        let ports = services.iter().map(|(name, c)| (name.clone(), c.port)).collect();
        let failed = self.sync_services(addresses, &ports).await;
        self.sync_endpoints(&services.iter().map(|(name, c)| (name.clone(), c.local_ready)).collect());
        failed
    }

    /// Closes what is gone, then opens what is new; a changed port is both, and counts from 0 again.
    pub async fn sync_services(&mut self, addresses: &[IpAddr], ports: &BTreeMap<ServiceName, u16>) -> Vec<Failed> {
        let have_moved = self.addresses != addresses;
        let is_gone =
            |name: &ServiceName, server: &mut Server<L::Listener>| have_moved || ports.get(name) != Some(&server.port);
        for (_, server) in self.open.extract_if(.., is_gone) {
            self.listen.close(server.listener).await;
        }
        self.addresses = addresses.to_vec();
        let mut failed = Vec::new();
        for (service, port) in ports {
            if self.open.contains_key(service) {
                continue;
            }
            let local_ready = Arc::new(AtomicUsize::new(0));
            let sockets: Vec<_> = self.addresses.iter().map(|ip| SocketAddr::new(*ip, *port)).collect();
            match self.listen.listen(service, &sockets, &local_ready) {
                Ok(listener) => {
                    self.open.insert(service.clone(), Server { port: *port, local_ready, listener });
                }
                Err(error) => failed.push(Failed { service: service.clone(), port: *port, error }),
            }
        }
        failed
    }

    /// Sets the counts of Services that have a listener; those without a count have no endpoint.
    pub fn sync_endpoints(&mut self, counts: &BTreeMap<ServiceName, usize>) {
        for (service, server) in &self.open {
            server.local_ready.store(counts.get(service).copied().unwrap_or(0), Ordering::Relaxed);
        }
    }
}

/// Serves what is wanted, for as long as somebody says what that is.
pub async fn follow(http: Http, mut wanted: watch::Receiver<HealthChecks>, events: events::Sender) {
    let mut servers = Servers::new(http);
    let mut told = BTreeMap::new();
    loop {
        let now = wanted.borrow_and_update().clone();
        let failed = servers.sync(&now).await;
        told.retain(|service, _| failed.iter().any(|f| f.service == *service));
        for Failed { service, port, error } in &failed {
            // Once for each reason.
            let reason = (*port, error.kind());
            if told.insert(service.clone(), reason) != Some(reason) {
                tracing::warn!(%service, port, %error, "cannot listen on the healthCheckNodePort; trying again");
                events.send(Event::cannot_listen(service, *port, error));
            }
        }
        let changed = if failed.is_empty() {
            wanted.changed().await
        } else {
            timeout(RETRY, wanted.changed()).await.unwrap_or(Ok(()))
        };
        if changed.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests;
