//! Node ports from the inside: on which addresses they answer, and to whom.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use sheave_tests::{
    client::{Client, Errno, Way},
    lab::Lab,
    objects::{Slice, Svc},
    place::Place,
    wait::{SOON, eventually},
};

const PORT: u16 = 30034;

/// IPv4 and IPv6, a node port of each protocol, and a server "A" behind them on n1.
fn service(lab: &Lab) -> Result<()> {
    let service = Svc::new("np").ip("10.96.0.34").ip("2001:db8:f::34").set("type", json!("NodePort"));
    let service = service.port("t", 80, "TCP").node_port(PORT).port("u", 80, "UDP").node_port(PORT);
    let four = Slice::web("np").ready("10.244.1.10", "n1");
    lab.apply(&[&service, &four, &six("np")])
}

/// The IPv6 slice of a Service of [`Svc::web`]'s ports.
fn six(service: &str) -> Slice {
    let slice = Slice::new(&format!("{service}-6"), service).port("t", 8080, "TCP").port("u", 8080, "UDP");
    slice.ready("2001:db8:1::10", "n1")
}

fn client(place: &Place) -> Result<Client> {
    let mut client = place.client()?;
    client.patience = Duration::from_secs(1);
    Ok(client)
}

/// Waits until a dial ends so.
fn becomes(what: &str, client: &Client, to: &str, expected: &str) -> Result<()> {
    eventually(what, SOON, || {
        let outcome = client.outcome(Way::Tcp, to)?;
        ensure!(outcome == expected, "{to}: {outcome}");
        Ok(())
    })
}

#[test]
fn node_ports_answer_where_nodeport_addresses_says() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let _server = node.server(10, "A")?;
    node.host.ip("addr add 192.0.2.111/24 dev eth0\naddr add 198.18.0.1/32 dev lo")?;
    service(&lab)?;
    let clients = [("host", client(&node.host)?), ("pod", client(&node.pod(20)?.place)?)];
    let (primary, second, on_lo) = ("192.0.2.11", "192.0.2.111", "198.18.0.1");
    let (v6, v4_in_6) = ("[2001:db8::11]", "[::ffff:192.0.2.11]");
    for (flag, served) in [
        ("primary", vec![primary, v6, v4_in_6]), // the default
        ("all", vec![primary, second, on_lo, v6, v4_in_6]),
        ("", vec![primary, second, on_lo, v6, v4_in_6]), // NPA-9, NPA-10
        ("0.0.0.0/0,::/0", vec![primary, second, on_lo, v6, v4_in_6]),
        ("192.0.2.0/24", vec![primary, second, v6, v4_in_6]), // NPA-1: the other family is not limited
        ("198.18.0.0/15,2001:db9::/32", vec![on_lo]),         // NPA-8
        ("primary,198.18.0.1/32", vec![primary, on_lo, v6, v4_in_6]),
        ("localhost", vec![]),
    ] {
        let value = format!("--nodeport-addresses={flag}");
        let flags: &[&str] = if flag == "primary" { &[] } else { &[&value] };
        let _agent = node.agent_with(flags)?;
        for (from, client) in &clients {
            for way in Way::ALL {
                for address in [primary, second, on_lo, v6, v4_in_6] {
                    let expected = if served.contains(&address) { "A" } else { "ECONNREFUSED" };
                    let what = format!("{flag:?}: {from}, {way:?} to {address}");
                    let outcome = client.outcome(way, &format!("{address}:{PORT}"))?;
                    if expected == "ECONNREFUSED" && way != Way::Tcp {
                        assert_ne!(outcome, "A", "{what}"); // the kernel limits how often it sends ICMP errors
                        continue;
                    }
                    assert_eq!(outcome, expected, "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn addresses_that_come_and_go_are_taken_up_live() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let _server = node.server(10, "A")?;
    service(&lab)?;
    let client = client(&node.host)?;
    let _agent = node.agent_with(&["--nodeport-addresses=198.18.0.0/15,2001:db9::/32"])?;
    for (address, to) in [("198.18.7.7/32", "198.18.7.7"), ("2001:db9::7/128", "[2001:db9::7]")] {
        for turn in ["first", "again"] {
            node.host.ip(&format!("addr add {address} dev eth0"))?;
            becomes(&format!("{to} answers ({turn})"), &client, &format!("{to}:{PORT}"), "A")?;
            node.host.ip(&format!("addr del {address} dev eth0"))?;
            // Kept on loopback, where nobody else can have it: so it is refused if it is not translated.
            node.host.ip(&format!("addr add {address} dev lo"))?;
            becomes(&format!("{to} still answers ({turn})"), &client, &format!("{to}:{PORT}"), "A")?;
            node.host.ip(&format!("addr del {address} dev lo"))?;
            eventually(&format!("{to} is gone ({turn})"), SOON, || {
                let outcome = client.outcome(Way::Tcp, &format!("{to}:{PORT}"))?;
                ensure!(outcome != "A", "{outcome}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// Cases 16 and 20, F39.
#[test]
fn on_loopback_for_the_host_and_never_for_a_pod() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    service(&lab)?;
    let four_only = Svc::new("four").ip("10.96.0.35").port("t", 80, "TCP").node_port(30035);
    lab.apply(&[&four_only, &Slice::web("four").ready("10.244.1.10", "n1")])?;
    lab.settle(&agent)?;
    let (host, pod) = (client(&lab.n1().host)?, lab.n1().pod(20)?);
    let in_pod = client(&pod.place)?;
    let loopbacks = ["127.0.0.1", "127.9.9.9", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]"];
    for address in loopbacks {
        let to = format!("{address}:{PORT}");
        for way in Way::ALL {
            assert_eq!(host.outcome(way, &to)?, "A", "host, {way:?} {to}");
            assert_ne!(in_pod.outcome(way, &to)?, "A", "in a pod {to} is the pod, {way:?}");
        }
        assert_eq!(in_pod.outcome(Way::Tcp, &to)?, "ECONNREFUSED", "pod, nobody listens: {to}");
    }
    let dialled = host.dial(Way::Udp, &format!("127.0.0.1:{PORT}"))?;
    assert_eq!(dialled.peer.to_string(), format!("127.0.0.1:{PORT}"));
    let _own = pod.place.echo("the pod itself", &["30034/TCP", "30034/UDP"])?;
    for address in loopbacks {
        assert_eq!(in_pod.outcome(Way::Tcp, &format!("{address}:{PORT}"))?, "the pod itself", "{address}");
    }
    for way in Way::ALL {
        assert_eq!(in_pod.outcome(way, &format!("127.0.0.1:{PORT}"))?, "the pod itself", "{way:?}");
    }
    // Case 20: an IPv4-only Service by both addresses of "localhost".
    for (to, expected) in [("127.0.0.1:30035", "A"), ("[::1]:30035", "ECONNREFUSED")] {
        let socket = host.dial(Way::Tcp, to).map(|d| d.name);
        let outcome = socket.or_else(|error| {
            let error: Errno = error.downcast()?;
            ensure!(error.after < Duration::from_secs(1), "case 20: {to} must not hang: {error}");
            Ok(error.name)
        })?;
        assert_eq!(outcome, expected, "case 20: {to}");
    }
    drop(agent);
    let _agent = lab.n1().agent_with(&["--loopback-nodeports=false"])?;
    for address in loopbacks {
        assert_eq!(host.outcome(Way::Tcp, &format!("{address}:{PORT}"))?, "ECONNREFUSED", "switched off: {address}");
    }
    assert_eq!(host.outcome(Way::Tcp, &format!("192.0.2.11:{PORT}"))?, "A");
    Ok(())
}

/// F40.
#[test]
fn bind_protection_keeps_node_ports_free_on_the_host_only() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    service(&lab)?;
    lab.settle(&agent)?;
    let pod = lab.n1().pod(20)?;
    let (host, in_pod) = (lab.n1().host.client()?, pod.place.client()?);
    let bind = |client: &Client, way: Way, at: &str| -> Result<String> {
        let at = at.parse()?;
        match client.open(way, at, Some(at)) {
            Ok(_) => Ok("bound".into()),
            Err(error) => Ok(error.downcast::<Errno>()?.name),
        }
    };
    let check = |protected: &str| -> Result<()> {
        for way in [Way::Tcp, Way::Udp] {
            for (address, expected) in [
                ("0.0.0.0", protected),
                ("192.0.2.11", protected),
                ("127.0.0.1", protected),
                ("[::]", protected),
                ("[::1]", protected),
                ("[2001:db8::11]", protected),
                ("10.244.1.1", "bound"), // V-7: not a node-port address
            ] {
                let at = format!("{address}:{PORT}");
                assert_eq!(bind(&host, way, &at)?, expected, "{way:?} {at}, protection: {protected}");
            }
            assert_eq!(bind(&host, way, "0.0.0.0:30099")?, "bound", "another port");
            for at in ["0.0.0.0:30034", "[::]:30034"] {
                assert_eq!(bind(&in_pod, way, at)?, "bound", "a pod has ports of its own: {way:?} {at}");
            }
        }
        assert_eq!(bind(&host, Way::Tcp, "0.0.0.0:0")?, "bound", "any free port");
        Ok(())
    };
    check("EADDRINUSE")?;
    // A Service that goes frees its port.
    lab.delete(&[&Svc::new("np")])?;
    lab.settle(&agent)?;
    assert_eq!(bind(&host, Way::Tcp, "0.0.0.0:30034")?, "bound", "the Service is gone");
    service(&lab)?;
    drop(agent);
    let _agent = lab.n1().agent_with(&["--bind-protection=false"])?;
    check("bound")
}

/// V-7: the number alone does not make a node port.
#[test]
fn the_number_of_a_node_port_means_nothing_on_other_addresses() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let other = lab.n1().pod(21)?;
    let _other = other.place.echo("another pod", &["30034/TCP", "30034/UDP"])?;
    service(&lab)?;
    lab.apply(&[&Svc::web("web", "10.96.0.36"), &Slice::web("web").ready("10.244.1.10", "n1")])?;
    lab.settle(&agent)?;
    for (from, client) in [("host", client(&lab.n1().host)?), ("pod", client(&lab.n1().pod(20)?.place)?)] {
        for way in Way::ALL {
            let to_pod = client.outcome(way, &format!("10.244.1.21:{PORT}"))?;
            assert_eq!(to_pod, "another pod", "{from}, {way:?}: a pod's own port");
            let to_service = client.outcome(way, &format!("10.96.0.36:{PORT}"))?;
            assert_eq!(to_service, "ECONNREFUSED", "{from}, {way:?}: V-4, a cluster IP");
        }
    }
    Ok(())
}
