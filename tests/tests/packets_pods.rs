//! The packet path for pods whose sockets the node's kernel does not see (Kata, gVisor) or shall not touch (meshes):
//! the socket path is switched off for pods, every packet of theirs is translated.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use sheave_tests::{
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
    pair::{WAYS, reaches},
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

/// FLOW-1, the row of pods; FLOW-3's hairpin; V-1 and V-4 for pods.
#[test]
fn flow_1_pods_are_served_packet_by_packet() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b, client) = (lab.n1().pod(10)?, lab.n2().pod(20)?, lab.n1().pod(30)?);
    let ports = ["8080/TCP", "8080/UDP"];
    let _servers = [a.place.echo("a", &ports)?, b.place.echo("b", &ports)?];
    let both = [(&a, "n1"), (&b, "n2")];
    service(&lab, "svc1", 41, &both, ("Cluster", "Cluster"))?;
    service(&lab, "svc2", 42, &both, ("Cluster", "Local"))?;
    service(&lab, "svc3", 43, &both, ("Local", "Cluster"))?;
    service(&lab, "alone", 44, &[(&a, "n1")], ("Cluster", "Cluster"))?;
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
            assert_eq!(pod.outcome(way, to)?, "ECONNREFUSED", "{way:?} {to}");
        }
        // F36: the backend is the client.
        let itself = a.place.client()?;
        reaches(&itself, way, "10.96.0.44:80", &[("a", "10.244.1.1")])?;
        reaches(&itself, way, "192.0.2.11:30044", &[("a", "10.244.1.1")])?;
        reaches(&itself, way, "[2001:db8:96::44]:80", &[("a", "2001:db8:1::1")])?;
        // Direct traffic is nobody's business.
        assert_eq!(pod.dial(way, &b.at(8080).to_string())?.client.ip(), client.v4, "{way:?}");
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
