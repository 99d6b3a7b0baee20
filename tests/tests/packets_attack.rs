//! The packet path under those who mean it harm, and at its limits.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use nix::unistd::geteuid;
use sheave_tests::{
    agent::Agent,
    client::{Errno, Socket as Connection, Way},
    flow_table::FlowTable,
    lab::Lab,
    packet::{Draft, ETH, SYN, TCP},
    skip,
    transfer::serve,
    wait::eventually,
};
use socket2::{Domain, Protocol, Socket, Type};

fn counter(agent: &Agent, name: &str) -> Result<u64> {
    Ok(agent.status()?.counters.get(name).copied().unwrap_or_default())
}

/// SYNs from everywhere fill the flow table many times over. Connections that are in use go on; new ones are made.
#[test]
fn a_flood_of_syns_pushes_out_nobody_who_talks() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["7000/TCP", "7000/UDP"])?;
    serve(&lab, "near", 1, &pod, "Cluster")?;
    serve(&lab, "seen", 2, &pod, "Local")?;
    let agent = lab.n1().agent_with(&["--max-conntrack", "8192"])?;
    let outside = lab.outside.client()?;
    let connections = ["192.0.2.11:30001", "192.0.2.11:30002"]
        .iter()
        .cycle()
        .take(20)
        .map(|to| outside.connect(Way::Tcp, to))
        .collect::<Result<Vec<_>>>()?;
    let all_answer = |when: &str| -> Result<()> {
        for (number, connection) in connections.iter().enumerate() {
            connection.ask().with_context(|| format!("connection {number}, {when}"))?;
        }
        Ok(())
    };
    all_answer("before")?;
    lab.fabric.ip("route add 100.0.0.0/8 via 198.51.100.10")?; // its path filter is strict
    let raw = lab.outside.enter(|| Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW))))??;
    for turn in 0..40_u32 {
        for number in turn * 1000..(turn + 1) * 1000 {
            let [_, a, b, c] = number.to_be_bytes();
            let from: SocketAddr = format!("100.{a}.{b}.{c}:{}", 1024 + number % 60_000).parse()?;
            let to: SocketAddr = if number % 2 == 0 { "192.0.2.11:30001" } else { "192.0.2.11:30002" }.parse()?;
            let packet = Draft { tcp: SYN, payload: Vec::new(), ..Draft::new(TCP, from, to) }.bytes();
            raw.send_to(&packet[ETH..], &to.into())?;
        }
        all_answer(&format!("after {} SYNs", (turn + 1) * 1000))?;
    }
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:30001")?, "a", "a new connection");
    assert_eq!(outside.outcome(Way::Udp, "192.0.2.11:30002")?, "a", "a new flow");
    let opened = counter(&agent, "packet_forward")?;
    assert!(opened > 20_000, "{opened} flows do not fill the table many times");
    Ok(())
}

/// No port is left to hide another client behind: said by name, without harm to those who have one; a port that is given
/// back is used again.
#[test]
fn masquerade_ports_run_out_loudly_and_come_back() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["7000/TCP", "7000/UDP"])?;
    serve(&lab, "near", 1, &pod, "Cluster")?;
    let agent = lab.n1().agent_with(&["--snat-ports", "10000-10003"])?;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    let dial = || outside.connect(Way::Tcp, "192.0.2.11:30001");
    let mut holders: Vec<Connection<'_>> = (0..4).map(|_| dial()).collect::<Result<_>>()?;
    let refused = dial().err().context("a fifth client was hidden behind four ports")?;
    assert_eq!(refused.downcast::<Errno>()?.name, "TIMEOUT");
    assert!(counter(&agent, "snat_exhausted")? > 0);
    for holder in &holders {
        assert_eq!(holder.ask()?.answer.name, "a");
    }
    holders.pop();
    eventually("the port of a closed connection is used again", Duration::from_secs(60), dial)?.ask()?;
    Ok(())
}

/// A table of 100,000 entries: what is over goes in one pass, what is not stays.
#[test]
fn a_large_table_is_swept_in_one_pass() -> Result<()> {
    const OVER: u32 = 15_000;
    const OPEN: u32 = 10_000;
    if !geteuid().is_root() {
        skip("maps need root");
        return Ok(());
    }
    let mut table = FlowTable::new(200_000)?;
    table.fill(0..OPEN, false)?;
    table.fill(OPEN..OPEN + OVER, true)?;
    assert_eq!(table.len(), 4 * (OPEN + OVER) as usize);
    let flows = table.flows()?;
    flows.collect()?;
    assert_eq!(table.len(), 4 * OPEN as usize);
    let again = flows.collect()?;
    assert_eq!((again.kept, again.removed), (4 * OPEN as usize, [0, 0]));
    Ok(())
}
