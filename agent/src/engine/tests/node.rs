//! What follows from Node objects. Nothing waits for them, and every change takes effect at once.

use std::collections::BTreeMap;

use super::{Engine, Fake, OWN, Update, empty_tables, engine, gone, node_with, put, rows, slice, svc};
use crate::{model::ServiceCidr, options::PodDetection};

fn node(ips: &[&str], zone: &str, pod_cidrs: &[&str]) -> Update {
    Update::Node(Box::new(node_with(OWN, ips, zone, pod_cidrs)))
}

/// A node port, and a load balancer's address for this node's pods.
fn start(nodes: Vec<Update>) -> Engine<Fake> {
    let mut engine = engine(empty_tables());
    let own = ["192.0.2.11", "192.0.2.111", "192.168.1.1", "192.168.1.10", "127.0.0.1"];
    engine.set_interfaces(own.iter().map(|ip| ip.parse().expect("an address")).collect());
    let service = svc("t/a", "10.96.0.1").port("80/TCP np 30080").kind("LoadBalancer");
    let service = service.ingress("203.0.113.1", None).ranges(&["10.244.0.0/16"]);
    let lists = [Update::Services(vec![service.build()]), Update::Slices(vec![]), Update::Nodes(vec![])];
    let slices = [slice("t/a-1", "a", "8080/TCP", ".1 R")];
    lists.into_iter().chain(slices).chain(nodes).for_each(|update| engine.update(update));
    assert!(engine.flush());
    engine
}

/// Where the node port answers, and this node's pod networks.
fn known(engine: &Engine<Fake>) -> (String, String) {
    let rows = rows(engine.datapath());
    let node_ports = rows.keys().filter(|(address, port, ..)| *port == 30080 && !address.starts_with("127."));
    let addresses: Vec<_> = node_ports.map(|(address, ..)| address.as_str()).filter(|a| *a != "::1").collect();
    let pods: Vec<_> = engine.context.pod_cidrs.iter().map(ToString::to_string).collect();
    (addresses.join(" "), pods.join(" "))
}

#[test]
fn the_node_object_is_not_waited_for() {
    let (ip, pods) = ("192.168.1.10", "10.0.0.0/24");
    for (id, updates, addresses, pod_cidrs) in [
        ("ND-1, ND-2: never there; the host's own addresses stand in", vec![], "192.0.2.11", ""),
        ("ND-3: without address", vec![node(&[], "", &[])], "", ""),
        ("ND-4: gets one", vec![node(&[], "", &[]), node(&[ip], "", &[])], ip, ""),
        ("ND-5: no pod network", vec![node(&[ip], "", &[])], ip, ""),
        (
            "ND-6: the newest object",
            vec![node(&[ip], "", &[]), node(&["192.168.1.1"], "", &[pods])],
            "192.168.1.1",
            pods,
        ),
        ("ND-7: no address", vec![node(&[], "", &[pods])], "", pods),
    ] {
        let engine = start(updates);
        assert_eq!(known(&engine), (addresses.to_owned(), pod_cidrs.to_owned()), "{id}");
        assert!(engine.is_ready(), "{id}");
    }
}

#[test]
fn a_changed_node_is_taken_up_live() {
    let (ip, pods) = ("192.0.2.11", "10.244.1.0/24");
    let first = || node(&[ip], "zone-a", &[pods]);
    let mut engine = start(vec![first()]);
    for (id, update, addresses, pod_cidrs, writes) in [
        ("NC-1: the same", first(), ip, pods, false),
        ("NC-2: another address", node(&["192.0.2.111"], "zone-a", &[pods]), "192.0.2.111", pods, true),
        ("NC-2: back", first(), ip, pods, true),
        ("NC-4: other pods, outside of the ranges", node(&[ip], "zone-a", &["10.9.0.0/24"]), ip, "10.9.0.0/24", true),
        ("NC-4: back", first(), ip, pods, true),
        ("NC-5: nothing depends on it", node(&[ip], "zone-a", &["10.244.7.0/24"]), ip, "10.244.7.0/24", false),
        ("NC-6: the newest object", node(&[ip], "zone-b", &[pods]), ip, pods, false),
        ("NC-3: deleted; the host's own addresses stand in", Update::NodeGone(OWN.into()), ip, "", true),
    ] {
        let before = engine.datapath().writes;
        engine.update(update);
        assert!(engine.flush(), "{id}");
        assert_eq!(known(&engine), (addresses.to_owned(), pod_cidrs.to_owned()), "{id}");
        assert_eq!(engine.datapath().writes != before, writes, "{id}");
        let zone = engine.node().and_then(|node| node.zone.as_deref());
        assert_eq!(zone == Some("zone-b"), id.starts_with("NC-6"), "{id}");
    }
    engine.update(gone("t/a"));
    engine.update(put(&svc("t/b", "10.96.0.2").port("80/TCP")));
    assert!(engine.flush(), "it goes on without its Node");
}

/// SC-1 to SC-4, and what is nobody's there and what is somebody else's.
#[test]
fn unallocated_addresses_are_those_of_all_networks_but_for_services_left_alone() {
    let cidr = |name: &str, networks: &[&str]| {
        let networks = networks.iter().map(|net| net.parse().expect("a network")).collect();
        ServiceCidr { name: name.into(), networks }
    };
    let skipped = svc("t/dns", "10.96.0.10,2001:db8:f::10").port("53/UDP").annotation("sheave.io/skip", "true");
    let served = svc("t/dns", "10.96.0.10,2001:db8:f::10").port("53/UDP");
    let foreign = svc("t/x", "10.96.0.11").port("80/TCP").label("service.kubernetes.io/service-proxy-name", "x");
    let mut engine = engine(empty_tables());
    engine.options.service_cidrs = vec!["10.112.0.0/12".parse().expect("a network")];
    let networks = BTreeMap::from([("10.0.0.0/8".parse().expect("a network"), true)]);
    engine.reconciler_mut().datapath_mut().service_networks = networks;
    for (id, updates, expected) in [
        (
            "the ServiceCIDRs are not known yet: a predecessor's stay",
            vec![Update::Services(vec![]), Update::Slices(vec![]), Update::Nodes(vec![])],
            "10.0.0.0/8 10.112.0.0/12",
        ),
        ("SC-1", vec![Update::ServiceCidrs(vec![cidr("a", &["10.96.0.0/16"])])], "10.96.0.0/16 10.112.0.0/12"),
        (
            "SC-2",
            vec![Update::ServiceCidr(cidr("b", &["10.97.0.0/16", "2001:db8:f::/112"]))],
            "10.96.0.0/16 10.97.0.0/16 10.112.0.0/12 2001:db8:f::/112",
        ),
        (
            "F52 left alone",
            vec![put(&skipped), put(&foreign)],
            "10.96.0.0/16 !10.96.0.10/32 !10.96.0.11/32 10.97.0.0/16 10.112.0.0/12 2001:db8:f::/112 \
             !2001:db8:f::10/128",
        ),
        (
            "served again, and gone",
            vec![put(&served), gone("t/x")],
            "10.96.0.0/16 10.97.0.0/16 10.112.0.0/12 2001:db8:f::/112",
        ),
        ("SC-4", vec![Update::ServiceCidrGone("b".into())], "10.96.0.0/16 10.112.0.0/12"),
    ] {
        updates.into_iter().for_each(|update| engine.update(update));
        assert!(engine.flush(), "{id}");
        let networks = engine.datapath().service_networks.iter();
        let networks: Vec<_> =
            networks.map(|(net, silent)| format!("{}{net}", if *silent { "" } else { "!" })).collect();
        assert_eq!(networks.join(" "), expected, "{id}");
    }
}

#[test]
fn sources_are_pods_as_the_operator_says() {
    let other = Update::Node(Box::new(node_with("other", &["192.0.2.12"], "", &["10.244.2.0/24", "2001:db8:2::/64"])));
    let engine = start(vec![node(&["192.0.2.11"], "", &["10.244.1.0/24"]), other]);
    let cluster = ["10.244.0.0/16".parse().expect("a network")].into();
    let own = ("10.244.1.0/24", true);
    for (id, detection, expected) in [
        ("DL-1, DL-3, DL-4", PodDetection::Within(cluster), &[("10.244.0.0/16", false), own][..]),
        ("DL-1 by the Nodes", PodDetection::AllNodes, &[own, ("10.244.2.0/24", false), ("2001:db8:2::/64", false)]),
        ("DL-2", PodDetection::ThisNode, &[own]),
        ("DL-5", PodDetection::Never, &[]),
    ] {
        let expected: BTreeMap<_, _> =
            expected.iter().map(|(net, own)| (net.parse().expect("a network"), *own)).collect();
        assert_eq!(engine.pod_ranges(&detection), expected, "{id}");
    }
}
