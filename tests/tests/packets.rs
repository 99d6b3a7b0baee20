//! The packet path: clients outside the nodes.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use serde_json::json;
use sheave_tests::{
    client::{Client, Dialled, Errno, Way},
    lab::Lab,
    objects::{Slice, Svc},
    pair::{N1, N1_6, N1_6_UPLINK, N1_UPLINK, OUTSIDE, OUTSIDE6, Pair, WAYS, reaches},
    wait::{SOON, eventually},
};

/// Nothing answers: long enough to be sure.
const SILENCE: Duration = Duration::from_secs(1);

fn load_balancer(service: Svc, addresses: &[&str]) -> Svc {
    addresses.iter().fold(service, |service, address| service.ingress(address, "VIP"))
}

/// FLOW-1, the row of outside clients, with both families and protocols.
#[test]
fn flow_1_who_is_reached_from_outside_and_whom_it_sees() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let both = [&pair.a, &pair.b];
    let lb = |n: u8| [format!("203.0.113.{n}"), format!("2001:db8:203::{n}")];
    let addresses = |n: u8, service: Svc| load_balancer(service, &lb(n).each_ref().map(String::as_str));
    pair.service("svc1", 41, &both, |s| addresses(41, s))?;
    pair.service("svc2", 42, &both, |s| addresses(42, s).set("externalTrafficPolicy", json!("Local")))?;
    pair.service("svc3", 43, &both, |s| addresses(43, s).set("internalTrafficPolicy", json!("Local")))?;
    let _agents = [pair.lab.n1().agent()?, pair.lab.n2().agent()?];
    let outside = pair.lab.outside.client()?;

    let (v4_hidden, v6_hidden) = ([("a", N1), ("b", N1_UPLINK)], [("a", N1_6), ("b", N1_6_UPLINK)]);
    for way in WAYS {
        for (to, servers) in [
            ("10.96.0.41:80", &v4_hidden[..]),
            ("192.0.2.11:30041", &v4_hidden),
            ("203.0.113.41:80", &v4_hidden),
            ("10.96.0.42:80", &v4_hidden),
            ("192.0.2.11:30042", &[("a", OUTSIDE)]),
            ("203.0.113.42:80", &[("a", OUTSIDE)]),
            ("10.96.0.43:80", &v4_hidden[..1]),
            ("192.0.2.11:30043", &v4_hidden),
            ("203.0.113.43:80", &v4_hidden),
            ("[2001:db8:96::41]:80", &v6_hidden),
            ("[2001:db8::11]:30041", &v6_hidden),
            ("[2001:db8:203::41]:80", &v6_hidden),
            ("[2001:db8::11]:30042", &[("a", OUTSIDE6)]),
            ("[2001:db8:203::42]:80", &[("a", OUTSIDE6)]),
            ("[2001:db8:96::43]:80", &v6_hidden[..1]),
        ] {
            reaches(&outside, way, to, servers)?;
        }
        // The other node has its own pod, and its own view.
        reaches(&outside, way, "192.0.2.12:30042", &[("b", OUTSIDE)])?;
        reaches(&outside, way, "192.0.2.12:30041", &[("a", "192.0.2.12"), ("b", "10.244.2.1")])?;
    }
    Ok(())
}

/// FLOW-2, V-1: nothing to reach is refused at once. V-3: a Local policy without local endpoint is silent. V-4: unknown
/// ports are refused. V-7: a node port's number is nothing elsewhere.
#[test]
fn what_cannot_be_served_is_refused_or_silent() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let all = |s: Svc| {
        let s = load_balancer(s, &["203.0.113.1", "2001:db8:203::1"]);
        s.set("externalIPs", json!(["203.0.113.2", "2001:db8:203::2"]))
    };
    pair.service("none", 41, &[], all)?;
    pair.service("far", 42, &[&pair.b], |s| {
        let s = load_balancer(s, &["203.0.113.3", "2001:db8:203::3"]);
        s.set("externalTrafficPolicy", json!("Local"))
    })?;
    let agent = pair.lab.n1().agent()?;
    pair.lab.settle(&agent)?;
    let (pod, host) = (pair.lab.n1().pod(30)?.place.client()?, pair.lab.n1().host.client()?);
    let mut outside = pair.lab.outside.client()?;
    outside.patience = SILENCE;
    for way in WAYS {
        for to in [
            "10.96.0.41:80",
            "192.0.2.11:30041",
            "203.0.113.1:80",
            "203.0.113.2:80",
            "[2001:db8:96::41]:80",
            "[2001:db8::11]:30041",
            "[2001:db8:203::1]:80",
            "[2001:db8:203::2]:80",
            "10.96.0.41:81",
            "[2001:db8:96::41]:81",
        ] {
            for (from, client) in [("outside", &outside), ("a pod", &pod), ("the node", &host)] {
                assert_eq!(client.refusal(way, to)?, "ECONNREFUSED", "{from}, {way:?} {to}");
            }
        }
        for (to, outcome) in [
            ("192.0.2.11:30042", "TIMEOUT"),
            ("203.0.113.3:80", "TIMEOUT"),
            ("[2001:db8::11]:30042", "TIMEOUT"),
            ("[2001:db8:203::3]:80", "TIMEOUT"),
        ] {
            assert_eq!(outside.outcome(way, to)?, outcome, "{way:?} {to}");
        }
        // Short-circuits are for inside clients only; the far endpoint is there.
        assert_eq!(outside.outcome(way, "10.96.0.42:80")?, "b", "{way:?}");
    }
    Ok(())
}

/// FLOW-4: source ranges count at load-balancer addresses only, and are silent. Whoever is admitted is hidden as ever.
#[test]
fn flow_4_source_ranges_guard_load_balancer_addresses() -> Result<()> {
    const BLOCKED: &str = "198.51.100.130";
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.lab.outside.ip(&format!("addr add {BLOCKED}/24 dev eth0"))?;
    let ranges = |s: Svc, list: &[&str], balancers: &[&str]| {
        load_balancer(s, balancers).set("loadBalancerSourceRanges", json!(list))
    };
    let open = ["192.0.2.0/24", " 198.51.100.0/25"];
    pair.service("open", 41, &[&pair.a], |s| ranges(s, &open, &["203.0.113.1", "203.0.113.4"]))?;
    pair.service("shut", 42, &[&pair.a], |s| ranges(s, &["192.0.2.128/25"], &["203.0.113.2"]))?;
    pair.service("shut-empty", 43, &[], |s| ranges(s, &["192.0.2.128/25"], &["203.0.113.3"]))?;
    let agent = pair.lab.n1().agent()?;
    pair.lab.settle(&agent)?;
    let (mut pod, mut host) = (pair.lab.n1().pod(30)?.place.client()?, pair.lab.n1().host.client()?);
    let mut outside = pair.lab.outside.client()?;
    (pod.patience, host.patience, outside.patience) = (SILENCE, SILENCE, SILENCE);
    let blocked = Some(SocketAddr::new(BLOCKED.parse()?, 0));
    for way in WAYS {
        for (row, client, bind, to, outcome) in [
            ("outside", &outside, None, "203.0.113.1:80", N1),
            ("outside", &outside, None, "203.0.113.4:80", N1),
            ("outside", &outside, None, "192.0.2.11:30041", N1),
            ("outside", &outside, None, "203.0.113.2:80", "TIMEOUT"),
            ("outside", &outside, None, "192.0.2.11:30042", N1),
            ("outside", &outside, None, "10.96.0.42:80", N1),
            ("outside, V-6 before V-1", &outside, None, "203.0.113.3:80", "TIMEOUT"),
            ("outside, V-1", &outside, None, "192.0.2.11:30043", "ECONNREFUSED"),
            ("blocked", &outside, blocked, "203.0.113.1:80", "TIMEOUT"),
            ("blocked", &outside, blocked, "203.0.113.4:80", "TIMEOUT"),
            ("blocked", &outside, blocked, "192.0.2.11:30041", N1),
            ("a pod", &pod, None, "10.96.0.41:80", "10.244.1.30"),
            ("a pod", &pod, None, "203.0.113.1:80", "TIMEOUT"),
            ("a pod", &pod, None, "203.0.113.4:80", "TIMEOUT"),
            ("the node", &host, None, "203.0.113.1:80", N1_UPLINK),
            ("the node", &host, None, "203.0.113.4:80", N1_UPLINK),
        ] {
            let seen = match client.dial_from(way, to, bind) {
                Ok(dialled) => dialled.client.ip().to_string(),
                Err(error) => error.downcast::<Errno>()?.name,
            };
            assert_eq!(seen, outcome, "FLOW-4: {row}, {way:?} {to}: who is seen, or what is said");
        }
    }
    Ok(())
}

/// A08: a client keeps its backend, also beyond one connection; node ports and load-balancer addresses share it (A07).
#[test]
fn affinity_is_by_the_clients_address() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("sticky", 41, &[&pair.a, &pair.b], |s| load_balancer(s, &["203.0.113.1"]).affinity(600))?;
    let _agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    for way in WAYS {
        let first = outside.dial(way, "192.0.2.11:30041")?.name;
        for to in ["192.0.2.11:30041", "203.0.113.1:80"] {
            assert_eq!(outside.dial_many(way, to, 20)?, BTreeMap::from([(first.clone(), 20)]), "{way:?} {to}");
        }
    }
    Ok(())
}

/// A process of the node serves its clients unseen by any egress hook on the way in, and is translated on the way out.
#[test]
fn backends_in_the_host_network_of_both_nodes() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let ports = ["9090/TCP", "9090/UDP"];
    let _servers = [lab.n1().host.echo("n1", &ports)?, lab.n2().host.echo("n2", &ports)?];
    for (name, number, policy) in [("hosts", 41, "Cluster"), ("local", 42, "Local")] {
        let node_port = 30_000 + number;
        let service = Svc::new(name).ip(&format!("10.96.0.{number}")).port("t", 80, "TCP").node_port(node_port);
        let service = service.port("u", 80, "UDP").node_port(node_port).set("externalTrafficPolicy", json!(policy));
        let slice = Slice::new(name, name).port("t", 9090, "TCP").port("u", 9090, "UDP");
        lab.apply(&[&service, &slice.ready("192.0.2.11", "n1").ready("192.0.2.12", "n2")])?;
    }
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    let outside = lab.outside.client()?;
    for way in WAYS {
        reaches(&outside, way, "192.0.2.11:30041", &[("n1", OUTSIDE), ("n2", N1_UPLINK)])?;
        reaches(&outside, way, "192.0.2.11:30042", &[("n1", OUTSIDE)])?;
        assert_eq!(outside.dial(way, "192.0.2.12:9090")?.name, "n2", "direct traffic is nobody's business");
    }
    Ok(())
}

/// A socket of the node may have a NodePort's number as its own port; what it waits for is not a client's.
#[test]
fn own_connections_from_the_number_of_a_node_port_get_their_answers() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("web", 41, &[&pair.a], |s| s)?;
    let agent = pair.lab.n1().agent_with(&["--bind-protection=false"])?;
    agent.until_programmed("web")?;
    let _server = pair.lab.outside.echo("outside", &["8080/TCP", "8080/UDP"])?;
    let (host, outside) = (pair.lab.n1().host.client()?, pair.lab.outside.client()?);
    for way in WAYS {
        for (from, to) in
            [("192.0.2.11:30041", "198.51.100.10:8080"), ("[2001:db8::11]:30041", "[2001:db8:100::10]:8080")]
        {
            let dialled = host.dial_from(way, to, Some(from.parse()?)).with_context(|| format!("{way:?} {from}"))?;
            assert_eq!((dialled.name.as_str(), dialled.client.to_string().as_str()), ("outside", from), "{way:?}");
            assert_eq!(outside.outcome(way, from)?, "a", "{way:?}: clients are still served");
        }
    }
    Ok(())
}

/// The same of sockets that are not connected: whom they sent to answers them, everybody else is a client. Answers of
/// another node's backend come through the uplink, too.
#[test]
fn unconnected_sockets_with_the_number_of_a_node_port_get_their_answers() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("web", 41, &[&pair.a], |s| s)?;
    pair.service("far", 42, &[&pair.b], |s| s)?;
    let agent = pair.lab.n1().agent_with(&["--bind-protection=false"])?;
    agent.until_programmed("web")?;
    agent.until_programmed("far")?;
    let server = pair.lab.outside.echo("outside", &["8080/UDP"])?;
    let (host, outside) = (pair.lab.n1().host.client()?, pair.lab.outside.client()?);
    let (v4, v6) = ("192.0.2.11:30041", "[2001:db8::11]:30041");
    for (bind, to, name, seen) in [
        (v4, "198.51.100.10:8080", "outside", v4),
        ("0.0.0.0:30041", "198.51.100.10:8080", "outside", v4),
        (v6, "[2001:db8:100::10]:8080", "outside", v6),
        ("[::]:30041", "[2001:db8:100::10]:8080", "outside", v6),
        ("[::]:30041", "[::ffff:198.51.100.10]:8080", "outside", v4),
        ("0.0.0.0:30041", "10.96.0.42:80", "b", v4),
        ("[::]:30041", "[2001:db8:96::42]:80", "b", v6),
    ] {
        let from: SocketAddr = bind.parse()?;
        let socket = host.open(Way::UdpSendto, from, Some(from))?;
        for turn in ["first", "again"] {
            let received = socket.ask_at(to.parse()?).with_context(|| format!("{bind} to {to}, {turn}"))?;
            let answer = (received.answer.name, received.answer.client.to_string(), received.source.to_string());
            assert_eq!(answer, (name.into(), seen.into(), to.into()), "{bind}, {turn}");
        }
        assert_eq!(outside.outcome(Way::Udp, seen)?, "a", "{bind} to {to}: clients are served meanwhile");
    }
    drop(server);
    for (from, to) in [("198.51.100.10:8080", v4), ("[2001:db8:100::10]:8080", v6)] {
        let dialled = outside.dial_from(Way::Udp, to, Some(from.parse()?)).with_context(|| from.to_owned())?;
        assert_eq!(dialled.name, "a", "{from} answered sockets that are closed: it is a client like any other");
    }
    Ok(())
}

/// A dial from a port whose last connection this side has closed: until the other side has acknowledged that, which a
/// busy machine may take its time for, the kernel gives the port to nobody.
fn dial_again(client: &Client, way: Way, to: &str, bind: SocketAddr) -> Result<Dialled> {
    eventually("the port is free again", SOON, || match client.dial_from(way, to, Some(bind)) {
        Err(error) if error.downcast_ref::<Errno>().is_some_and(|e| e.name == "EADDRNOTAVAIL") => Err(error),
        dialled => Ok(dialled),
    })?
}

/// A connection outlives its backend's readiness; a new one from the same port chooses anew (F51).
#[test]
fn a_flow_stays_with_its_backend_and_a_port_used_again_chooses_anew() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("web", 41, &[&pair.a], |s| s)?;
    let agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let to = "192.0.2.11:30041";
    let bind: SocketAddr = "198.51.100.10:4567".parse()?;
    let long = outside.connect(Way::Tcp, to)?;
    assert_eq!(long.ask()?.answer.name, "a");
    for _ in 0..3 {
        assert_eq!(dial_again(&outside, Way::Tcp, to, bind)?.name, "a", "the same port again and again");
        assert_eq!(dial_again(&outside, Way::Udp, to, bind)?.name, "a");
    }
    pair.service("web", 41, &[&pair.b], |s| s)?;
    agent.expect(
        "web",
        &[
            "10.96.0.41:80/TCP → 10.244.2.20:8080",
            "10.96.0.41:80/UDP → 10.244.2.20:8080",
            "192.0.2.11:30041/TCP → 10.244.2.20:8080",
            "192.0.2.11:30041/UDP → 10.244.2.20:8080",
            "[2001:db8:96::41]:80/TCP → [2001:db8:2::20]:8080",
            "[2001:db8:96::41]:80/UDP → [2001:db8:2::20]:8080",
            "[2001:db8::11]:30041/TCP → [2001:db8:2::20]:8080",
            "[2001:db8::11]:30041/UDP → [2001:db8:2::20]:8080",
        ],
    )?;
    assert_eq!(long.ask()?.answer.name, "a", "K06: an open connection stays");
    for way in WAYS {
        assert_eq!(dial_again(&outside, way, to, bind)?.name, "b", "{way:?}: the old backend is gone");
    }
    Ok(())
}
