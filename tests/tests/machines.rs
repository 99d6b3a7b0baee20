//! Two machines as two nodes: node ports across them, the loss of one, and its return after a boot that left nothing
//! pinned. Each machine runs one of these tests, see `xtask/src/vm/pair.rs`; elsewhere they are skipped.

use std::{fs, thread, time::Duration};

use anyhow::{Result, ensure};
use serde_json::json;
use sheave_tests::{
    agent::Agent,
    client::Way,
    lab::Lab,
    objects::{Slice, Svc, node},
    skip,
    wait::eventually,
};

/// The network card towards the other machine.
const UPLINK: &str = "eth0";
/// A boot of the other machine, before it is multiplied on slow hosts.
const BOOT: Duration = Duration::from_secs(20);
/// What the host does when it reads that on the console.
const LOSE: &str = "== lose the first machine";
const RETURN: &str = "== return the first machine";

/// This machine's part, where there are two; else the running test is skipped.
fn part(number: u8) -> Result<Option<Lab>> {
    if !fs::exists("/commands")? || !fs::exists(format!("/sys/class/net/{UPLINK}"))? {
        skip("needs a second machine: cargo xtask vm --pair");
        return Ok(None);
    }
    let lab = Lab::part(number, 2, UPLINK)?;
    lab.apply(&[&node(1), &node(2)])?;
    Ok(Some(lab))
}

/// Services of both families with a node port: web has a backend on each node, first and second on that node alone.
/// `lost` = what the cluster says once it has noticed that the first node is gone.
fn services(lab: &Lab, lost: bool) -> Result<()> {
    for (name, number, nodes) in [("web", 20, [1, 2].as_slice()), ("first", 21, &[1]), ("second", 22, &[2])] {
        let service = Svc::new(name).ip(&format!("10.96.0.{number}")).ip(&format!("2001:db8:f::{number}"));
        let service = service.set("type", json!("NodePort"));
        let service = service.port("t", 80, "TCP").node_port(30000 + number);
        let service = service.port("u", 80, "UDP").node_port(30000 + number);
        let slice = |family: &str, address: fn(i32) -> String| {
            let slice = Slice::new(&format!("{name}-{}", family.to_lowercase()), name).address_type(family);
            let left = nodes.iter().filter(|node| !lost || **node != 1);
            left.fold(slice.port("t", 8080, "TCP").port("u", 8080, "UDP"), |slice, node| {
                slice.ready(&address(*node), &format!("n{node}"))
            })
        };
        let v4 = slice("IPv4", |node| format!("10.244.{node}.10"));
        let v6 = slice("IPv6", |node| format!("2001:db8:{node}::10"));
        lab.apply(&[&service, &v4, &v6])?;
    }
    Ok(())
}

/// Serves until its machine is turned off.
#[test]
fn the_first_machine() -> Result<()> {
    let Some(lab) = part(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    services(&lab, false)?;
    let _agent = lab.n1().agent()?;
    loop {
        thread::park(); // nothing is left to do; the other machine does the rest
    }
}

#[test]
fn the_second_machine() -> Result<()> {
    let Some(lab) = part(2)? else { return Ok(()) };
    let node = lab.n1(); // the only one here, n2
    let _server = node.server(10, "B")?;
    services(&lab, false)?;
    let agent = node.agent()?;
    both_serve(&lab, "at first")?;
    let established = lab.outside.client()?;
    let socket = established.connect(Way::Tcp, "192.0.2.12:30022")?;
    assert_eq!(socket.ask()?.answer.name, "B");

    println!("{LOSE}");
    services(&lab, true)?;
    one_serves(&lab, &agent)?;
    assert_eq!(socket.ask()?.answer.name, "B", "a connection that has nothing to do with the lost node");

    println!("{RETURN}");
    services(&lab, false)?;
    both_serve(&lab, "after the first node's return")
}

/// From outside, each node port leads to its backend, whichever node is asked; from a node, a ClusterIP to both.
fn both_serve(lab: &Lab, when: &str) -> Result<()> {
    let (outside, host) = (lab.outside.client()?, lab.n1().host.client()?);
    for way in [Way::Tcp, Way::Udp] {
        for (to, name) in [
            ("192.0.2.11:30021", "A"), // its own backend
            ("192.0.2.11:30022", "B"), // across, and back to where the client is
            ("192.0.2.12:30021", "A"), // across
            ("192.0.2.12:30022", "B"),
            ("[2001:db8::11]:30021", "A"),
            ("[2001:db8::11]:30022", "B"),
            ("[2001:db8::12]:30021", "A"),
            ("[2001:db8::12]:30022", "B"),
        ] {
            eventually(&format!("{when}, {way:?} to {to}"), BOOT, || {
                let found = outside.outcome(way, to)?;
                ensure!(found == name, "{found}");
                Ok(())
            })?;
        }
        for to in ["10.96.0.20:80", "[2001:db8:f::20]:80"] {
            let found = host.dial_many(way, to, 40)?;
            assert_eq!(found.keys().collect::<Vec<_>>(), ["A", "B"], "{when}, {way:?} from a node to {to}");
        }
    }
    Ok(())
}

/// Nobody is sent to the lost node any more.
fn one_serves(lab: &Lab, agent: &Agent) -> Result<()> {
    lab.settle(agent)?;
    let (outside, host) = (lab.outside.client()?, lab.n1().host.client()?);
    for (cluster_ip, node) in [("10.96.0.20:80", "192.0.2.12"), ("[2001:db8:f::20]:80", "[2001:db8::12]")] {
        let found = host.dial_many(Way::Tcp, cluster_ip, 20)?;
        assert_eq!(found.keys().collect::<Vec<_>>(), ["B"], "from a node to {cluster_ip}");
        for way in [Way::Tcp, Way::Udp] {
            assert_eq!(outside.outcome(way, &format!("{node}:30020"))?, "B", "{way:?} to {node}");
            let refused = outside.outcome(way, &format!("{node}:30021"))?;
            assert_eq!(refused, "ECONNREFUSED", "{way:?} to {node}: no backend is left");
        }
    }
    Ok(())
}
