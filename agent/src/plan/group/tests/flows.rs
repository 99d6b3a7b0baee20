//! The packet flows (FLOW) as far as the plan decides them: who dials what, and which endpoints may answer.
//! Masquerading is the datapath's. A client from this cluster uses scope Inside for external addresses, one from
//! outside uses scope Outside, and everyone uses scope Cluster for ClusterIPs.

use std::net::IpAddr;

use sheave_ebpf::{frontend::FrontendKey, service::Scope};

use super::{groups_of, verdicts};
use crate::{
    plan::{group::GroupPlan, kind::Kind},
    source::convert::fixtures::{Slice, Svc, slice_of, svc},
};

/// Services with their slices, planned.
struct Cluster(Vec<GroupPlan>);

impl Cluster {
    fn new(services: &[(Svc, Vec<Slice>)]) -> Self {
        Self(services.iter().flat_map(|(svc, slices)| groups_of(svc, slices)).collect())
    }

    /// Endpoints, verdict, or "none" where nothing answers. `source` is "outside" or somebody inside.
    fn dial(&self, source: &str, address: &str, port: u16, proto: u8) -> String {
        let addr = address.parse::<IpAddr>().unwrap().into();
        let find = |key: FrontendKey| {
            let kind_of = |g: &GroupPlan| g.frontends.iter().find(|(known, _)| *known == key).map(|(_, kind)| *kind);
            self.0.iter().find_map(|group| Some((group, kind_of(group)?)))
        };
        let exact = find(FrontendKey { addr, port: port.to_be(), proto, zero: 0 });
        let found = exact.or_else(|| find(FrontendKey { addr, port: 0, proto: 0, zero: 0 }));
        let scope = match found {
            None => return "none".to_owned(),
            Some((_, Kind::UnknownPort)) => return "REJECT".to_owned(),
            Some((_, Kind::ClusterIp)) => Scope::Cluster,
            Some(_) if source == "outside" => Scope::Outside,
            Some(_) => Scope::Inside,
        };
        found.map(|(group, _)| verdicts(group)[scope as usize].clone()).unwrap_or_default()
    }

    fn tcp(&self, source: &str, target: &str) -> String {
        let (address, port) = target.rsplit_once(':').unwrap();
        self.dial(source, address, port.parse().unwrap(), 6)
    }
}

#[test]
fn flow_1_policies_by_source_and_destination() {
    let service = |n: usize, lb| {
        let svc = svc(&format!("ns/svc{n}"), &format!("172.30.0.4{n}")).port(&format!("80/TCP np 300{n}"));
        svc.kind("LoadBalancer").ingress(lb, None)
    };
    let slices = |n: usize| {
        let endpoints = format!("10.180.0.{n} R L; 10.180.1.{n} R");
        vec![slice_of(&format!("ns/s{n}"), &format!("svc{n}")).ports("80/TCP").endpoints("", &endpoints)]
    };
    let cluster = Cluster::new(&[
        (service(1, "1.2.3.4"), slices(1)),
        (service(2, "5.6.7.8").external_local(), slices(2)),
        (service(3, "9.10.11.12").internal_local(), slices(3)),
    ]);
    let lbs = ["1.2.3.4", "5.6.7.8", "9.10.11.12"];
    // Without a local detector pods count as outside; sheave always knows who is inside, so that column is not ours.
    for (source, expected) in [
        ("pod", [["both", "both", "both"], ["both", "both", "both"], ["loc", "both", "both"]]),
        ("node", [["both", "both", "both"], ["both", "both", "both"], ["loc", "both", "both"]]),
        ("outside", [["both", "both", "both"], ["both", "loc", "loc"], ["loc", "both", "both"]]),
    ] {
        for (i, row) in expected.iter().enumerate() {
            let n = i + 1;
            let targets = [format!("172.30.0.4{n}:80"), format!("192.168.0.2:300{n}"), format!("{}:80", lbs[i])];
            for (target, expected) in targets.iter().zip(row) {
                let local = format!("10.180.0.{n}:80");
                let expected = if *expected == "loc" { local } else { format!("{local} 10.180.1.{n}:80") };
                assert_eq!(cluster.tcp(source, target), expected, "FLOW-1 {source} to svc{n} at {target}");
            }
        }
    }
}

#[test]
fn flow_2_no_endpoints() {
    let svc = svc("ns/a", "172.30.0.41").port("80/TCP np 3001").kind("LoadBalancer");
    let cluster = Cluster::new(&[(svc.external(&["192.168.99.11"]).ingress("1.2.3.4", None), vec![])]);
    for (source, target) in [
        ("pod", "172.30.0.41:80"),
        ("outside", "192.168.99.11:80"),
        ("pod", "192.168.0.2:3001"),
        ("outside", "192.168.0.2:3001"),
        ("pod", "1.2.3.4:80"),
        ("outside", "1.2.3.4:80"),
        ("node", "127.0.0.1:3001"),
    ] {
        assert_eq!(cluster.tcp(source, target), "REJECT", "FLOW-2 {source} to {target}");
    }
}

#[test]
fn flow_3_cluster_ips() {
    let svc1 = svc("ns/svc1", "172.30.0.41").port("http 80/TCP");
    let svc2 = ["http 80/TCP", "https 443/TCP", "dns-udp 53/UDP", "dns-tcp 53/TCP", "dns-sctp 53/SCTP"]
        .iter()
        .fold(svc("ns/svc2", "172.30.0.42"), |svc, port| svc.port(port));
    let slice1 = slice_of("ns/s1", "svc1").ports("http 80/TCP").endpoints("", "10.180.0.1 R L");
    let slice2 = slice_of("ns/s2", "svc2")
        .ports("http 80/TCP, https 8443/TCP, dns-udp 53/UDP, dns-tcp 5353/TCP, dns-sctp 53/SCTP")
        .endpoints("", "10.180.0.1 R L; 10.180.2.1 R @node2");
    let cluster = Cluster::new(&[(svc1, vec![slice1]), (svc2, vec![slice2])]);
    let both = |port: u16| format!("10.180.0.1:{port} 10.180.2.1:{port}");
    for (address, port, proto, expected) in [
        ("172.30.0.41", 80, 6, "10.180.0.1:80".to_owned()),
        ("172.30.0.42", 80, 6, both(80)),
        ("172.30.0.42", 443, 6, both(8443)),
        ("172.30.0.42", 53, 6, both(5353)),
        ("172.30.0.42", 53, 17, both(53)),
        ("172.30.0.42", 53, 132, both(53)),
        ("172.30.0.42", 80, 17, "REJECT".to_owned()),
        ("172.30.0.41", 443, 6, "REJECT".to_owned()),
        // V-5 drops it; that needs the cluster's service CIDRs, which the plan of a Service does not know.
        ("172.30.0.50", 80, 6, "none".to_owned()),
    ] {
        assert_eq!(cluster.dial("pod", address, port, proto), expected, "FLOW-3 {address}:{port}/{proto}");
    }
}

#[test]
fn flow_5_node_port_addresses() {
    let service = svc("ns/a", "172.30.0.41,fd00:172:30::41").port("80/TCP np 3001").kind("NodePort");
    let slices = vec![
        slice_of("ns/v4", "a").ports("80/TCP").endpoints("", "10.180.0.1 R @other-node; 10.180.2.1 R L"),
        slice_of("ns/v6", "a").ports("80/TCP").endpoints("", "fd00:10:180::1 R @other-node; fd00:10:180::2:1 R L"),
    ];
    let cluster = Cluster::new(&[(service, slices)]);
    let (v4, v6) = ("10.180.0.1:80 10.180.2.1:80", "fd00:10:180::1:80 fd00:10:180::2:1:80");
    for (source, address, port, expected) in [
        ("pod", "172.30.0.41", 80, v4),
        ("outside", "192.168.0.2", 3001, v4),
        ("node", "192.168.0.2", 3001, v4),
        ("outside", "192.168.1.2", 3001, "none"),
        ("pod", "fd00:172:30::41", 80, v6),
        ("outside", "2001:db8::1", 3001, v6),
        ("node", "2001:db8::1", 3001, v6),
        ("outside", "2001:db8:1::2", 3001, "none"),
        // F39: sheave serves loopback in both families, to processes of the host.
        ("node", "127.0.0.1", 3001, v4),
        ("node", "::1", 3001, v6),
        // V-7, V-9
        ("outside", "192.168.0.3", 3001, "none"),
        ("outside", "192.168.0.2", 3002, "none"),
    ] {
        assert_eq!(cluster.dial(source, address, port, 6), expected, "FLOW-5 {source} to {address}:{port}");
    }
}

#[test]
fn flow_6_and_7_external_addresses() {
    let base = || {
        let svc = svc("ns/a", "172.30.0.41").port("80/TCP np 3001").kind("LoadBalancer").health_check(30_000);
        svc.external(&["192.168.99.11"]).ingress("1.2.3.4", None)
    };
    let slices =
        || vec![slice_of("ns/s", "a").ports("80/TCP").endpoints("", "10.180.0.1 R @other-node; 10.180.2.1 R L")];
    let (p_q, q) = ("10.180.0.1:80 10.180.2.1:80", "10.180.2.1:80");
    for (id, svc, outside) in [("FLOW-6", base().external_local(), q), ("FLOW-7", base(), p_q)] {
        let cluster = Cluster::new(&[(svc, slices())]);
        assert_eq!(cluster.tcp("pod", "172.30.0.41:80"), p_q, "{id}");
        for target in ["192.168.99.11:80", "1.2.3.4:80", "192.168.0.2:3001"] {
            assert_eq!(cluster.tcp("pod", target), p_q, "{id} pod to {target}");
            assert_eq!(cluster.tcp("outside", target), outside, "{id} outside to {target}");
        }
    }
}

#[test]
fn flow_11_bad_text_forms() {
    let service = svc("ns/a", "172.30.0.041")
        .port("80/TCP np 3001")
        .kind("LoadBalancer")
        .external(&["192.168.099.022"])
        .ranges(&["203.0.113.000/025"])
        .ingress("1.2.3.004", None);
    let slices = vec![slice_of("ns/s", "a").ports("80/TCP").endpoints("", "10.180.00.001 R")];
    let cluster = Cluster::new(&[(service, slices)]);
    for target in ["172.30.0.41:80", "192.168.99.22:80", "1.2.3.4:80", "192.168.0.2:3001"] {
        assert_eq!(cluster.tcp("outside", target), "10.180.0.1:80", "FLOW-11 {target}");
    }
    assert_eq!(cluster.0[0].source_ranges, ["203.0.113.0/25".parse().unwrap()]);
}

#[test]
fn flow_12_the_overall_sample() {
    let slice =
        |name: &str, endpoints| vec![slice_of(&format!("ns/{name}-1"), name).ports("80/TCP").endpoints("", endpoints)];
    let svc4 = svc("ns/svc4", "172.30.0.44").port("80/TCP").kind("NodePort").external(&["192.168.99.33"]);
    let svc5 = svc("ns/svc5", "172.30.0.45")
        .port("80/TCP np 3002")
        .kind("LoadBalancer")
        .ingress("5.6.7.8", None)
        .ranges(&[" 203.0.113.0/25"])
        .affinity(Some(10_800))
        .health_check(30_000);
    let svc2 = svc("ns/svc2", "172.30.0.42")
        .port("80/TCP np 3001")
        .kind("LoadBalancer")
        .external_local()
        .ingress("1.2.3.4", None)
        .external(&["192.168.99.22"])
        .health_check(30_000);
    assert_eq!(svc5.build().health_check_node_port, 0, "S20");
    assert_eq!(svc2.build().health_check_node_port, 30_000);
    let cluster = Cluster::new(&[
        (svc("ns/svc1", "172.30.0.41").port("80/TCP"), slice("svc1", "10.180.0.1 R L")),
        (svc2, slice("svc2", "10.180.0.2 R @other-node")),
        (svc("ns/svc3", "172.30.0.43").port("80/TCP np 3003").kind("NodePort"), slice("svc3", "10.180.0.3 R L")),
        (svc4, slice("svc4", "10.180.0.4 R @other-node; 10.180.0.5 R L")),
        (svc5, slice("svc5", "10.180.0.3 R L")),
        (svc("ns/svc6", "172.30.0.46").port("80/TCP"), vec![]),
    ]);
    let svc4 = "10.180.0.4:80 10.180.0.5:80";
    for (source, target, expected) in [
        ("pod", "172.30.0.41:80", "10.180.0.1:80"),
        ("outside", "172.30.0.42:80", "10.180.0.2:80"),
        ("pod", "192.168.99.22:80", "10.180.0.2:80"),
        ("node", "1.2.3.4:80", "10.180.0.2:80"),
        ("pod", "192.168.0.2:3001", "10.180.0.2:80"),
        ("outside", "192.168.99.22:80", "DROP"),
        ("outside", "1.2.3.4:80", "DROP"),
        ("outside", "192.168.0.2:3001", "DROP"),
        ("outside", "192.168.0.2:3003", "10.180.0.3:80"),
        ("pod", "192.168.0.2:3003", "10.180.0.3:80"),
        ("outside", "192.168.99.33:80", svc4),
        ("pod", "192.168.99.33:80", svc4),
        ("outside", "192.168.0.2:80", "none"),
        ("outside", "5.6.7.8:80", "10.180.0.3:80"),
        ("outside", "192.168.0.2:3002", "10.180.0.3:80"),
        ("pod", "172.30.0.46:80", "REJECT"),
    ] {
        assert_eq!(cluster.tcp(source, target), expected, "FLOW-12 {source} to {target}");
    }
}
