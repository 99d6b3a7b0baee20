//! The agent's HTTP servers. A port that is taken, by kube-proxy say, is waited for: traffic does not depend on it.

mod bounded;
pub mod health;
pub mod metrics;
pub mod slis;

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use axum::Router;
pub use bounded::Bounded;
use socket2::{Domain, Socket, Type};
use tokio::{net::TcpListener, time::sleep};

use crate::observe::events::{self, Event};

/// How often a port that is taken is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Connections that the kernel keeps for us while we are busy.
const BACKLOG: i32 = 128;

/// Which server.
#[derive(Clone, Copy, Debug)]
pub struct Server {
    /// For the log.
    pub name: &'static str,
    /// The reason of the event on the Node when it cannot be started.
    pub failure: &'static str,
}

/// For kubelets and load balancers.
pub const HEALTH: Server = Server { name: "/healthz", failure: "FailedToStartProxierHealthcheck" };
/// For scrapers.
pub const METRICS: Server = Server { name: "/metrics", failure: "FailedToStartMetricServer" };

/// Serves for ever.
pub async fn serve(server: Server, address: SocketAddr, router: Router, events: events::Sender) {
    let name = server.name;
    let listener = listen(server, address, &events).await;
    tracing::info!(%address, "serving {name}");
    if let Err(error) = axum::serve(Bounded::new(listener), router).await {
        tracing::error!(%error, %address, "the server for {name} ended");
    }
}

async fn listen(Server { name, failure }: Server, address: SocketAddr, events: &events::Sender) -> TcpListener {
    let mut told = None;
    loop {
        match bind(address, Stack::Dual) {
            Ok(listener) => return listener,
            // Once for each reason.
            Err(error) if told != Some(error.kind()) => {
                tracing::warn!(%address, %error, "cannot serve {name} yet; trying again every second");
                events.send(Event::cannot_serve(failure, address, &error));
                told = Some(error.kind());
            }
            Err(_) => {}
        }
        sleep(RETRY).await;
    }
}

/// What an unspecified address stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stack {
    /// Every address of the host: 0.0.0.0 answers on IPv6 too, as Go's servers do.
    Dual,
    /// Every address of its own family.
    Single,
}

/// Binds and listens. Needs a tokio runtime.
///
/// # Errors
/// When the port is taken, or the address is not this host's.
pub fn bind(address: SocketAddr, stack: Stack) -> io::Result<TcpListener> {
    let is_dual = stack == Stack::Dual && address.ip().is_unspecified();
    if !is_dual {
        return bind_socket(address, true);
    }
    let any = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), address.port());
    match bind_socket(any, false) {
        // A host without IPv6.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL)) => {
            bind_socket(address, true)
        }
        bound => bound,
    }
}

fn bind_socket(address: SocketAddr, v6_only: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(v6_only)?;
    }
    socket.set_reuse_address(true)?; // an agent that was just restarted finds its port
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}
