//! The packet path: clients outside the nodes. Ids are rows of `semantics.md` and numbers of `cases.md`.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    client::{Client, Dialled, Way},
    lab::Lab,
    objects::{Slice, Svc},
};

const OUTSIDE: &str = "198.51.100.10";
const OUTSIDE6: &str = "2001:db8:100::10";

/// A server answers, and it sees the client at one of `seen`.
fn expect(client: &Client, way: Way, to: &str, server: &str, seen: &[&str]) -> Result<Dialled> {
    let dialled = client.dial(way, to).with_context(|| format!("{way:?} {to}"))?;
    ensure!(dialled.name == server, "{way:?} {to} reached {}, not {server}", dialled.name);
    ensure!(dialled.peer == to.parse()?, "{way:?} {to} shows the peer {}", dialled.peer);
    let seen: Vec<IpAddr> = seen.iter().map(|text| text.parse()).collect::<Result<_, _>>()?;
    ensure!(seen.contains(&dialled.client.ip()), "{way:?} {to}: {server} sees {}, not {seen:?}", dialled.client);
    Ok(dialled)
}

const WAYS: [Way; 2] = [Way::Tcp, Way::Udp];

/// FLOW-1, outside: a hidden client with policy Cluster, a visible one with Local.
#[test]
fn an_outside_client_reaches_pods_of_both_nodes_through_a_node_port() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
    let ports = ["8080/TCP", "8080/UDP"];
    let _servers = [a.place.echo("a", &ports)?, b.place.echo("b", &ports)?];
    for (name, ip, endpoint, node_port, local) in [
        ("near", "10.96.0.41", &a, 30001, false),
        ("far", "10.96.0.42", &b, 30002, false),
        ("near-local", "10.96.0.43", &a, 30003, true),
    ] {
        let node = if endpoint.v4 == a.v4 { "n1" } else { "n2" };
        let mut service = Svc::new(name).ip(ip).ip(&format!("2001:db8:96::{}", &ip[8..]));
        service = service.port("t", 80, "TCP").node_port(node_port).port("u", 80, "UDP").node_port(node_port);
        if local {
            service = service.set("externalTrafficPolicy", json!("Local"));
        }
        lab.apply(&[&service])?;
        for (suffix, address) in [("4", endpoint.v4.to_string()), ("6", endpoint.v6.to_string())] {
            let slice = Slice::new(&format!("{name}-{suffix}"), name);
            lab.apply(&[&slice.port("t", 8080, "TCP").port("u", 8080, "UDP").ready(&address, node)])?;
        }
    }
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    let outside = lab.outside.client()?;
    let (n1, n1_6) = (lab.n1().v4, lab.n1().v6);
    for way in WAYS {
        expect(&outside, way, &format!("{n1}:30001"), "a", &["10.244.1.1", "192.0.2.11"])?;
        expect(&outside, way, &format!("{n1}:30002"), "b", &["192.0.2.11"])?;
        expect(&outside, way, &format!("{n1}:30003"), "a", &[OUTSIDE])?;
        expect(&outside, way, &format!("[{n1_6}]:30001"), "a", &["2001:db8:1::1", "2001:db8::11"])?;
        expect(&outside, way, &format!("[{n1_6}]:30002"), "b", &["2001:db8::11"])?;
        expect(&outside, way, &format!("[{n1_6}]:30003"), "a", &[OUTSIDE6])?;
    }
    Ok(())
}
