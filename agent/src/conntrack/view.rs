//! Flows as people see them.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use sheave_ebpf::{
    addr::Addr,
    conntrack::{FLAG_MASQUERADE, Flow, Phase, ROLE_DIAL, Tuple, seen},
    names::{ServiceName, unpad},
};

use super::ReadFlows;
use crate::lb;

/// A flow from a client outside to a backend. Contract: fields may be added, never renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowView {
    /// TCP, UDP or SCTP.
    pub protocol: String,
    /// The client's address and port.
    pub client: SocketAddr,
    /// What it dialled.
    pub frontend: SocketAddr,
    /// Where it is served.
    pub backend: SocketAddr,
    /// What the backend sees in place of the client: this node, or another port of the client; null = the client.
    pub masqueraded_as: Option<SocketAddr>,
    /// "namespace/name" of the Service, where it is known.
    pub service: Option<String>,
    /// opening, open, closing or closed.
    pub state: String,
    /// Seconds since it was opened.
    pub age: u32,
    /// Seconds since the last packet.
    pub idle: u32,
}

/// The flows among `entries`, in order of their frontend and client. `now` in boot-time seconds.
#[must_use]
pub fn views(
    now: u32,
    entries: &[(Tuple, Flow)],
    table: &impl ReadFlows,
    name: &dyn Fn(u32) -> Option<ServiceName>,
) -> Vec<FlowView> {
    let dialled = entries.iter().filter(|(_, flow)| flow.role() == ROLE_DIAL);
    let mut flows: Vec<_> = dialled.map(|(tuple, flow)| view(now, tuple, flow, table, name)).collect();
    flows.sort_by(|a, b| (a.frontend, &a.protocol, a.client).cmp(&(b.frontend, &b.protocol, b.client)));
    flows
}

fn view(
    now: u32,
    tuple: &Tuple,
    flow: &Flow,
    table: &impl ReadFlows,
    name: &dyn Fn(u32) -> Option<ServiceName>,
) -> FlowView {
    let reply = tuple.reply(flow);
    let replies = table.flow(&reply).map_or(0, |reply| reply.seen);
    let seen_as = if flow.flags & FLAG_MASQUERADE != 0 {
        table.flow(&reply.reversed()).map(|flow| socket(&flow.to, flow.to_port))
    } else {
        (flow.other_port != tuple.src_port).then(|| socket(&tuple.src, flow.other_port))
    };
    let last = seen::time(flow.seen).max(seen::time(replies));
    let state = match Phase::of(tuple.proto, seen::flags(flow.seen), seen::flags(replies)) {
        Phase::Opening => "opening",
        Phase::Answered | Phase::Open => "open",
        Phase::Closing => "closing",
        Phase::Closed => "closed",
    };
    FlowView {
        protocol: lb::protocol(tuple.proto),
        client: socket(&tuple.src, tuple.src_port),
        frontend: socket(&tuple.dst, tuple.dst_port),
        backend: socket(&flow.to, flow.to_port),
        masqueraded_as: seen_as,
        service: name(flow.service).map(|n| format!("{}/{}", unpad(&n.namespace), unpad(&n.name))),
        state: state.to_owned(),
        age: now.saturating_sub(flow.created),
        idle: now.saturating_sub(last),
    }
}

fn socket(addr: &Addr, port: u16) -> SocketAddr {
    SocketAddr::new(IpAddr::from(*addr), u16::from_be(port))
}
