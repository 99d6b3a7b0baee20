//! The network devices of this host, live: what they are, and what of the packet path each one needs.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use futures::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use rtnetlink::{
    Handle, MulticastGroup, RouteMessageBuilder, new_connection, new_multicast_connection,
    packet_core::NetlinkPayload,
    packet_route::{
        RouteNetlinkMessage,
        address::{AddressAttribute, AddressHeaderFlags, AddressScope},
        link::{InfoKind, InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage},
        route::{RouteAttribute, RouteMessage},
    },
};
use tokio::sync::watch;

use crate::datapath::host::addresses::{LEAD_NOWHERE, tell_if_new};

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Interface index.
    pub index: u32,
    /// Name.
    pub name: String,
    /// What it is.
    pub nature: Nature,
    /// A default route leads through it.
    pub has_default_route: bool,
    /// Its addresses of global scope, none of one that leads nowhere: deprecated ones last, else the oldest first.
    pub addresses: Vec<IpAddr>,
}

/// What a device is, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nature {
    /// Loopback, a device that leads nowhere, or a port of a bridge or bond: what it carries passes another device too,
    /// or nobody.
    None,
    /// Of a link layer that the programs cannot read, such as InfiniBand's.
    Unreadable,
    /// Without a link layer: a tunnel of IP packets, to other nodes' workloads most of the time.
    Tunnel,
    /// A virtual device such as workloads hang on.
    Workload,
    /// A virtual device that leads to other nodes' workloads.
    Overlay,
    /// A network card, or what stands for one.
    Uplink,
}

/// Which programs a device gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Clients from outside this node are behind it.
    Clients,
    /// Only workloads whose sockets we see, or other nodes' workloads.
    Workloads,
}

impl Device {
    /// Whether clients come through it: through those that the operator `named`, if there are any; else through network
    /// cards, whatever has a default route, and whatever has an address of this `node`'s object, where kube-proxy would
    /// serve them, too.
    fn is_for_clients(&self, named: &[String], node: &BTreeSet<IpAddr>) -> bool {
        if named.is_empty() {
            self.has_default_route
                || self.nature == Nature::Uplink
                || self.addresses.iter().any(|address| node.contains(address))
        } else {
            named.contains(&self.name)
        }
    }

    /// The programs that this device needs, whether it can have them or is [unreadable](Nature::Unreadable); `None` =
    /// none.
    #[must_use]
    pub fn role(&self, named: &[String], node: &BTreeSet<IpAddr>) -> Option<Role> {
        let is_for_clients = self.is_for_clients(named, node);
        match self.nature {
            Nature::None => None,
            Nature::Unreadable => is_for_clients.then_some(Role::Clients),
            Nature::Tunnel | Nature::Workload | Nature::Overlay | Nature::Uplink => {
                Some(if is_for_clients { Role::Clients } else { Role::Workloads })
            }
        }
    }
}

/// Follows all devices in the calling thread's network namespace. The receiver holds the first answer when this
/// returns.
///
/// # Errors
/// When netlink cannot be used.
pub async fn follow() -> anyhow::Result<watch::Receiver<Vec<Device>>> {
    let groups = [
        MulticastGroup::Link,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
    ];
    let (changes, subscription, mut messages) = new_multicast_connection(&groups)?;
    tokio::spawn(changes);
    let (requests, handle, _) = new_connection()?;
    tokio::spawn(requests);
    let (tell, told) = watch::channel(list(&handle).await?);
    tokio::spawn(async move {
        let _keeps_the_subscription = subscription;
        while let Some((first, _)) = messages.next().await {
            let mut matters = is_of_interest(&first.payload);
            // What changed does not matter, and several changes come at once: ask for all.
            while let Some((more, _)) = messages.next().now_or_never().flatten() {
                matters |= is_of_interest(&more.payload);
            }
            if !matters {
                continue;
            }
            match list(&handle).await {
                Ok(devices) => drop(tell_if_new(&tell, devices)),
                Err(error) => tracing::warn!(%error, "cannot list this host's network devices"),
            }
        }
    });
    Ok(told)
}

/// Routes come and go by the thousand; only default routes matter.
fn is_of_interest(message: &NetlinkPayload<RouteNetlinkMessage>) -> bool {
    match message {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route)) => {
            is_default(route)
        }
        _ => true,
    }
}

fn is_default(route: &RouteMessage) -> bool {
    route.header.destination_prefix_length == 0
}

async fn list(handle: &Handle) -> Result<Vec<Device>, rtnetlink::Error> {
    let mut devices = BTreeMap::new();
    let mut links = handle.link().get().execute();
    while let Some(link) = links.try_next().await? {
        devices.insert(link.header.index, device(&link));
    }
    let mut found: BTreeMap<u32, Vec<(IpAddr, bool)>> = BTreeMap::new();
    let mut addresses = handle.address().get().execute();
    while let Some(message) = addresses.try_next().await? {
        let unusable = AddressHeaderFlags::Tentative | AddressHeaderFlags::Dadfailed;
        if message.header.scope != AddressScope::Universe || message.header.flags.intersects(unusable) {
            continue;
        }
        // On point-to-point links IFA_ADDRESS is the other end; IFA_LOCAL is ours where it is given.
        let find = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| message.attributes.iter().find_map(wanted);
        let local = find(|a| if let AddressAttribute::Local(ip) = a { Some(*ip) } else { None });
        let any = find(|a| if let AddressAttribute::Address(ip) = a { Some(*ip) } else { None });
        if let Some(ip) = local.or(any) {
            let is_deprecated = message.header.flags.contains(AddressHeaderFlags::Deprecated);
            found.entry(message.header.index).or_default().push((ip, is_deprecated));
        }
    }
    for (index, addresses) in found {
        if let Some(device) = devices.get_mut(&index).filter(|device| !leads_nowhere(&device.name)) {
            device.addresses = by_merit(addresses);
        }
    }
    let v4 = RouteMessageBuilder::<std::net::Ipv4Addr>::new().build();
    let v6 = RouteMessageBuilder::<std::net::Ipv6Addr>::new().build();
    for family in [v4, v6] {
        let mut routes = handle.route().get(family).execute();
        // A host without IPv6 answers with an error.
        while let Ok(Some(route)) = routes.try_next().await {
            if is_default(&route) {
                for index in leaving_through(&route) {
                    if let Some(device) = devices.get_mut(&index) {
                        device.has_default_route = true;
                    }
                }
            }
        }
    }
    Ok(devices.into_values().collect())
}

/// Addresses as the kernel lists them, and whether they are deprecated: in the order in which they may stand for the
/// device. One that came later, such as a balancer's that moves between nodes, is no substitute for the node's own.
fn by_merit(listed: Vec<(IpAddr, bool)>) -> Vec<IpAddr> {
    // IPv4 addresses are listed oldest first, IPv6 newest first.
    let (mut addresses, v6): (Vec<_>, Vec<_>) = listed.into_iter().partition(|(ip, _)| ip.is_ipv4());
    addresses.extend(v6.into_iter().rev());
    addresses.sort_by_key(|(_, is_deprecated)| *is_deprecated);
    addresses.into_iter().map(|(ip, _)| ip).collect()
}

fn leads_nowhere(name: &str) -> bool {
    LEAD_NOWHERE.contains(&name)
}

fn leaving_through(route: &RouteMessage) -> Vec<u32> {
    let mut found = Vec::new();
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => found.push(*index),
            RouteAttribute::MultiPath(hops) => found.extend(hops.iter().map(|hop| hop.interface_index)),
            _ => {}
        }
    }
    found
}

fn device(link: &LinkMessage) -> Device {
    let mut name = String::new();
    let (mut kind, mut port) = (None, None);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name.clone_from(text),
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(is) => kind = Some(is),
                        LinkInfo::PortKind(is) => port = Some(is),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let nature = if link.header.flags.contains(LinkFlags::Loopback) || leads_nowhere(&name) {
        Nature::None
    } else {
        nature(kind, port, link.header.link_layer_type)
    };
    Device { index: link.header.index, name, nature, has_default_route: false, addresses: Vec::new() }
}

fn nature(kind: Option<&InfoKind>, port: Option<&InfoPortKind>, layer: LinkLayerType) -> Nature {
    if matches!(port, Some(InfoPortKind::Bridge | InfoPortKind::Bond | InfoPortKind::Team)) {
        return Nature::None;
    }
    match layer {
        LinkLayerType::Ether => {}
        // Packets of these begin with the IP header at both hooks; of GRE without a fixed remote with the outer one, which
        // the programs leave alone.
        LinkLayerType::None
        | LinkLayerType::Rawip
        | LinkLayerType::Ppp
        | LinkLayerType::Tunnel
        | LinkLayerType::Tunnel6
        | LinkLayerType::Sit
        | LinkLayerType::Ipgre
        | LinkLayerType::Ip6gre => return Nature::Tunnel,
        _ => return Nature::Unreadable,
    }
    match kind {
        None | Some(InfoKind::Vlan | InfoKind::Bond | InfoKind::Team | InfoKind::MacVlan | InfoKind::IpVlan) => {
            Nature::Uplink
        }
        Some(InfoKind::Vxlan | InfoKind::Geneve | InfoKind::GreTap | InfoKind::GreTap6) => Nature::Overlay,
        Some(_) => Nature::Workload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_came_later_or_is_deprecated_does_not_stand_for_its_device() {
        for (row, listed, expected) in [
            ("IPv4, oldest first", &["192.0.2.1", "192.0.2.2"][..], &["192.0.2.1", "192.0.2.2"][..]),
            ("IPv6, newest first", &["2001:db8::2", "2001:db8::1"], &["2001:db8::1", "2001:db8::2"]),
            ("deprecated", &["192.0.2.1 -", "192.0.2.2"], &["192.0.2.2", "192.0.2.1"]),
            ("deprecated, the oldest", &["2001:db8::2", "2001:db8::1 -"], &["2001:db8::2", "2001:db8::1"]),
            ("nothing else", &["2001:db8::1 -"], &["2001:db8::1"]),
        ] {
            let listed = listed.iter().map(|text| match text.strip_suffix(" -") {
                Some(text) => (text.parse().expect(row), true),
                None => (text.parse().expect(row), false),
            });
            let expected: Vec<IpAddr> = expected.iter().map(|text| text.parse().expect(row)).collect();
            assert_eq!(by_merit(listed.collect()), expected, "{row}");
        }
    }

    #[test]
    fn clients_come_through_cards_default_routes_and_the_nodes_addresses_unless_devices_are_named() {
        let (clients, workloads) = (Some(Role::Clients), Some(Role::Workloads));
        let (ether, none) = (LinkLayerType::Ether, LinkLayerType::None);
        let of = |kind, port, layer| nature(kind, port, layer);
        let (alone, default, node) = ((false, "10.244.1.1"), (true, "10.244.1.1"), (false, "192.0.2.11"));
        let cases = [
            ("a network card", of(None, None, ether), alone, clients, workloads),
            ("a VLAN", of(Some(&InfoKind::Vlan), None, ether), alone, clients, workloads),
            ("a pod's veth", of(Some(&InfoKind::Veth), None, ether), alone, workloads, workloads),
            ("a veth that is an uplink", of(Some(&InfoKind::Veth), None, ether), default, clients, workloads),
            ("a bridge of pods", of(Some(&InfoKind::Bridge), None, ether), alone, workloads, workloads),
            ("a bridge over the uplink", of(Some(&InfoKind::Bridge), None, ether), default, clients, workloads),
            ("a bridge with the node's address", of(Some(&InfoKind::Bridge), None, ether), node, clients, workloads),
            ("its port", of(None, Some(&InfoPortKind::Bridge), ether), node, None, None),
            ("a bond's port", of(None, Some(&InfoPortKind::Bond), ether), alone, None, None),
            ("a port of a VRF", of(None, Some(&InfoPortKind::Vrf), ether), alone, clients, workloads),
            ("an overlay", of(Some(&InfoKind::Vxlan), None, ether), alone, workloads, workloads),
            ("an overlay with the node's address", of(Some(&InfoKind::Vxlan), None, ether), node, clients, workloads),
            ("WireGuard", of(Some(&InfoKind::Wireguard), None, none), alone, workloads, workloads),
            ("WireGuard, a default route", of(Some(&InfoKind::Wireguard), None, none), default, clients, workloads),
            ("WireGuard, the node's address", of(Some(&InfoKind::Wireguard), None, none), node, clients, workloads),
            ("IP in IP", of(None, None, LinkLayerType::Tunnel), alone, workloads, workloads),
            ("GRE", of(None, None, LinkLayerType::Ipgre), alone, workloads, workloads),
            ("GRE over IPv6", of(None, None, LinkLayerType::Ip6gre), default, clients, workloads),
        ];
        let node = BTreeSet::from([IpAddr::from([192, 0, 2, 11])]);
        for (name, nature, (has_default_route, address), automatic, others_named) in cases {
            let addresses = vec![address.parse().expect(name)];
            let device = Device { index: 7, name: "x".into(), nature, has_default_route, addresses };
            assert_eq!(device.role(&[], &node), automatic, "{name}");
            assert_eq!(device.role(&["y".into()], &node), others_named, "{name}, another one is named");
            let named = others_named.map(|_| Role::Clients);
            assert_eq!(device.role(&["x".into(), "y".into()], &node), named, "{name}, named");
        }

        let nature = of(None, None, LinkLayerType::Infiniband);
        for (row, address, named, expected) in [
            ("with the node's address", "192.0.2.11", &[][..], clients),
            ("without", "192.0.2.99", &[], None),
            ("named", "192.0.2.99", &["x".to_owned()], clients),
            ("another one is named", "192.0.2.11", &["y".to_owned()], None),
        ] {
            let addresses = vec![address.parse().expect(row)];
            let device = Device { index: 7, name: "x".into(), nature, has_default_route: false, addresses };
            assert_eq!(device.role(named, &node), expected, "what we cannot read, {row}");
        }
    }
}
