//! What another node makes different.

use std::{collections::BTreeSet, time::Duration};

use anyhow::Result;
use serde_json::json;
use sheave_tests::{
    client::{Client, Way},
    lab::Lab,
    node::Node,
    objects::{Slice, Svc},
};

const PATIENCE: Duration = Duration::from_secs(1);

/// Clients in a pod and on the host of each node: the columns of case 28.
fn clients(lab: &Lab) -> Result<Vec<(String, Client)>> {
    let mut clients = Vec::new();
    for node in &lab.nodes {
        clients.push((format!("a pod on {}", node.name), node.pod(20)?.place.client()?));
        clients.push((format!("host {}", node.name), node.host.client()?));
    }
    clients.iter_mut().for_each(|(_, client)| client.patience = PATIENCE);
    Ok(clients)
}

/// The in-cluster half of case 28. Second run: `internalTrafficPolicy` binds the cluster IP alone; whoever is inside
/// the cluster still reaches every endpoint by the load balancer's address.
#[test]
fn case_28_policies_bind_inside_clients_at_the_cluster_ip_only() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let service = Svc::new("lbl").ip("10.96.0.70").ingress("203.0.113.31", "VIP").port("t", 12345, "TCP");
    let service = service.set("externalTrafficPolicy", json!("Local"));
    lab.apply(&[&service, &Slice::web("lbl").ready("10.244.1.10", "n1")])?;
    let agents = lab.nodes.iter().map(Node::agent).collect::<Result<Vec<_>>>()?;
    let clients = clients(&lab)?;
    let (a, silence) = ("A", "TIMEOUT");
    for (run, service, at_cluster_ip) in [
        ("first", service.clone(), [a, a, a, a]),
        ("second", service.set("internalTrafficPolicy", json!("Local")), [a, a, silence, silence]),
    ] {
        lab.apply(&[&service])?;
        agents.iter().try_for_each(|agent| lab.settle(agent))?;
        for ((from, client), expected) in clients.iter().zip(at_cluster_ip) {
            assert_eq!(client.outcome(Way::Tcp, "10.96.0.70:12345")?, expected, "{run} run: {from}, the cluster IP");
            assert_eq!(client.outcome(Way::Tcp, "203.0.113.31:12345")?, a, "{run} run: {from}, the load balancer");
        }
    }
    Ok(())
}

/// F02: it is that node's to serve, by its policies and its endpoints.
#[test]
fn a_node_port_of_another_node_is_left_to_that_node() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let _server = lab.n2().server(10, "A")?; // beside the client, so that nothing else needs the wire
    let service = Svc::web("np", "10.96.0.71").set("type", json!("NodePort"));
    let service = service.port("n", 81, "TCP").node_port(30071).port("m", 81, "UDP").node_port(30071);
    let slice = Slice::new("np", "np").port("n", 8080, "TCP").port("m", 8080, "UDP").ready("10.244.2.10", "n2");
    lab.apply(&[&service, &slice])?;
    let agent = lab.n2().agent()?; // none on n1: whatever reaches it is not translated there
    lab.settle(&agent)?;
    for (from, mut client) in [("host", lab.n2().host.client()?), ("pod", lab.n2().pod(20)?.place.client()?)] {
        client.patience = PATIENCE;
        for way in Way::ALL {
            assert_eq!(client.outcome(way, "192.0.2.12:30071")?, "A", "{from}, {way:?}: its own node");
            let tap = lab.fabric.tap()?;
            assert_ne!(client.outcome(way, "192.0.2.11:30071")?, "A", "{from}, {way:?}: the other node");
            assert_ne!(tap.to("192.0.2.11")?, 0, "{from}, {way:?}: it goes there as it is");
        }
    }
    Ok(())
}

/// C12, F25: of the same objects each node makes its own.
#[test]
fn each_node_follows_its_own_hints_and_policies() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n2().server(10, "B")?];
    let hint = |node: &str| json!({"forNodes": [{"name": node}]});
    let near = Slice::web("near").ready("10.244.1.10", "n1").with("hints", hint("n1"));
    let near = near.ready("10.244.2.10", "n2").with("hints", hint("n2"));
    let local = Slice::web("local").ready("10.244.1.10", "n1").ready("10.244.2.10", "n2");
    let any = Slice::web("any").ready("10.244.1.10", "n1").ready("10.244.2.10", "n2");
    let local_service = Svc::web("local", "10.96.0.73").set("internalTrafficPolicy", json!("Local"));
    lab.apply(&[&Svc::web("near", "10.96.0.72"), &near, &local_service, &local, &Svc::web("any", "10.96.0.74"), &any])?;
    let agents = lab.nodes.iter().map(Node::agent).collect::<Result<Vec<_>>>()?;
    agents.iter().try_for_each(|agent| lab.settle(agent))?;
    for ((from, client), expected) in clients(&lab)?.iter().zip(["A", "A", "B", "B"]) {
        for (to, expected) in
            [("10.96.0.72:80", vec![expected]), ("10.96.0.73:80", vec![expected]), ("10.96.0.74:80", vec!["A", "B"])]
        {
            let names: BTreeSet<_> = client.dial_many(Way::Tcp, to, 30)?.into_keys().collect();
            assert!(names.iter().eq(&expected), "{from}, {to}: {names:?}");
        }
    }
    Ok(())
}
