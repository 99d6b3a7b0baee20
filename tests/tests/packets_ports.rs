//! A port of this node that masquerades a client may be another connection's as well, towards the same backend: netfilter
//! gives such ports to what kube-proxy masquerades, and to connections whose own port it finds taken (F37). Here a socket
//! that is bound to the port stands for either.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use sheave_tests::{
    agent::Agent,
    client::Way,
    pair::{N1, N1_6, N1_6_UPLINK, N1_UPLINK, Pair},
    wait::{SOON, eventually},
};

/// Where a client outside dials a Service with one backend, that backend, and whom it sees.
fn cases(pair: &Pair) -> Result<[(&'static str, SocketAddr, &'static str); 4]> {
    pair.service("near", 41, &[&pair.a], |s| s)?;
    pair.service("far", 42, &[&pair.b], |s| s)?;
    Ok([
        ("192.0.2.11:30041", pair.a.at(8080), N1),
        ("[2001:db8::11]:30041", pair.a.at6(8080), N1_6),
        ("192.0.2.11:30042", pair.b.at(8080), N1_UPLINK),
        ("[2001:db8::11]:30042", pair.b.at6(8080), N1_6_UPLINK),
    ])
}

fn given_up(agent: &Agent) -> Result<u64> {
    Ok(agent.status()?.counters.get("snat_given_up").copied().unwrap_or_default())
}

/// The backend answers a SYN within the other connection by a bare ACK. That connection must not hear of it, and the
/// client is served with another port.
#[test]
fn a_port_of_an_open_connection_is_given_up() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let cases = cases(&pair)?;
    let agent = pair.lab.n1().agent_with(&["--snat-ports=20000-20063"])?;
    let (host, mut outside) = (pair.lab.n1().host.client()?, pair.lab.outside.client()?);
    // A client whose port is given up sends its SYN again, after 1, 3, 7, 15 seconds.
    outside.patience = Duration::from_secs(30);
    for (to, backend, seen) in cases {
        let connect = |port| {
            let socket = host.open(Way::Tcp, backend, Some(SocketAddr::new(seen.parse()?, port)))?;
            socket.connect(backend)?;
            anyhow::Ok(socket)
        };
        let others = (20_000..20_004).map(connect).collect::<Result<Vec<_>>>()?;
        let before = given_up(&agent)?;
        // Ports of flows that are over stay taken for a while, so that it must draw one of these in the end.
        for turn in 0.. {
            outside.dial(Way::Tcp, to).with_context(|| format!("dial {turn} of {to}"))?;
            if given_up(&agent)? > before {
                break;
            }
            ensure!(turn < 64, "{to}: none of 64 dials drew one of 4 ports of 64");
        }
        for socket in &others {
            socket.ask().with_context(|| format!("{:?} to {backend}, after {to} was dialled", socket.local()))?;
        }
    }
    Ok(())
}

/// After a flow's end its port may be somebody else's at once, and the backend's SYN-ACK is for that one.
#[test]
fn the_port_of_a_flow_that_is_over_is_given_up() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let cases = cases(&pair)?;
    let agent = pair.lab.n1().agent()?;
    let (host, outside) = (pair.lab.n1().host.client()?, pair.lab.outside.client()?);
    for (to, backend, _) in cases {
        let connection = outside.connect(Way::Tcp, to)?;
        let (client, seen) = (connection.local()?, connection.ask()?.answer.client);
        drop(connection);
        eventually(&format!("the flow to {to} is over"), SOON, || {
            let list: Value = serde_json::from_str(&agent.sheave(&["lb", "list", "--conntrack", "-o", "json"])?)?;
            let flow = list["items"].as_array().into_iter().flatten().find(|item| item["client"] == client.to_string());
            ensure!(flow.context("there is no such flow")?["state"] == "closed", "{flow:?}");
            Ok(())
        })?;
        let before = given_up(&agent)?;
        let socket = host.open(Way::Tcp, backend, Some(seen))?;
        socket.connect(backend).with_context(|| format!("from {seen}, the port of {to}"))?;
        assert_eq!(socket.ask()?.answer.client, seen, "{to}");
        assert_eq!(given_up(&agent)?, before + 1, "{to}");
    }
    Ok(())
}
