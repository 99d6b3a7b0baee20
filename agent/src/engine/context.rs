//! What the plan must know of this node.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use super::EngineOptions;
use crate::{
    model::{Family, Protocol, ServiceName, State},
    plan::{group::NodeContext, node_ports::is_link_local},
};

/// From this node's Node object and its devices. Without a Node object, as on a host that only reads manifests, the
/// host's own global addresses stand in for the object's.
pub(super) fn of(
    options: &EngineOptions,
    state: &State,
    interfaces: &[IpAddr],
    api_servers: &BTreeSet<SocketAddr>,
) -> NodeContext {
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
        api_servers: published(state, api_servers),
        addresses,
        node_port_addresses: served.into_iter().flatten().filter(|ip| !ip.is_loopback()).collect(),
        pod_cidrs: node.map(|n| n.pod_cidrs.clone()).unwrap_or_default(),
    }
}

/// Whether this is the Service of the API servers.
pub(super) fn is_of_the_api(service: &ServiceName) -> bool {
    (&*service.namespace, &*service.name) == ("default", "kubernetes")
}

/// Where the API servers say that they answer, beside those that are asked.
fn published(state: &State, asked: &BTreeSet<SocketAddr>) -> BTreeSet<SocketAddr> {
    let mut all = asked.clone();
    for slice in state.slices(&ServiceName::new("default", "kubernetes")) {
        for port in slice.ports.iter().filter(|port| port.protocol == Protocol::Tcp) {
            all.extend(slice.endpoints.iter().map(|endpoint| SocketAddr::new(endpoint.ip, port.port)));
        }
    }
    all
}

/// Neither loopback nor of one link only.
fn is_global(ip: IpAddr) -> bool {
    !ip.is_loopback() && !ip.is_unspecified() && !is_link_local(ip)
}
