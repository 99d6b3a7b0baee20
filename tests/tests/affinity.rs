//! Session affinity at the socket, where a client is a network namespace.

use std::{collections::BTreeSet, thread, time::Duration};

use anyhow::Result;
use serde_json::json;
use sheave_tests::{
    client::{Client, Way},
    lab::Lab,
    node::Server,
    objects::{Slice, Svc},
};

const TO: &str = "10.96.0.36:80";
const ADDRESSES: [&str; 4] = ["10.244.1.10", "10.244.1.11", "10.244.1.12", "10.244.1.13"];

/// Servers A, B, C, D.
fn servers(lab: &Lab) -> Result<Vec<Server>> {
    (10..).zip(["A", "B", "C", "D"]).map(|(number, name)| lab.n1().server(number, name)).collect()
}

fn service(timeout: u32) -> Svc {
    let service = Svc::new("aff").ip("10.96.0.36").port("t", 80, "TCP").node_port(30036);
    service.port("u", 80, "UDP").node_port(30036).affinity(timeout)
}

fn slice(addresses: &[&str]) -> Slice {
    addresses.iter().fold(Slice::web("aff"), |slice, address| slice.ready(address, "n1"))
}

/// Everyone who answered in so many dials.
fn names(client: &Client, way: Way, to: &str, times: usize) -> Result<BTreeSet<String>> {
    Ok(client.dial_many(way, to, times)?.into_keys().collect())
}

/// The one who answers in many dials.
fn pinned(client: &Client, way: Way, to: &str) -> Result<String> {
    let names = names(client, way, to, 15)?;
    assert_eq!(names.len(), 1, "{way:?} to {to} is answered by {names:?}");
    Ok(names.into_iter().next().unwrap_or_default())
}

fn address_of(name: &str) -> &'static str {
    ADDRESSES["ABCD".find(name).unwrap_or_default()]
}

fn all_but(name: &str) -> Vec<&'static str> {
    ADDRESSES.into_iter().filter(|address| *address != address_of(name)).collect()
}

#[test]
fn a01_a06_a07_one_client_has_one_endpoint_by_every_address() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    lab.apply(&[&service(3600), &slice(&ADDRESSES)])?;
    lab.settle(&agent)?;
    let pods = (20..28).map(|number| lab.n1().pod(number)).collect::<Result<Vec<_>>>()?;
    let mut seen = BTreeSet::new();
    for (from, place) in pods.iter().map(|pod| ("pod", &pod.place)).chain([("host", &lab.n1().host)]) {
        let client = place.client()?;
        // A07: the entry made through the node port is honoured through the cluster IP. A06: the host is one client.
        let name = pinned(&client, Way::Tcp, "192.0.2.11:30036")?;
        assert_eq!(pinned(&client, Way::Tcp, TO)?, name, "A01, A07: {from}");
        if from == "host" {
            assert_eq!(pinned(&client, Way::Tcp, "127.0.0.1:30036")?, name, "A06: loopback is the same client");
        }
        // Another process of the namespace is the same client.
        assert_eq!(pinned(&place.client()?, Way::Tcp, TO)?, name, "A01: {from}, another process");
        let by_udp = pinned(&client, Way::UdpSendto, TO)?;
        assert_eq!(pinned(&client, Way::Udp, "192.0.2.11:30036")?, by_udp, "8.1: UDP too");
        seen.extend([name, by_udp]);
    }
    assert!(seen.len() > 1, "different clients and ports choose for themselves: {seen:?}");
    Ok(())
}

#[test]
fn a02_a08_an_entry_ends_when_unused_for_the_timeout_and_lives_while_used() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    lab.apply(&[&service(2), &slice(&ADDRESSES)])?;
    lab.settle(&agent)?;
    let pods = (20..30).map(|number| lab.n1().pod(number)).collect::<Result<Vec<_>>>()?;
    let clients = pods.iter().map(|pod| pod.place.client()).collect::<Result<Vec<_>>>()?;
    let before = clients.iter().map(|client| pinned(client, Way::Tcp, TO)).collect::<Result<Vec<_>>>()?;
    for _ in 0..5 {
        thread::sleep(Duration::from_secs(1)); // half the timeout: time itself is what is tested
        let name = client_name(&clients[0])?;
        assert_eq!(name, before[0], "A08: used again and again");
    }
    // The others have been idle for 5 s meanwhile.
    let after = clients.iter().map(|client| pinned(client, Way::Tcp, TO)).collect::<Result<Vec<_>>>()?;
    assert_ne!(after[1..], before[1..], "A02: nine expired entries of four endpoints do not all come out the same");
    assert_eq!(after[0], before[0], "A08");
    Ok(())
}

fn client_name(client: &Client) -> Result<String> {
    Ok(client.dial(Way::Tcp, TO)?.name)
}

#[test]
fn a03_case_24_removed_and_terminating_backends_are_left_at_once() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    lab.apply(&[&service(3600), &slice(&ADDRESSES)])?;
    lab.settle(&agent)?;
    let client = lab.n1().pod(20)?.place.client()?;
    let first = pinned(&client, Way::Tcp, TO)?;
    let open = client.connect(Way::Tcp, TO)?;
    assert_eq!(open.ask()?.answer.name, first);

    let rest = slice(&all_but(&first));
    let remembered = |name: &str| -> Result<bool> {
        let list = agent.sheave(&["lb", "list", "--affinity", "-n", "t"])?;
        Ok(list.lines().any(|line| line.contains("netns:") && line.contains(&format!("{}:8080", address_of(name)))))
    };
    assert!(remembered(&first)?);
    lab.apply(&[&rest.clone().terminating(address_of(&first), "n1")])?; // (a)
    lab.settle(&agent)?;
    assert!(!remembered(&first)?, "(a) no entry holds a terminating backend");
    let second = pinned(&client, Way::Tcp, TO)?;
    assert_ne!(second, first, "(a)");
    assert_eq!(open.ask()?.answer.name, first, "(a) an open connection goes on");

    lab.apply(&[&rest])?; // (b)
    lab.settle(&agent)?;
    assert_eq!(pinned(&client, Way::Tcp, TO)?, second, "(b)");
    assert!(remembered(&second)? && !remembered(&first)?, "(b)");

    lab.apply(&[&slice(&ADDRESSES)])?; // (c)
    lab.settle(&agent)?;
    assert_eq!(pinned(&client, Way::Tcp, TO)?, second, "(c), A03: stays with the new one");

    for state in [slice(&all_but(&second)).not_ready(address_of(&second), "n1"), slice(&all_but(&second))] {
        lab.apply(&[&state])?;
        lab.settle(&agent)?;
        assert_ne!(pinned(&client, Way::Tcp, TO)?, second, "A03");
    }
    Ok(())
}

#[test]
fn a04_switched_off_and_on_live() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let none = service(3600).set("sessionAffinity", json!("None"));
    lab.apply(&[&none, &slice(&ADDRESSES)])?;
    lab.settle(&agent)?;
    let client = lab.n1().pod(20)?.place.client()?;
    let spread = |row: &str| -> Result<()> {
        for way in Way::ALL {
            assert_eq!(names(&client, way, TO, 60)?.len(), 4, "A04: {row}, {way:?}");
        }
        Ok(())
    };
    spread("None")?;
    let mut pins = BTreeSet::new();
    for turn in 1..=8 {
        lab.apply(&[&service(3600)])?;
        lab.settle(&agent)?;
        pins.insert(pinned(&client, Way::Tcp, TO)?);
        lab.apply(&[&none])?;
        lab.settle(&agent)?;
        if turn == 1 {
            spread("None again")?;
        }
    }
    assert!(pins.len() > 1, "F24: switched on it starts empty, so eight choices among four differ: {pins:?}");
    Ok(())
}

#[test]
fn a05_an_entry_for_an_endpoint_outside_the_usable_set_is_chosen_anew() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let local = service(3600).set("internalTrafficPolicy", json!("Local"));
    let slice = ADDRESSES[1..].iter().fold(slice(&ADDRESSES[..1]), |slice, address| slice.ready(address, "n2"));
    lab.apply(&[&local, &slice])?;
    lab.settle(&agent)?;
    let pods = (20..28).map(|number| lab.n1().pod(number)).collect::<Result<Vec<_>>>()?;
    let mut remote = 0;
    for pod in &pods {
        let client = pod.place.client()?;
        remote += usize::from(pinned(&client, Way::Tcp, "192.0.2.11:30036")? != "A");
        assert_eq!(pinned(&client, Way::Tcp, TO)?, "A", "A05: the cluster IP serves local endpoints only");
        assert_eq!(pinned(&client, Way::Tcp, "192.0.2.11:30036")?, "A", "A07: and the node port follows");
    }
    assert!(remote > 0, "some of eight entries were for one of the three endpoints elsewhere");
    Ok(())
}

#[test]
fn entries_survive_the_agent() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    lab.apply(&[&service(3600), &slice(&ADDRESSES)])?;
    lab.settle(&agent)?;
    let pods = (20..28).map(|number| lab.n1().pod(number)).collect::<Result<Vec<_>>>()?;
    let clients = pods.iter().map(|pod| pod.place.client()).collect::<Result<Vec<_>>>()?;
    let all = || clients.iter().map(|client| pinned(client, Way::Tcp, TO)).collect::<Result<Vec<_>>>();
    let before = all()?;
    agent.kill()?;
    assert_eq!(all()?, before, "nobody at home");
    agent.restart()?;
    assert_eq!(all()?, before, "adopted");
    lab.apply(&[&slice(&ADDRESSES[..3])])?;
    lab.settle(&agent)?;
    for (client, name) in clients.iter().zip(&before).filter(|(_, name)| *name != "D") {
        assert_eq!(pinned(client, Way::Tcp, TO)?, *name, "another endpoint's end concerns nobody else");
    }
    Ok(())
}
