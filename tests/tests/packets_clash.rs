//! One client, one port, two addresses of a Service, one backend, at the same time: behind ingress both conversations would
//! be the same packets, so that the second one gets another port of the client there.

use std::{
    cell::Cell,
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::{Client, Errno, Socket, Way},
    node::Pod,
    objects::{Slice, Svc},
    pair::{N1, N1_6, N1_6_UPLINK, N1_UPLINK, OUTSIDE, OUTSIDE6, Pair},
};

/// Where two conversations of one port lead.
struct Case {
    what: &'static str,
    /// Two addresses of one Service.
    to: [&'static str; 2],
    /// Its only endpoint.
    server: &'static str,
    /// Whom that sees.
    seen: &'static str,
}

/// A client and the address that it binds to, a port for each pair of conversations.
struct Dialler<'a> {
    client: &'a Client,
    port: Cell<u16>,
}

impl<'a> Dialler<'a> {
    fn new(client: &'a Client) -> Self {
        Self { client, port: Cell::new(40_000) }
    }

    /// Both sockets of a pair, bound to one port. A socket that is not connected serves both conversations.
    fn pair(&self, way: Way, ip: IpAddr, to: [SocketAddr; 2]) -> Result<(SocketAddr, Vec<Socket<'a>>)> {
        let bind = SocketAddr::new(ip, self.port.replace(self.port.get() + 1));
        let count = if way == Way::UdpSendto { 1 } else { 2 };
        let sockets = (0..count).map(|_| self.client.open(way, bind, Some(bind))).collect::<Result<Vec<_>>>()?;
        if way != Way::UdpSendto {
            sockets.iter().zip(to).try_for_each(|(socket, to)| socket.connect(to))?;
        }
        Ok((bind, sockets))
    }

    /// Questions by turns, each answered by the server and from the address that was asked. Each conversation has one port
    /// all the time, which is not the other one's.
    fn both_talk(&self, way: Way, ip: &str, case: &Case) -> Result<()> {
        let to = [case.to[0].parse()?, case.to[1].parse()?];
        let (bind, sockets) = self.pair(way, ip.parse()?, to)?;
        let mut ports = [BTreeSet::new(), BTreeSet::new()];
        for turn in 0..6 {
            let (way_to, socket) = (to[turn % 2], &sockets[turn % sockets.len()]);
            let received = if way == Way::UdpSendto { socket.ask_at(way_to) } else { socket.ask() };
            let received = received.with_context(|| format!("question {turn}, to {way_to}"))?;
            ensure!(received.source == way_to, "question {turn} to {way_to} was answered by {}", received.source);
            ensure!(received.answer.name == case.server, "{way_to} leads to {}", received.answer.name);
            let client = received.answer.client;
            ensure!(client.ip() == case.seen.parse::<IpAddr>()?, "{way_to}: the server sees {client}");
            ports[turn % 2].insert(client.port());
        }
        ensure!(ports.iter().all(|ports| ports.len() == 1), "ports changed: {ports:?}");
        ensure!(ports[0] != ports[1], "the server sees one conversation: {ports:?}");
        if bind.ip() == case.seen.parse::<IpAddr>()? {
            ensure!(ports[0].contains(&bind.port()), "the first conversation lost its port: {ports:?}");
        }
        Ok(())
    }
}

/// A Service at a load balancer's addresses as well, of both families.
fn service(pair: &Pair, name: &str, number: u8, pod: &Pod, policy: &str) -> Result<()> {
    pair.service(name, number, &[pod], |service| {
        let service = service.ingress(&format!("203.0.113.{number}"), "VIP");
        service.ingress(&format!("2001:db8:203::{number}"), "VIP").set("externalTrafficPolicy", json!(policy))
    })
}

/// A Service of n1's host network, at two external addresses.
fn host_service(pair: &Pair, name: &str, number: u8, policy: &str) -> Result<()> {
    let service = Svc::new(name).ip(&format!("10.96.0.{number}")).port("t", 80, "TCP").port("u", 80, "UDP");
    let addresses = json!([format!("203.0.113.{number}"), format!("203.0.113.1{number}")]);
    let service = service.set("externalIPs", addresses).set("externalTrafficPolicy", json!(policy));
    let slice = Slice::new(name, name).port("t", 9090, "TCP").port("u", 9090, "UDP").ready("192.0.2.11", "n1");
    pair.lab.apply(&[&service, &slice])
}

#[test]
fn a_client_outside_has_two_conversations_from_one_port() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let _server = pair.lab.n1().host.echo("n1", &["9090/TCP", "9090/UDP"])?;
    service(&pair, "near", 41, &pair.a, "Cluster")?;
    service(&pair, "far", 42, &pair.b, "Cluster")?;
    service(&pair, "seen", 43, &pair.a, "Local")?;
    host_service(&pair, "host", 44, "Cluster")?;
    host_service(&pair, "host-seen", 45, "Local")?;
    let agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let dialler = Dialler::new(&outside);
    let case = |what, to, server, seen| Case { what, to, server, seen };
    for way in Way::ALL {
        for (ip, case) in [
            (OUTSIDE, case("a near pod", ["192.0.2.11:30041", "203.0.113.41:80"], "a", N1)),
            (OUTSIDE, case("a far pod", ["203.0.113.42:80", "10.96.0.42:80"], "b", N1_UPLINK)),
            (OUTSIDE, case("a pod that sees its client", ["192.0.2.11:30043", "203.0.113.43:80"], "a", OUTSIDE)),
            (OUTSIDE, case("the node itself", ["203.0.113.44:80", "203.0.113.144:80"], "n1", OUTSIDE)),
            (OUTSIDE, case("the node itself, Local", ["203.0.113.45:80", "203.0.113.145:80"], "n1", OUTSIDE)),
            (OUTSIDE6, case("a near pod", ["[2001:db8::11]:30041", "[2001:db8:203::41]:80"], "a", N1_6)),
            (OUTSIDE6, case("a far pod", ["[2001:db8:203::42]:80", "[2001:db8:96::42]:80"], "b", N1_6_UPLINK)),
            (OUTSIDE6, case("a pod that sees it", ["[2001:db8::11]:30043", "[2001:db8:203::43]:80"], "a", OUTSIDE6)),
        ] {
            dialler.both_talk(way, ip, &case).with_context(|| format!("{way:?}, {}, {:?}", case.what, case.to))?;
        }
    }
    let counters = agent.status()?.counters;
    assert_eq!(counters.get("packet_other_port"), Some(&24), "one for each case: {counters:?}");
    assert_eq!(counters.get("packet_clash").copied().unwrap_or_default(), 0, "{counters:?}");
    Ok(())
}

/// Pods that dial packet by packet, one of them itself.
#[test]
fn a_pod_has_two_conversations_from_one_port() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    service(&pair, "near", 41, &pair.a, "Cluster")?;
    service(&pair, "far", 42, &pair.b, "Cluster")?;
    service(&pair, "far-seen", 43, &pair.b, "Local")?;
    let pod = pair.lab.n1().pod(30)?;
    let _agent = pair.lab.n1().agent_with(&["--host-sockets-only", "--pod-packets"])?;
    let (client, itself) = (pod.place.client()?, pair.a.place.client()?);
    let (dialler, hairpin) = (Dialler::new(&client), Dialler::new(&itself));
    let case = |what, to, server, seen| Case { what, to, server, seen };
    for way in Way::ALL {
        for (dialler, ip, case) in [
            (&dialler, "10.244.1.30", case("a near pod", ["192.0.2.11:30041", "203.0.113.41:80"], "a", N1)),
            (&dialler, "10.244.1.30", case("a far pod", ["192.0.2.11:30042", "203.0.113.42:80"], "b", N1_UPLINK)),
            (&dialler, "10.244.1.30", case("seen afar", ["10.96.0.43:80", "203.0.113.43:80"], "b", "10.244.1.30")),
            (&hairpin, "10.244.1.10", case("itself", ["10.96.0.41:80", "203.0.113.41:80"], "a", N1)),
            (&hairpin, "2001:db8:1::10", case("itself", ["[2001:db8:96::41]:80", "[2001:db8:203::41]:80"], "a", N1_6)),
        ] {
            dialler.both_talk(way, ip, &case).with_context(|| format!("{way:?}, {}, {:?}", case.what, case.to))?;
        }
    }
    Ok(())
}

/// What the backend's node says of a closed port reaches the conversation that it is about, by the port that the client knows.
#[test]
fn an_error_reaches_the_conversation_that_it_is_about() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let closed = pair.lab.n1().pod(30)?;
    service(&pair, "hidden", 41, &closed, "Cluster")?;
    service(&pair, "seen", 42, &closed, "Local")?;
    let _agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let dialler = Dialler::new(&outside);
    for (ip, to) in [
        (OUTSIDE, ["192.0.2.11:30041", "203.0.113.41:80"]),
        (OUTSIDE, ["192.0.2.11:30042", "203.0.113.42:80"]),
        (OUTSIDE6, ["[2001:db8::11]:30041", "[2001:db8:203::41]:80"]),
        (OUTSIDE6, ["[2001:db8::11]:30042", "[2001:db8:203::42]:80"]),
    ] {
        let (_, sockets) = dialler.pair(Way::Udp, ip.parse()?, [to[0].parse()?, to[1].parse()?])?;
        // Both flows are there before the first error is on its way.
        for (turn, (socket, to)) in sockets.iter().zip(to).cycle().take(4).enumerate() {
            let answer = socket.ask().err().with_context(|| format!("{to} answered"))?;
            assert_eq!(answer.downcast::<Errno>()?.name, "ECONNREFUSED", "question {turn}, to {to}");
        }
    }
    Ok(())
}

/// `lb list --conntrack` names the client by its own port, and says which one the backend sees.
#[test]
fn both_conversations_are_listed_by_the_clients_own_port() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    service(&pair, "seen", 43, &pair.a, "Local")?;
    let agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let to = ["192.0.2.11:30043", "203.0.113.43:80"];
    let (bind, sockets) = Dialler::new(&outside).pair(Way::Tcp, OUTSIDE.parse()?, [to[0].parse()?, to[1].parse()?])?;
    let seen_as = sockets[1].ask()?.answer.client;
    let list: Value = serde_json::from_str(&agent.sheave(&["lb", "list", "--conntrack", "-o", "json"])?)?;
    let items = list["items"].as_array().context("no items")?;
    let told: Vec<_> = items.iter().map(|item| (&item["client"], &item["frontend"], &item["masqueradedAs"])).collect();
    let (client, other) = (json!(bind.to_string()), json!(seen_as.to_string()));
    let expected = [(&client, &json!(to[0]), &Value::Null), (&client, &json!(to[1]), &other)];
    assert_eq!(told, expected, "{list}");
    Ok(())
}
