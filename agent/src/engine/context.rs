//! What the plan must know of this node.

use std::net::IpAddr;

use super::EngineOptions;
use crate::{
    model::{Family, State},
    plan::group::NodeContext,
};

/// From this node's Node object and its devices. Without a Node object, as on a host that only reads manifests, the
/// host's own global addresses stand in for the object's.
pub(super) fn of(options: &EngineOptions, state: &State, interfaces: &[IpAddr]) -> NodeContext {
    let node = state.node(&options.node);
    let addresses: Vec<IpAddr> = node.map_or_else(
        || interfaces.iter().copied().filter(|ip| is_global(*ip)).collect(),
        |node| node.addresses.clone(),
    );
    let served = Family::ALL.map(|family| options.node_ports.of_family(family, &addresses, interfaces).addresses);
    NodeContext {
        name: options.node.clone(),
        zone: node.and_then(|n| n.zone.clone()).unwrap_or_default(),
        all_addresses: state.nodes().flat_map(|n| n.addresses.iter().copied()).chain(addresses.clone()).collect(),
        addresses,
        node_port_addresses: served.into_iter().flatten().filter(|ip| !ip.is_loopback()).collect(),
        pod_cidrs: node.map(|n| n.pod_cidrs.clone()).unwrap_or_default(),
    }
}

/// Neither loopback nor of one link only.
fn is_global(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => !v4.is_loopback() && !v4.is_link_local() && !v4.is_unspecified(),
        IpAddr::V6(v6) => !v6.is_loopback() && !v6.is_unicast_link_local() && !v6.is_unspecified(),
    }
}
