//! Two nodes with a server each: who is reached through which address, and whom it sees.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::atomic::{AtomicU16, Ordering},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    client::{Client, Way},
    echo::Echo,
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
};

/// How clients of packet tests talk.
pub const WAYS: [Way; 2] = [Way::Tcp, Way::Udp];

/// The client outside.
pub const OUTSIDE: &str = "198.51.100.10";
/// The same in IPv6.
pub const OUTSIDE6: &str = "2001:db8:100::10";
/// What a masqueraded client looks like to a pod of n1: the address of the pod's device.
pub const N1: &str = "10.244.1.1";
/// The same in IPv6.
pub const N1_6: &str = "2001:db8:1::1";
/// What it looks like to a pod of another node.
pub const N1_UPLINK: &str = "192.0.2.11";
/// The same in IPv6.
pub const N1_6_UPLINK: &str = "2001:db8::11";

/// Every server is reached, no other one ever, and each sees the client at the address given; the client sees whom it
/// dialled. Each dial is a flow of its own.
///
/// # Errors
/// Whatever is otherwise.
pub fn reaches(client: &Client, way: Way, to: &str, servers: &[(&str, &str)]) -> Result<()> {
    let mut missing: BTreeSet<&str> = servers.iter().map(|(name, _)| *name).collect();
    // Of two equal choices one is missed with a probability of 2^-39.
    for _ in 0..40 {
        let bind = matches!(way, Way::Udp | Way::UdpSendto).then(|| unused_port(to));
        let dialled = client.dial_from(way, to, bind).with_context(|| format!("{way:?} {to}"))?;
        let server = servers.iter().find(|(name, _)| *name == dialled.name);
        let (name, seen) = server.with_context(|| format!("{way:?} {to} reached {}", dialled.name))?;
        ensure!(dialled.peer == to.parse()?, "{way:?} {to} shows the peer {}", dialled.peer);
        let is_seen = dialled.client.ip() == seen.parse::<IpAddr>()?;
        ensure!(is_seen, "{way:?} {to}: {name} sees {}, not {seen}", dialled.client);
        missing.remove(name);
        if missing.is_empty() {
            return Ok(());
        }
    }
    bail!("{way:?} {to} never reached {missing:?}")
}

/// Any address of the family of `like`, and a port that no datagram of this process came from, since the kernel gives a
/// port again at once, and with it the flow of an earlier dial. They are far from ephemeral, node and masquerading ports.
fn unused_port(like: &str) -> SocketAddr {
    static TURN: AtomicU16 = AtomicU16::new(0);
    let any = if like.starts_with('[') { Ipv6Addr::UNSPECIFIED.into() } else { IpAddr::from(Ipv4Addr::UNSPECIFIED) };
    SocketAddr::new(any, 2000 + TURN.fetch_add(1, Ordering::Relaxed) % 5000)
}

/// Two nodes with a pod each; servers `a` on n1 and `b` on n2 on port 8080 of TCP and UDP.
#[derive(Debug)]
pub struct Pair {
    /// The nodes.
    pub lab: Lab,
    /// 10.244.1.10
    pub a: Pod,
    /// 10.244.2.20
    pub b: Pod,
    _servers: [Echo; 2],
}

impl Pair {
    /// Virtual addresses lead to n1. `None` where the host cannot, which is told.
    ///
    /// # Errors
    /// When a namespace, an address or a server cannot be had.
    pub fn new() -> Result<Option<Self>> {
        let Some(lab) = Lab::new(2)? else { return Ok(None) };
        let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
        let ports = ["8080/TCP", "8080/UDP"];
        let _servers = [a.place.echo("a", &ports)?, b.place.echo("b", &ports)?];
        for prefix in ["10.96.0.0/16", "203.0.113.0/24", "2001:db8:96::/64", "2001:db8:203::/64"] {
            lab.route(prefix, lab.n1())?;
        }
        Ok(Some(Self { lab, a, b, _servers }))
    }

    /// A service with a node port, for TCP and UDP and both families, at 10.96.0.NUMBER, and where it is served.
    ///
    /// # Errors
    /// When a manifest cannot be written.
    pub fn service(&self, name: &str, number: u8, backends: &[&Pod], change: impl Fn(Svc) -> Svc) -> Result<()> {
        let node_port = 30_000 + u16::from(number);
        let service = Svc::new(name).ip(&format!("10.96.0.{number}")).ip(&format!("2001:db8:96::{number}"));
        let service = service.port("t", 80, "TCP").node_port(node_port).port("u", 80, "UDP").node_port(node_port);
        self.lab.apply(&[&change(service)])?;
        for family in ["IPv4", "IPv6"] {
            let mut slice = Slice::new(&format!("{name}-{}", family.to_lowercase()), name);
            slice = slice.address_type(family).port("t", 8080, "TCP").port("u", 8080, "UDP");
            for pod in backends {
                let node = if pod.v4.octets()[2] == 1 { "n1" } else { "n2" };
                let address = if family == "IPv4" { pod.v4.to_string() } else { pod.v6.to_string() };
                slice = slice.ready(&address, node);
            }
            self.lab.apply(&[&slice])?;
        }
        Ok(())
    }
}
