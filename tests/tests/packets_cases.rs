//! Cases from the field, as clients outside the nodes see them; numbers are those of docs/testing.md. What clients
//! inside see is in the files of the socket path.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use sheave_tests::{
    client::{LoadKind, Way},
    lab::Lab,
    objects::{Slice, Svc},
    tap::Tap,
    wait::{SOON, eventually, throughout},
};

const WAYS: [Way; 2] = [Way::Tcp, Way::Udp];

fn service(name: &str, number: u8) -> Svc {
    let node_port = 30_000 + u16::from(number);
    let service = Svc::new(name).ip(&format!("10.96.0.{number}")).port("t", 80, "TCP").node_port(node_port);
    service.port("u", 80, "UDP").node_port(node_port)
}

fn slice(name: &str) -> Slice {
    Slice::new(name, name).port("t", 8080, "TCP").port("u", 8080, "UDP")
}

/// A sender that never reads leaves a backend that is gone, reaches nobody meanwhile, not whoever gets that address
/// either, and then the next one.
#[test]
fn case_22_datagrams_leave_a_deleted_pod_and_find_the_next() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (node, outside) = (lab.n1(), lab.outside.client()?);
    let (old, new) = (node.server(10, "old")?, node.server(11, "new")?);
    let (old_tap, new_tap) = (old.pod.place.tap()?, new.pod.place.tap()?);
    let (old_address, new_address) = (old.pod.v4.to_string(), new.pod.v4.to_string());
    lab.apply(&[&service("stats", 35), &slice("stats").ready(&old_address, "n1")])?;
    lab.settle(&agent)?;
    let loads = [Way::Udp, Way::UdpSendto]
        .map(|way| outside.load(way, LoadKind::Send, "192.0.2.11:30035", Duration::from_millis(20)));
    let [_connected, _unconnected] = loads.map(|load| load.expect("a load starts"));
    let arrive = |tap: &Tap, address: &str, what: &str| {
        let before = tap.to(address)?;
        eventually(what, SOON, || {
            let now = tap.to(address)?;
            ensure!(now > before + 4, "{} more", now - before);
            Ok(())
        })
    };
    let stay_away = |tap: &Tap, who: &str| {
        let before = tap.to(&old_address)?;
        throughout(Duration::from_millis(500), || {
            ensure!(tap.to(&old_address)? == before, "{who} is sent datagrams");
            Ok(())
        })
    };
    arrive(&old_tap, &old_address, "datagrams reach the old pod")?;
    lab.apply(&[&slice("stats")])?;
    lab.settle(&agent)?;
    stay_away(&old_tap, "the old pod")?;
    drop(old.echo);
    node.remove(old.pod)?;
    let unrelated = node.server(10, "unrelated")?;
    let tap = unrelated.pod.place.tap()?;
    stay_away(&tap, "an unrelated pod with the old address")?;
    lab.apply(&[&slice("stats").ready(&new_address, "n1")])?;
    arrive(&new_tap, &new_address, "datagrams reach the new pod")?;
    assert_eq!(tap.to(&old_address)?, 0, "datagrams reach the unrelated pod when there is a new one");
    Ok(())
}

/// The same when the whole Service is deleted; and when another one gets all its addresses, the same senders reach that.
#[test]
fn case_22_datagrams_leave_a_deleted_service_and_find_who_has_its_addresses_next() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let mut servers = [lab.n1().server(10, "old")?, lab.n1().server(11, "new")?];
    let [old, new] = servers.each_ref().map(|server| server.pod.v4.to_string());
    let with_ingress = |name: &str| service(name, 35).ingress("203.0.113.35", "VIP");
    lab.route("203.0.113.0/24", lab.n1())?;
    lab.apply(&[&with_ingress("stats"), &slice("stats").ready(&old, "n1")])?;
    lab.settle(&agent)?;
    let outside = lab.outside.client()?;
    let mut senders = Vec::new();
    for to in ["192.0.2.11:30035", "203.0.113.35:80"] {
        for way in [Way::Udp, Way::UdpSendto] {
            senders.push(outside.load(way, LoadKind::Send, to, Duration::from_millis(20))?);
        }
    }
    servers[0].echo.reached("the backend gets datagrams")?;
    lab.delete(&[&with_ingress("stats")])?;
    lab.settle(&agent)?;
    let left = servers[0].echo.seen()?;
    throughout(Duration::from_secs(1), || {
        ensure!(servers[0].echo.seen()? == left, "the old pod is sent datagrams");
        Ok(())
    })?;
    lab.apply(&[&with_ingress("other"), &slice("other").ready(&new, "n1")])?;
    while let Some(sender) = senders.pop() {
        servers[1].echo.reached("the other Service's backend gets datagrams")?;
        drop(sender); // one less each time: so each of them is among those that reach it
    }
    ensure!(servers[0].echo.seen()? == left, "the old pod is sent datagrams again");
    Ok(())
}

/// A client that is pinned to a backend which is terminating or gone gets another one, and stays with that.
#[test]
fn case_24_affinity_leaves_a_backend_that_terminates() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let [a, b] = servers.each_ref().map(|server| server.pod.v4.to_string());
    let (a, b) = (a.as_str(), b.as_str());
    let outside = lab.outside.client()?;
    let to = "192.0.2.11:30036";
    lab.apply(&[&service("aff", 36).affinity(600), &slice("aff").ready(a, "n1")])?;
    lab.settle(&agent)?;
    let open = outside.connect(Way::Tcp, to)?;
    assert_eq!(open.ask()?.answer.name, "A");
    for (phase, slice, expected) in [
        ("both are ready", slice("aff").ready(a, "n1").ready(b, "n1"), "A"),
        ("A is terminating", slice("aff").terminating(a, "n1").ready(b, "n1"), "B"),
        ("A is back", slice("aff").ready(a, "n1").ready(b, "n1"), "B"),
    ] {
        lab.apply(&[&slice])?;
        lab.settle(&agent)?;
        for way in WAYS {
            // The affinity of a Service's two ports is two affinities: UDP may have begun with B.
            if way == Way::Tcp || expected == "B" {
                assert_eq!(outside.outcome(way, to)?, expected, "{phase}, {way:?}");
            }
        }
        assert_eq!(open.ask()?.answer.name, "A", "{phase}: an open connection stays");
    }
    Ok(())
}

/// The outside half: policy Local binds clients from outside to the node that they come to, at every address of the
/// Service but the ClusterIP.
#[test]
fn case_28_policy_local_binds_clients_outside_to_the_node_they_come_to() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let server = lab.n1().server(10, "a")?;
    let lb = service("lbl", 31).ingress("203.0.113.31", "VIP").set("externalTrafficPolicy", json!("Local"));
    lab.apply(&[&lb, &slice("lbl").ready(&server.pod.v4.to_string(), "n1")])?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    for (node, served) in [(lab.n1(), "a"), (lab.n2(), "TIMEOUT")] {
        for prefix in ["203.0.113.0/24", "10.96.0.0/16"] {
            lab.route(prefix, node)?;
        }
        for way in WAYS {
            for (to, outcome) in [
                ("203.0.113.31:80".to_owned(), served),
                (format!("{}:30031", node.v4), served),
                ("10.96.0.31:80".to_owned(), "a"),
            ] {
                assert_eq!(outside.outcome(way, &to)?, outcome, "through {}, {way:?} {to}", node.name);
            }
        }
        let seen = outside.dial(Way::Tcp, "10.96.0.31:80")?.client.ip();
        ensure!(seen.to_string() != "198.51.100.10", "through {}: at the ClusterIP the client is hidden", node.name);
    }
    Ok(())
}
