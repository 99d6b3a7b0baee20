//! The packet path for pods whose sockets the node's kernel does not see (Kata, gVisor) or shall not touch (meshes):
//! the socket path is switched off for pods, every packet of theirs is translated.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    client::Way,
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
    pair::{N1, N1_6, N1_6_UPLINK, N1_UPLINK, WAYS, reaches},
    place::Place,
    wait::{SOON, eventually, throughout},
};

fn service(lab: &Lab, name: &str, number: u8, backends: &[(&Pod, &str)], policy: (&str, &str)) -> Result<()> {
    let node_port = 30_000 + u16::from(number);
    let service = Svc::new(name).ip(&format!("10.96.0.{number}")).ip(&format!("2001:db8:96::{number}"));
    let service = service.port("t", 80, "TCP").node_port(node_port).port("u", 80, "UDP").node_port(node_port);
    let service = service.ingress(&format!("203.0.113.{number}"), "VIP");
    let (internal, external) = policy;
    let service = service.set("internalTrafficPolicy", json!(internal)).set("externalTrafficPolicy", json!(external));
    let slice =
        |family: &str| Slice::new(&format!("{name}-{family}"), name).port("t", 8080, "TCP").port("u", 8080, "UDP");
    let (mut v4, mut v6) = (slice("v4"), slice("v6").address_type("IPv6"));
    for (pod, node) in backends {
        v4 = v4.ready(&pod.v4.to_string(), node);
        v6 = v6.ready(&pod.v6.to_string(), node);
    }
    lab.apply(&[&service, &v4, &v6])
}

/// FLOW-1, the row of pods; V-1 and V-4 for pods; case 18: a pod among the backends that it dials.
#[test]
fn flow_1_pods_are_served_packet_by_packet() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b, c, client) = (lab.n1().pod(10)?, lab.n2().pod(20)?, lab.n1().pod(11)?, lab.n1().pod(30)?);
    let ports = ["8080/TCP", "8080/UDP"];
    let _servers = [a.place.echo("a", &ports)?, b.place.echo("b", &ports)?, c.place.echo("c", &ports)?];
    let both = [(&a, "n1"), (&b, "n2")];
    service(&lab, "svc1", 41, &both, ("Cluster", "Cluster"))?;
    service(&lab, "svc2", 42, &both, ("Cluster", "Local"))?;
    service(&lab, "svc3", 43, &both, ("Local", "Cluster"))?;
    service(&lab, "alone", 44, &[(&a, "n1")], ("Cluster", "Cluster"))?;
    service(&lab, "three", 46, &[(&a, "n1"), (&b, "n2"), (&c, "n1")], ("Cluster", "Cluster"))?;
    service(&lab, "none", 45, &[], ("Cluster", "Cluster"))?;
    let flags = ["--host-sockets-only", "--pod-packets"];
    let _agents = [lab.n1().agent_with(&flags)?, lab.n2().agent_with(&flags)?];

    let pod = client.place.client()?;
    let seen = [("a", "10.244.1.30"), ("b", "10.244.1.30")];
    let hidden = [("a", "10.244.1.1"), ("b", "192.0.2.11")];
    let seen6 = [("a", "2001:db8:1::30"), ("b", "2001:db8:1::30")];
    for way in WAYS {
        for (to, servers) in [
            ("10.96.0.41:80", &seen[..]),
            ("192.0.2.11:30041", &hidden),
            ("203.0.113.41:80", &hidden),
            ("10.96.0.42:80", &seen),
            ("192.0.2.11:30042", &seen),
            ("203.0.113.42:80", &seen),
            ("10.96.0.43:80", &seen[..1]),
            ("192.0.2.11:30043", &hidden),
            ("203.0.113.43:80", &hidden),
            ("[2001:db8:96::41]:80", &seen6),
        ] {
            reaches(&pod, way, to, servers)?;
        }
        for to in ["10.96.0.45:80", "192.0.2.11:30045", "10.96.0.45:81", "[2001:db8:96::45]:80"] {
            assert_eq!(pod.refusal(way, to)?, "ECONNREFUSED", "{way:?} {to}");
        }
        // F36: the backend is the client.
        let itself = a.place.client()?;
        reaches(&itself, way, "10.96.0.44:80", &[("a", "10.244.1.1")])?;
        reaches(&itself, way, "192.0.2.11:30044", &[("a", "10.244.1.1")])?;
        reaches(&itself, way, "[2001:db8:96::44]:80", &[("a", "2001:db8:1::1")])?;
        let own = "10.244.1.10";
        reaches(&itself, way, "10.96.0.46:80", &[("a", "10.244.1.1"), ("b", own), ("c", own)])?;
        let servers = [("a", "10.244.1.1"), ("b", "192.0.2.11"), ("c", "10.244.1.1")];
        reaches(&itself, way, "192.0.2.11:30046", &servers)?;
        // Direct traffic is nobody's business.
        assert_eq!(pod.dial(way, &b.at(8080).to_string())?.client.ip(), client.v4, "{way:?}");
    }
    Ok(())
}

/// FLOW-8, packet by packet: the policy binds whoever comes to the ClusterIP, and without a slice all are refused.
#[test]
fn flow_8_the_internal_policy_binds_packets_too() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    for prefix in ["10.96.0.0/16", "2001:db8:96::/64"] {
        lab.route(prefix, lab.n1())?;
    }
    let (a, b, c, client) = (lab.n1().pod(10)?, lab.n1().pod(11)?, lab.n2().pod(20)?, lab.n1().pod(30)?);
    let ports = ["8080/TCP", "8080/UDP"];
    let _servers = [a.place.echo("a", &ports)?, b.place.echo("b", &ports)?, c.place.echo("c", &ports)?];
    let rows = [
        ("Cluster", 51, &[(&a, "n1"), (&c, "n2")][..], &["a", "c"][..]),
        ("Local, one is here", 52, &[(&a, "n1"), (&c, "n2")], &["a"]),
        ("Local, two are here", 53, &[(&a, "n1"), (&b, "n1"), (&c, "n2")], &["a", "b"]),
        ("Local, none is here", 54, &[(&c, "n2")], &[]),
    ];
    let name = |number: u8| format!("svc{number}");
    for (row, number, backends, _) in &rows {
        let internal = row.split(',').next().unwrap_or_default();
        service(&lab, &name(*number), *number, backends, (internal, "Cluster"))?;
    }
    let agent = lab.n1().agent_with(&["--host-sockets-only", "--pod-packets"])?;
    let (mut pod, mut outside) = (client.place.client()?, lab.outside.client()?);
    (pod.patience, outside.patience) = (Duration::from_secs(1), Duration::from_secs(1));
    let both = [
        ("a pod", &pod, ["10.244.1.30"; 2], ["2001:db8:1::30"; 2]),
        ("outside", &outside, [N1, N1_UPLINK], [N1_6, N1_6_UPLINK]),
    ];
    let addresses = |number: u8| [format!("10.96.0.{number}:80"), format!("[2001:db8:96::{number}]:80")];
    for (from, client, v4, v6) in &both {
        for (way, (row, number, _, answer)) in WAYS.into_iter().flat_map(|way| rows.iter().map(move |row| (way, row))) {
            for (to, [near, far]) in addresses(*number).iter().zip([v4, v6]) {
                let what = format!("FLOW-8 {row}: {from}, {way:?} {to}");
                if answer.is_empty() {
                    assert_eq!(client.outcome(way, to)?, "TIMEOUT", "{what}");
                    continue;
                }
                let answer: Vec<_> =
                    answer.iter().map(|name| (*name, if *name == "c" { *far } else { *near })).collect();
                reaches(client, way, to, &answer).context(what)?;
            }
        }
    }
    for (_, number, ..) in &rows {
        service(&lab, &name(*number), *number, &[], ("Local", "Cluster"))?; // slices without endpoints
    }
    lab.settle(&agent)?;
    for (from, client, ..) in &both {
        for (way, (_, number, ..)) in WAYS.into_iter().flat_map(|way| rows.iter().map(move |row| (way, row))) {
            for to in addresses(*number) {
                assert_eq!(client.refusal(way, &to)?, "ECONNREFUSED", "FLOW-8, no endpoint: {from}, {way:?} {to}");
            }
        }
    }
    Ok(())
}

/// FLOW-3: each port of a ClusterIP leads to its own, by number and protocol; others are refused, and addresses of nobody
/// are silent. A pod is seen, a client outside is not.
#[test]
fn flow_3_ports_of_a_cluster_ip_packet_by_packet() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    for prefix in ["10.96.0.0/16", "2001:db8:96::/64"] {
        lab.route(prefix, lab.n1())?;
    }
    let (a, b, client) = (lab.n1().pod(10)?, lab.n2().pod(20)?, lab.n1().pod(30)?);
    let mut servers = Vec::new();
    for (name, pod) in [("a", &a), ("b", &b)] {
        for port in ["80/TCP", "8443/TCP", "5353/TCP", "53/UDP"] {
            servers.push(pod.place.echo(&format!("{name} at {port}"), &[port])?);
        }
    }
    let two = Svc::new("two").ip("10.96.0.42").ip("2001:db8:96::42").port("http", 80, "TCP").port("https", 443, "TCP");
    let slice =
        |family: &str| Slice::new(&format!("two-{family}"), "two").port("http", 80, "TCP").port("https", 8443, "TCP");
    let slice = |family: &str| slice(family).port("dns-udp", 53, "UDP").port("dns-tcp", 5353, "TCP");
    let (mut v4, mut v6) = (slice("v4"), slice("v6"));
    for (pod, node) in [(&a, "n1"), (&b, "n2")] {
        v4 = v4.ready(&pod.v4.to_string(), node);
        v6 = v6.ready(&pod.v6.to_string(), node);
    }
    let one = Svc::new("one").ip("10.96.0.41").port("http", 80, "TCP");
    let one_slice = Slice::new("one", "one").port("http", 80, "TCP").ready("10.244.1.10", "n1");
    lab.apply(&[&two.port("dns-udp", 53, "UDP").port("dns-tcp", 53, "TCP"), &v4, &v6, &one, &one_slice])?;
    let flags = ["--host-sockets-only", "--pod-packets", "--service-cidrs=10.96.0.0/16,2001:db8:96::/64"];
    let _agent = lab.n1().agent_with(&flags)?;
    let (mut pod, mut outside) = (client.place.client()?, lab.outside.client()?);
    (pod.patience, outside.patience) = (Duration::from_secs(1), Duration::from_secs(1));
    for (from, client, [near, far], [near6, far6]) in [
        ("a pod", &pod, ["10.244.1.30"; 2], ["2001:db8:1::30"; 2]),
        ("outside", &outside, [N1, N1_UPLINK], [N1_6, N1_6_UPLINK]),
    ] {
        for (to, way, port) in [
            ("42]:80", Way::Tcp, "80/TCP"),
            ("42]:443", Way::Tcp, "8443/TCP"),
            ("42]:53", Way::Tcp, "5353/TCP"),
            ("42]:53", Way::Udp, "53/UDP"),
        ] {
            let names = ["a", "b"].map(|name| format!("{name} at {port}"));
            let [a, b] = names.each_ref().map(String::as_str);
            let row = || format!("FLOW-3, {from}");
            reaches(client, way, &format!("10.96.0.{}", to.replace(']', "")), &[(a, near), (b, far)])
                .with_context(row)?;
            reaches(client, way, &format!("[2001:db8:96::{to}"), &[(a, near6), (b, far6)]).with_context(row)?;
        }
        reaches(client, Way::Tcp, "10.96.0.41:80", &[("a at 80/TCP", near)]).context("FLOW-3")?;
        for (to, way, outcome) in [
            ("10.96.0.42:80", Way::Udp, "ECONNREFUSED"),
            ("[2001:db8:96::42]:80", Way::Udp, "ECONNREFUSED"),
            ("10.96.0.41:443", Way::Tcp, "ECONNREFUSED"),
            ("10.96.0.41:53", Way::Udp, "ECONNREFUSED"),
            ("10.96.0.50:80", Way::Tcp, "TIMEOUT"),
            ("10.96.0.50:80", Way::Udp, "TIMEOUT"),
            ("[2001:db8:96::50]:80", Way::Tcp, "TIMEOUT"),
        ] {
            let said = if outcome == "TIMEOUT" { client.outcome(way, to) } else { client.refusal(way, to) };
            assert_eq!(said?, outcome, "FLOW-3: {from}, {way:?} {to}");
        }
    }
    let itself = a.place.client()?;
    reaches(&itself, Way::Tcp, "10.96.0.41:80", &[("a at 80/TCP", N1)]).context("FLOW-3, hairpin")
}

/// What a pod sends is translated packet by packet when the flag says so, by default while there is an SCTP Service. The
/// client's sockets are in no cgroup of the node, like those of a virtual machine.
#[test]
fn pod_packets_are_translated_when_they_are_meant_to_be() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (_server, pod) = (lab.n1().server(10, "a")?, lab.n1().pod(30)?);
    let mut client = Place { cgroup: lab.outside.cgroup.clone(), ..pod.place }.client()?;
    client.patience = Duration::from_millis(500);
    lab.apply(&[&Svc::web("web", "10.96.0.20"), &Slice::web("web").ready("10.244.1.10", "n1")])?;
    let sctp = Svc::new("sctp").ip("10.96.0.21").port("s", 7000, "SCTP");
    for (flags, rows) in [
        (&[][..], &[("without SCTP", false), ("with an SCTP Service", true)][..]),
        (&["--pod-packets=on"], &[("without SCTP", true)]),
        (&["--host-sockets-only"], &[("without SCTP", true)]),
        (&["--host-sockets-only", "--pod-packets=off"], &[("without SCTP", false), ("with an SCTP Service", false)]),
    ] {
        let mut agent = lab.n1().agent_with(flags)?;
        for (row, is_served) in rows {
            let has_sctp = *row == "with an SCTP Service";
            if has_sctp {
                lab.apply(&[&sctp])?;
            }
            lab.settle(&agent)?;
            // Devices get their programs a moment after the Service.
            let as_meant = || {
                let outcome = client.outcome(Way::Tcp, "10.96.0.20:80")?;
                ensure!((outcome == "a") == *is_served, "{outcome}");
                Ok(())
            };
            let what = format!("{flags:?}, {row}");
            eventually(&what, SOON, as_meant)?;
            throughout(Duration::from_millis(300), as_meant).context(what)?;
            if has_sctp {
                lab.delete(&[&sctp])?;
            }
        }
        agent.terminate()?;
        agent.sheave(&["cleanup"])?; // flows of pods that live would keep the programs on their devices
    }
    Ok(())
}

/// DL-1, SVC-41: a pod of another node dials this node's NodePort with policy Local. Here it is a client from outside:
/// served by the endpoints of this node, which see it; with none, by nobody.
#[test]
fn a_remote_pod_at_a_local_node_port_is_from_outside() -> Result<()> {
    let Some(lab) = Lab::new(3)? else { return Ok(()) };
    let (a, b, client) = (lab.n1().pod(10)?, lab.n2().pod(20)?, lab.nodes[2].pod(30)?);
    let ports = ["8080/TCP", "8080/UDP"];
    let _servers = [a.place.echo("a", &ports)?, b.place.echo("b", &ports)?];
    service(&lab, "local", 42, &[(&a, "n1"), (&b, "n2")], ("Cluster", "Local"))?;
    service(&lab, "elsewhere", 43, &[(&b, "n2")], ("Cluster", "Local"))?;
    let _agent = lab.n1().agent()?; // the pod's own node has none: its packets come as they are
    let mut pod = client.place.client()?;
    pod.patience = Duration::from_secs(1);
    for way in WAYS {
        reaches(&pod, way, "192.0.2.11:30042", &[("a", "10.244.3.30")])?;
        assert_eq!(pod.outcome(way, "192.0.2.11:30043")?, "TIMEOUT", "{way:?}");
    }
    Ok(())
}
