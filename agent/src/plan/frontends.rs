//! What a group answers on.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use sheave_ebpf::{
    frontend::{FROM_OUTSIDE, FrontendKey},
    proto,
};

use super::{
    group::{Group, Keeper},
    kind::Kind,
};
use crate::model::{Family, Protocol};

/// The loopback address of a family: the programs look up every address that means "this host" under it.
const fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// What a group gets, and what somebody else keeps, each with its kind.
#[derive(Default)]
pub(super) struct Frontends {
    pub(super) served: Vec<(FrontendKey, Kind)>,
    pub(super) kept: Vec<(FrontendKey, Kind, Keeper)>,
}

/// The frontends of a group. An address that has several roles keeps the first of: ClusterIP, load balancer, external
/// IP, NodePort.
pub(super) fn of(group: &Group<'_>) -> Frontends {
    let mut frontends = Frontends::default();
    let mut known = HashSet::new();
    let mut put = |ip: IpAddr, port: u16, proto: u8, kind: Kind| {
        let key = FrontendKey { addr: ip.into(), port: port.to_be(), proto, zero: 0 };
        if !known.insert(key) {
            return;
        }
        match kind.is_external().then(|| keeper(group, ip, port, proto)).flatten() {
            Some(keeper) => frontends.kept.push((key, kind, keeper)),
            None => frontends.served.push((key, kind)),
        }
    };
    let mut add = |ip, port, kind| put(ip, port, group.port.protocol.number(), kind);

    let port = group.port.port;
    add(group.cluster_ip, port, Kind::ClusterIp);
    group.load_balancer_ips().for_each(|ip| add(ip, port, Kind::LoadBalancer));
    group.external_ips().for_each(|ip| add(ip, port, Kind::ExternalIp));

    let node_port = group.port.node_port;
    if node_port != 0 {
        // On any other address this number is none of ours.
        let of_family = |ip: &&IpAddr| Family::of(**ip) == group.family && !ip.is_loopback();
        group.node.node_port_addresses.iter().filter(of_family).for_each(|ip| add(*ip, node_port, Kind::NodePort));
        if group.options.loopback_node_ports {
            add(loopback(group.family), node_port, Kind::Loopback);
        }
    }

    // A node's address is never guarded: everything else on that node would be refused.
    let is_virtual = |ip: &IpAddr| !is_a_nodes(group, *ip);
    if group.options.refuse_unknown_ports && is_virtual(&group.cluster_ip) {
        put(group.cluster_ip, 0, 0, Kind::UnknownPort);
    }
    if group.options.refuse_unknown_ports {
        // F31: inside clients may mean whoever has the address in the network, so only packets from outside are judged.
        let vips = group.load_balancer_ips().chain(group.external_ips()).filter(|ip| *ip != group.cluster_ip);
        vips.filter(is_virtual).for_each(|ip| put(ip, 0, FROM_OUTSIDE, Kind::UnknownPort));
    }
    if group.options.answer_pings {
        let icmp = if group.family == Family::V4 { proto::ICMP } else { proto::ICMPV6 };
        let all = [group.cluster_ip].into_iter().chain(group.load_balancer_ips()).chain(group.external_ips());
        all.filter(is_virtual).for_each(|ip| put(ip, 0, icmp, Kind::UnknownPort));
    }
    frontends
}

/// Who answers there already and must go on to. All else of a node may be taken, as with kube-proxy: ServiceLB publishes
/// the nodes' own addresses as load-balancer addresses.
fn keeper(group: &Group<'_>, ip: IpAddr, port: u16, proto: u8) -> Option<Keeper> {
    if proto != Protocol::Tcp.number() {
        return None;
    }
    if group.node.api_servers.contains(&SocketAddr::new(ip, port)) {
        return Some(Keeper::ApiServer);
    }
    (group.options.node_agent_ports.contains(&port) && is_a_nodes(group, ip)).then_some(Keeper::NodeAgent)
}

fn is_a_nodes(group: &Group<'_>, ip: IpAddr) -> bool {
    let node = group.node;
    node.all_addresses.contains(&ip) || node.addresses.contains(&ip) || node.node_port_addresses.contains(&ip)
}
