//! What a group answers on, and whom its load-balancer addresses admit.

use std::net::{IpAddr, SocketAddr};

use sheave_ebpf::{
    frontend::FrontendKey,
    service::{FLAG_HOST_ALLOWED, FLAG_PODS_ALLOWED, FLAG_PODS_BY_PACKET, FLAG_SOURCE_RANGES},
};

use super::{group_of, groups_of, groups_with, test_node};
use crate::{
    plan::{
        group::{ExternalIps, GroupPlan, Keeper, NodeContext, PlanOptions},
        kind::Kind,
    },
    source::convert::fixtures::{Svc, svc},
};

/// `CIP 10.0.0.1:80/6`, one for each frontend, in the order of the plan.
fn frontends(group: &GroupPlan) -> Vec<String> {
    let text = |(key, kind): &(FrontendKey, Kind)| {
        let kind = match *kind {
            Kind::ClusterIp => "CIP",
            Kind::NodePort => "NP",
            Kind::LoadBalancer => "LB",
            Kind::ExternalIp => "ext",
            Kind::Loopback => "lo",
            Kind::UnknownPort => "any",
        };
        format!("{kind} {}/{}", SocketAddr::new(IpAddr::from(key.addr), u16::from_be(key.port)), key.proto)
    };
    group.frontends.iter().map(text).collect()
}

fn full() -> Svc {
    svc("ns/a", "172.30.0.41")
        .port("80/TCP np 3001")
        .kind("LoadBalancer")
        .external(&["192.168.99.22"])
        .ingress("1.2.3.4", None)
}

#[test]
fn a_group_answers_on_every_address_it_was_given() {
    let v6 = svc("ns/a", "fd00:172:30::41").port("53/UDP np 3001").kind("NodePort");
    for (id, svc, expected) in [
        ("ClusterIP", svc("ns/a", "172.30.0.41").port("80/TCP"), &["CIP 172.30.0.41:80/6", "any 172.30.0.41:0/0"][..]),
        ("SCTP", svc("ns/a", "172.30.0.41").port("80/SCTP"), &["CIP 172.30.0.41:80/132", "any 172.30.0.41:0/0"]),
        (
            "everything",
            full(),
            &[
                "CIP 172.30.0.41:80/6",
                "LB 1.2.3.4:80/6",
                "ext 192.168.99.22:80/6",
                "NP 192.168.0.2:3001/6",
                "lo 127.0.0.1:3001/6",
                "any 172.30.0.41:0/0",
                "any 1.2.3.4:0/255",
                "any 192.168.99.22:0/255",
            ],
        ),
        (
            "FLOW-5 v6",
            v6,
            &[
                "CIP [fd00:172:30::41]:53/17",
                "NP [2001:db8::1]:3001/17",
                "lo [::1]:3001/17",
                "any [fd00:172:30::41]:0/0",
            ],
        ),
        (
            "V-8, FLOW-10: the balancer wants the traffic itself",
            svc("ns/a", "172.30.0.41").port("80/TCP").kind("LoadBalancer").ingress("1.2.3.4", Some("Proxy")),
            &["CIP 172.30.0.41:80/6", "any 172.30.0.41:0/0"],
        ),
        (
            "an address with two roles has the first",
            svc("ns/a", "172.30.0.41").port("80/TCP").external(&["172.30.0.41", "1.2.3.4"]).ingress("1.2.3.4", None),
            &["CIP 172.30.0.41:80/6", "LB 1.2.3.4:80/6", "any 172.30.0.41:0/0", "any 1.2.3.4:0/255"],
        ),
        (
            "an external address of the node whose port is the NodePort",
            svc("ns/a", "172.30.0.41").port("3001/TCP np 3001").external(&["192.168.0.2"]),
            &["CIP 172.30.0.41:3001/6", "ext 192.168.0.2:3001/6", "lo 127.0.0.1:3001/6", "any 172.30.0.41:0/0"],
        ),
        (
            "F31: the port of a node's address is never guarded",
            svc("ns/a", "192.168.0.3").port("80/TCP"),
            &["CIP 192.168.0.3:80/6"],
        ),
    ] {
        assert_eq!(frontends(&group_of(&svc, &[])), expected, "{id}");
    }
}

/// The whole list, so that what else of a node may be taken shows: ServiceLB publishes nodes' addresses.
#[test]
fn nobody_takes_an_api_server_or_a_nodes_agents() {
    let at = |port: &str, ips: &[&str]| svc("ns/a", "172.30.0.41").port(port).external(ips);
    let (api, node) = (Keeper::ApiServer, Keeper::NodeAgent);
    let health = PlanOptions { node_agent_ports: [10250, 10256].into(), ..PlanOptions::default() };
    for (case, service, expected, kept) in [
        ("an API server", at("6443/TCP", &["192.168.0.3", "1.2.3.4"]), &["ext 1.2.3.4:6443/6"][..], &[api][..]),
        ("one that is no node", at("443/TCP", &["203.0.113.6"]), &[], &[api]),
        ("its address, another port", at("443/TCP", &["192.168.0.3"]), &["ext 192.168.0.3:443/6"], &[]),
        ("the same number, no node's", at("6443/TCP", &["192.168.0.2"]), &["ext 192.168.0.2:6443/6"], &[]),
        ("another protocol", at("6443/UDP", &["192.168.0.3"]), &["ext 192.168.0.3:6443/17"], &[]),
        ("as a load balancer's", at("443/TCP", &[]).kind("LoadBalancer").ingress("203.0.113.6", None), &[], &[api]),
        ("a kubelet", at("10250/TCP", &["192.168.0.3"]), &[], &[node]),
        ("our own health port here", at("10256/TCP", &["192.168.1.2"]), &[], &[node]),
        ("that number elsewhere", at("10256/TCP", &["1.2.3.4"]), &["ext 1.2.3.4:10256/6"], &[]),
    ] {
        let group = groups_with(&service, &[], &test_node(), &health).remove(0);
        let served: Vec<_> =
            frontends(&group).into_iter().filter(|f| f.starts_with("ext") || f.starts_with("LB")).collect();
        assert_eq!(served, expected, "{case}");
        assert_eq!(group.kept.iter().map(|(.., keeper)| *keeper).collect::<Vec<_>>(), kept, "{case}");
    }
    // Its own ClusterIP is the API server's, also where the agent is told to ask there.
    let node = NodeContext { api_servers: ["172.30.0.1:443".parse().unwrap()].into(), ..test_node() };
    let api = svc("default/kubernetes", "172.30.0.1").port("443/TCP");
    assert_eq!(frontends(&groups_with(&api, &[], &node, &health)[0])[0], "CIP 172.30.0.1:443/6");
}

#[test]
fn options_leave_frontends_out() {
    let with = |options: &PlanOptions| frontends(&groups_with(&full(), &[], &test_node(), options).remove(0));
    let all = with(&PlanOptions::default());
    let without = |kind: &str| all.iter().filter(|f| !f.starts_with(kind)).cloned().collect::<Vec<_>>();
    let external = |external_ips| PlanOptions { external_ips, ..PlanOptions::default() };
    let no_external: Vec<_> = all.iter().filter(|f| !f.contains(" 192.168.99.22:")).cloned().collect();
    let within = |net: &str| external(ExternalIps::Within(vec![net.parse().unwrap()]));
    for (case, options, expected) in [
        ("no loopback NodePorts", PlanOptions { loopback_node_ports: false, ..PlanOptions::default() }, without("lo")),
        ("unknown ports pass", PlanOptions { refuse_unknown_ports: false, ..PlanOptions::default() }, without("any")),
        ("CVE-2020-8554: no externalIPs", external(ExternalIps::Deny), no_external.clone()),
        ("externalIPs within a network", within("192.168.99.0/24"), all.clone()),
        ("externalIPs outside of it", within("203.0.113.0/24"), no_external),
    ] {
        assert_eq!(with(&options), expected, "{case}");
    }
    // Without externalIPs nothing makes this one accessible from outside.
    let only_external = svc("ns/a", "172.30.0.41").port("80/TCP").external(&["192.168.99.22"]);
    let group = groups_with(&only_external, &[], &test_node(), &external(ExternalIps::Deny)).remove(0);
    assert_eq!(super::verdicts(&group), ["REJECT", "", ""]);
}

#[test]
fn node_ports_answer_on_node_port_addresses_only() {
    let node_ports = |addresses: &[&str]| {
        let node_port_addresses = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        let node = NodeContext { node_port_addresses, ..test_node() };
        let service = svc("ns/a", "172.30.0.41,fd00:172:30::41").port("80/TCP np 3001").kind("NodePort");
        let groups = groups_with(&service, &[], &node, &PlanOptions::default());
        groups.iter().flat_map(frontends).filter(|f| f.starts_with("NP")).collect::<Vec<_>>().join(", ")
    };
    for (id, addresses, expected) in [
        ("FLOW-5 default", &["192.168.0.2", "2001:db8::1"][..], "NP 192.168.0.2:3001/6, NP [2001:db8::1]:3001/6"),
        ("FLOW-5 two networks", &["192.168.0.2", "192.168.1.2"], "NP 192.168.0.2:3001/6, NP 192.168.1.2:3001/6"),
        ("loopback is another kind", &["127.0.0.1", "::1", "192.168.0.2"], "NP 192.168.0.2:3001/6"),
        ("V-7 none", &[], ""),
    ] {
        assert_eq!(node_ports(addresses), expected, "{id}");
    }
}

#[test]
fn source_ranges_admit_the_node_and_its_pods_when_they_lie_within() {
    let flags = |svc: &Svc, node: &NodeContext| groups_with(svc, &[], node, &PlanOptions::default())[0].config.flags();
    let ranged = |ranges: &[&str]| full().ranges(ranges);
    let node = test_node();
    let no_pods = NodeContext { pod_cidrs: vec![], ..test_node() };
    let both_halves = ["10.0.0.0/25", "10.0.0.128/25"];
    let (on, host, pods) = (FLAG_SOURCE_RANGES, FLAG_HOST_ALLOWED, FLAG_PODS_ALLOWED);
    let packets = FLAG_PODS_BY_PACKET;
    for (id, svc, node, expected) in [
        ("no ranges", full(), &node, 0),
        ("FLOW-4", ranged(&["192.168.0.0/24", " 203.0.113.0/25"]), &node, on | host),
        ("FLOW-4 no own address", ranged(&["203.0.113.0/25"]), &node, on),
        ("pods", ranged(&["10.0.0.0/8"]), &node, on | pods),
        ("both", ranged(&["10.0.0.0/8", "192.168.1.2/32"]), &node, on | host | pods),
        ("some pods are not all", ranged(&["10.0.0.0/25"]), &node, on | packets),
        ("a range that only touches them", ranged(&["10.0.1.0/24"]), &node, on),
        ("pods in two ranges together", ranged(&both_halves), &node, on | pods),
        ("pods unknown", ranged(&["10.0.0.0/8"]), &no_pods, on | packets),
        ("S22", ranged(&["2001:db8::/32"]), &node, 0),
        ("no load-balancer address", svc("ns/a", "172.30.0.41").port("80/TCP").ranges(&["10.0.0.0/8"]), &node, 0),
    ] {
        assert_eq!(flags(&svc, node), expected, "{id}");
        let no_packets = PlanOptions { judge_pods_by_packet: false, ..PlanOptions::default() };
        let flags = groups_with(&svc, &[], node, &no_packets)[0].config.flags();
        assert_eq!(flags, expected & !packets, "{id}, without a packet path");
    }
}

#[test]
fn source_ranges_admit_the_load_balancer_addresses_of_a_node_that_they_admit() {
    let service = svc("ns/a", "172.30.0.41,fd00:172:30::41").port("80/TCP").kind("LoadBalancer");
    let service = ["1.2.3.4", "5.6.7.8", "2001:db8:5::6"].iter().fold(service, |svc, ip| svc.ingress(ip, None));
    for (id, ranges, v4, v6) in [
        (
            "FLOW-4 an own address lies in the ranges",
            &["192.168.0.0/24", " 203.0.113.0/25"][..],
            &["192.168.0.0/24", "203.0.113.0/25", "1.2.3.4/32", "5.6.7.8/32"][..],
            &[][..],
        ),
        ("FLOW-4 derived: none does", &["203.0.113.0/25"], &["203.0.113.0/25"], &[]),
        (
            "F22 of the other family",
            &["203.0.113.0/25", "2001:db8::/64"],
            &["203.0.113.0/25"],
            &["2001:db8::/64", "2001:db8:5::6/128"],
        ),
        (
            "one of them is listed",
            &["5.6.7.8/32", "192.168.0.2/32"],
            &["5.6.7.8/32", "192.168.0.2/32", "1.2.3.4/32"],
            &[],
        ),
        ("S19 everyone", &[], &[], &[]),
    ] {
        let groups = groups_of(&service.clone().ranges(ranges), &[]);
        let found = groups.iter().map(|g| g.source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(found.collect::<Vec<_>>(), [v4, v6], "{id}");
    }
}

#[test]
fn affinity_goes_into_the_configuration() {
    let timeout = |svc: &Svc| group_of(svc, &[]).config.affinity_timeout();
    assert_eq!(timeout(&full()), 0);
    assert_eq!(timeout(&full().affinity(Some(60))), 60);
    assert_eq!(timeout(&full().affinity(None)), 10_800);
    assert!(groups_of(&full().created(7), &[]).iter().all(|group| group.created == 7));
}
