//! The packet path over the links that networks are made of: VLANs, tunnels without a link layer, several uplinks.

use std::fs;

use anyhow::{Context, Result};
use sheave_tests::{
    client::Way,
    lab::Lab,
    node::Node,
    objects::Svc,
    place::Place,
    skip,
    transfer::{in_both_families, near_far_seen, reached},
    tunnel,
};

/// Sets a sysctl of a network namespace.
fn sysctl(place: &Place, name: &str, value: &str) -> Result<()> {
    let (head, tail) = name.split_once(".conf.").context("a sysctl of one device")?;
    let (device, field) = tail.rsplit_once('.').context("a sysctl of one device")?; // names of VLANs have dots
    let file = format!("/proc/sys/{}/conf/{device}/{field}", head.replace('.', "/"));
    place.enter(|| fs::write(&file, value))?.with_context(|| file.clone())
}

/// The uplink is a VLAN: its parent sees the same packets, tagged, and leaves them alone.
#[test]
fn an_uplink_that_is_a_vlan() -> Result<()> {
    if let Some(lab) = Lab::new(1)?
        && let Err(why) = lab.fabric.ip("link add link br0 name br0.7 type vlan id 7")
    {
        skip(&format!("this kernel has no VLANs (CONFIG_VLAN_8021Q): {why:#}"));
        return Ok(());
    }
    in_both_families(|lab| {
        lab.fabric.ip("link add link br0 name br0.7 type vlan id 7
             link set br0.7 up
             addr add 192.0.2.1/24 dev br0.7
             addr add 2001:db8::1/64 dev br0.7 nodad
             addr del 192.0.2.1/24 dev br0
             addr del 2001:db8::1/64 dev br0")?;
        for (node, other) in [(lab.n1(), lab.n2()), (lab.n2(), lab.n1())] {
            node.host.ip("link add link eth0 name eth0.7 type vlan id 7
                 link set eth0.7 up")?;
            move_addresses(node, other, "eth0.7")?;
            node.host.ip("route replace default via 192.0.2.1
                 route replace default via 2001:db8::1")?;
        }
        Ok(())
    })
}

/// Requests come through one uplink, answers leave through another.
#[test]
fn answers_that_leave_through_another_uplink() -> Result<()> {
    in_both_families(|lab| {
        lab.fabric.ip(&format!(
            "link add second type veth peer name eth1 netns {}
             addr add 192.0.3.1/24 dev second
             addr add 2001:db8:30::1/64 dev second nodad
             link set second up",
            lab.n1().host.netns
        ))?;
        lab.n1().host.ip("addr add 192.0.3.11/24 dev eth1
             addr add 2001:db8:30::11/64 dev eth1 nodad
             link set eth1 up
             route add default via 192.0.3.1 metric 10
             route add default via 2001:db8:30::1 metric 10
             route add 198.51.100.0/24 via 192.0.3.1
             route add 2001:db8:100::/64 via 2001:db8:30::1")?;
        [&lab.n1().host, &lab.fabric].into_iter().try_for_each(without_path_filters)?;
        Ok(())
    })
}

/// The node's addresses are on a bridge, and no default route leads through it: clients are served where kube-proxy would
/// serve them.
#[test]
fn the_nodes_addresses_on_a_bridge_without_a_default_route() -> Result<()> {
    in_both_families(|lab| {
        for (node, other) in [(lab.n1(), lab.n2()), (lab.n2(), lab.n1())] {
            node.host.ip("link add br-lan type bridge
                 link set br-lan up")?;
            move_addresses(node, other, "br-lan")?;
            node.host.ip("link set eth0 master br-lan
                 route del ::/0
                 route add 198.51.100.0/24 via 192.0.2.1 dev br-lan
                 route add 2001:db8:100::/64 via 2001:db8::1 dev br-lan")?;
        }
        Ok(())
    })
}

/// Moves a node's addresses from its uplink to another device, and its routes to the other node's pods. At no time is it
/// without them: with one goes the route to the pod that names it.
fn move_addresses(node: &Node, other: &Node, device: &str) -> Result<()> {
    let (v4, v6, there) = (node.v4, node.v6, other.number);
    node.host.ip(&format!(
        "addr add {v4}/24 dev {device}
         addr add {v6}/64 dev {device} nodad
         addr del {v4}/24 dev eth0
         addr del {v6}/64 dev eth0
         route replace 10.244.{there}.0/24 via {}
         route replace 2001:db8:{there}::/64 via {}",
        other.v4, other.v6
    ))?;
    Ok(())
}

/// Answers that come back another way are no reason to drop a packet.
fn without_path_filters(place: &Place) -> Result<()> {
    let devices = place.enter(|| fs::read_dir("/proc/sys/net/ipv4/conf")?.collect::<std::io::Result<Vec<_>>>())??;
    devices.iter().try_for_each(|device| {
        sysctl(place, &format!("net.ipv4.conf.{}.rp_filter", device.file_name().to_string_lossy()), "0")
    })
}

/// The other node's pods behind a tunnel of IP packets, as WireGuard and IP in IP make one.
#[test]
fn backends_behind_a_tunnel_without_a_link_layer() -> Result<()> {
    in_both_families(|lab| {
        tunnel::dig("tun0", [&lab.n1().host, &lab.n2().host])?;
        for (node, other) in [(lab.n1(), lab.n2()), (lab.n2(), lab.n1())] {
            let (here, there) = (node.number, other.number);
            node.host.ip(&format!(
                "addr add 10.246.{here}.1/32 dev tun0
                 addr add 2001:db8:246::{here}/128 dev tun0 nodad
                 link set tun0 mtu 1400 up
                 route add 10.246.{there}.1/32 dev tun0
                 route add 2001:db8:246::{there}/128 dev tun0
                 route replace 10.244.{there}.0/24 dev tun0
                 route replace 2001:db8:{there}::/64 dev tun0"
            ))?;
        }
        Ok(())
    })
}

/// Clients come through such a tunnel: they are translated, refused by RST and ICMP, and answered.
#[test]
fn clients_behind_a_tunnel_without_a_link_layer() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = near_far_seen(&lab)?;
    let none = Svc::new("none").ip("10.96.0.4").ip("2001:db8:f::4").port("t", 80, "TCP").node_port(30004);
    lab.apply(&[&none.port("u", 80, "UDP").node_port(30004)])?;
    tunnel::dig("vpn0", [&lab.outside, &lab.n1().host])?;
    lab.outside.ip("link set vpn0 mtu 1400 up
         route add 192.0.2.11/32 dev vpn0 src 198.51.100.10
         route add 2001:db8::11/128 dev vpn0 src 2001:db8:100::10")?;
    lab.n1().host.ip("link set vpn0 mtu 1400 up
         route add default dev vpn0 metric 10
         route add ::/0 dev vpn0 metric 10
         route add 198.51.100.10/32 dev vpn0
         route add 2001:db8:100::10/128 dev vpn0")?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    reached(&lab, &a, &b)?;
    let outside = lab.outside.client()?;
    for way in [Way::Tcp, Way::Udp] {
        for to in ["192.0.2.11:30004", "[2001:db8::11]:30004"] {
            assert_eq!(outside.refusal(way, to)?, "ECONNREFUSED", "{way:?} to {to}");
        }
    }
    Ok(())
}
