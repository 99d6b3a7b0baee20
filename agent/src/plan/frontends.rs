//! What a group answers on.

use std::{
    collections::HashSet,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use sheave_ebpf::{
    frontend::{
        FrontendKey, KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_LOOPBACK, KIND_NODE_PORT,
        KIND_UNKNOWN_PORT,
    },
    proto,
};

use super::group::Group;
use crate::model::Family;

/// The loopback address of a family: the programs look up every address that means "this host" under it.
const fn loopback(family: Family) -> IpAddr {
    match family {
        Family::V4 => IpAddr::V4(Ipv4Addr::LOCALHOST),
        Family::V6 => IpAddr::V6(Ipv6Addr::LOCALHOST),
    }
}

/// The frontends of a group with their `KIND_…`. An address that has several roles keeps the first of: ClusterIP,
/// load balancer, external IP, NodePort (6.4).
pub(super) fn of(group: &Group<'_>) -> Vec<(FrontendKey, u32)> {
    let mut frontends: Vec<(FrontendKey, u32)> = Vec::new();
    let mut known = HashSet::new();
    let mut put = |ip: IpAddr, port: u16, proto: u8, kind: u32| {
        let key = FrontendKey { addr: ip.into(), port: port.to_be(), proto, zero: 0 };
        if known.insert(key) {
            frontends.push((key, kind));
        }
    };
    let mut add = |ip, port, kind| put(ip, port, group.port.protocol.number(), kind);

    let port = group.port.port;
    add(group.cluster_ip, port, KIND_CLUSTER_IP);
    group.load_balancer_ips().for_each(|ip| add(ip, port, KIND_LOAD_BALANCER));
    group.external_ips().for_each(|ip| add(ip, port, KIND_EXTERNAL_IP));

    let node_port = group.port.node_port;
    if node_port != 0 {
        // On any other address this number is none of ours.
        let of_family = |ip: &&IpAddr| Family::of(**ip) == group.family && !ip.is_loopback();
        group.node.node_port_addresses.iter().filter(of_family).for_each(|ip| add(*ip, node_port, KIND_NODE_PORT));
        if group.options.loopback_node_ports {
            add(loopback(group.family), node_port, KIND_LOOPBACK);
        }
    }

    // A node's address is never guarded: everything else on that node would be refused.
    let nodes = [&group.node.all_addresses, &group.node.addresses, &group.node.node_port_addresses];
    let is_virtual = |ip: &IpAddr| !nodes.iter().any(|addresses| addresses.contains(ip));
    if group.options.refuse_unknown_ports && is_virtual(&group.cluster_ip) {
        put(group.cluster_ip, 0, 0, KIND_UNKNOWN_PORT);
    }
    if group.options.answer_pings {
        let icmp = if group.family == Family::V4 { proto::ICMP } else { proto::ICMPV6 };
        let all = [group.cluster_ip].into_iter().chain(group.load_balancer_ips()).chain(group.external_ips());
        all.filter(is_virtual).for_each(|ip| put(ip, 0, icmp, KIND_UNKNOWN_PORT));
    }
    frontends
}
