//! The packet path under those who mean it harm, and at its limits.

use std::{collections::BTreeSet, fs, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::unistd::geteuid;
use serde_json::Value;
use sheave_agent::datapath::tables::flows::start;
use sheave_ebpf::conntrack::{PATIENCE, seen};
use sheave_tests::{
    agent::Agent,
    client::{Errno, Socket as Connection, Way},
    flow_table::{FlowTable, age},
    lab::Lab,
    packet::{Draft, ETH, SYN, TCP},
    skip,
    transfer::serve,
    wait::{SOON, eventually},
};
use socket2::{Domain, Protocol, Socket, Type};

fn counter(agent: &Agent, name: &str) -> Result<u64> {
    Ok(agent.status()?.counters.get(name).copied().unwrap_or_default())
}

/// Sends what clients that are not there would.
struct Flood(Socket);

impl Flood {
    fn new(lab: &Lab) -> Result<Self> {
        lab.fabric.ip("route add 100.0.0.0/8 via 198.51.100.10")?; // its path filter is strict
        let open = || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)));
        Ok(Self(lab.outside.enter(open)??))
    }

    /// A SYN of client number so and so.
    fn syn(&self, number: u32, to: &str) -> Result<()> {
        let [_, a, b, c] = number.to_be_bytes();
        let from: SocketAddr = format!("100.{a}.{b}.{c}:{}", 1024 + number % 60_000).parse()?;
        let to: SocketAddr = to.parse()?;
        let packet = Draft { tcp: SYN, payload: Vec::new(), ..Draft::new(TCP, from, to) }.bytes();
        self.0.send_to(&packet[ETH..], &to.into())?;
        Ok(())
    }
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
    let flood = Flood::new(&lab)?;
    for turn in 0..40_u32 {
        for number in turn * 1000..(turn + 1) * 1000 {
            flood.syn(number, if number % 2 == 0 { "192.0.2.11:30001" } else { "192.0.2.11:30002" })?;
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

/// A port is another client's as soon as its flow is over, though no agent is there to remove that; the first client's
/// packets do not leave with it any more.
#[test]
fn the_port_of_a_flow_that_is_over_is_taken_without_an_agent() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["7000/TCP", "7000/UDP"])?;
    serve(&lab, "near", 1, &pod, "Cluster")?;
    let mut agent = lab.n1().agent_with(&["--snat-ports", "10000-10003"])?;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    for (way, is_over_after) in [(Way::Tcp, 11), (Way::Udp, 31)] {
        let dial = || outside.connect(way, "192.0.2.11:30001");
        let ask = |socket: &Connection<'_>| Ok::<_, anyhow::Error>(socket.ask()?.answer.client.port());
        let mut older: Vec<_> = (0..4).map(|_| dial()).collect::<Result<_>>()?;
        let held: BTreeSet<u16> = older.iter().map(ask).collect::<Result<_>>()?;
        assert_eq!(held, BTreeSet::from([10_000, 10_001, 10_002, 10_003]), "{way:?}");
        let is_refused = || dial().and_then(|socket| ask(&socket)).is_err();
        assert!(is_refused(), "{way:?}: a fifth client was hidden behind four ports");
        if agent.is_running()? {
            agent.kill()?;
        }
        if way == Way::Tcp {
            older.clear(); // which closes them
        }
        eventually("connections are closed on both sides", SOON, || {
            let list: Value = serde_json::from_str(&agent.sheave(&["lb", "list", "--conntrack", "-o", "json"])?)?;
            let items = list["items"].as_array().context("no items")?;
            let closed = items.iter().filter(|item| item["protocol"] == "TCP" && item["state"] == "closed").count();
            ensure!(way == Way::Udp || closed == 4, "{list}");
            Ok(())
        })?;
        age(lab.n1(), is_over_after)?;
        // A SYN that finds none, as one that meets another CPU's, comes again.
        let dial_again = |_| {
            eventually("a port is free", SOON, || {
                let socket = dial()?;
                ask(&socket)?;
                Ok(socket)
            })
        };
        let newer: Vec<_> = (0..4).map(dial_again).collect::<Result<_>>()?;
        let taken: BTreeSet<u16> = newer.iter().map(ask).collect::<Result<_>>()?;
        assert_eq!(taken, held, "{way:?}");
        for socket in &older {
            assert!(ask(socket).is_err(), "{way:?}: two clients behind one port");
        }
        for socket in &newer {
            ask(socket).with_context(|| format!("{way:?}, among older clients"))?;
        }
    }
    Ok(())
}

/// Connections that are never made hold every port to hide clients behind, though the backend answers them and the table
/// is far from full: others have them back when the handshakes have had their time.
#[test]
fn half_open_connections_give_their_ports_back() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    // Answers that are repeated would keep the flows young.
    pod.place.enter(|| fs::write("/proc/sys/net/ipv4/tcp_synack_retries", "0"))??;
    let _server = pod.place.echo("a", &["7000/TCP", "7000/UDP"])?;
    serve(&lab, "near", 1, &pod, "Cluster")?;
    let mut agent = lab.n1().agent_with(&["--snat-ports", "10000-10003"])?;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    let tap = lab.outside.tap()?;
    let flood = Flood::new(&lab)?;
    (0..64).try_for_each(|number| flood.syn(number, "192.0.2.11:30001"))?;
    eventually("the backend answers", SOON, || {
        let answered = (0..64).map(|number| tap.to(&format!("100.0.0.{number}"))).sum::<Result<u64>>()?;
        ensure!(answered >= 4, "{answered} are answered");
        Ok(())
    })?;
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:30001")?, "TIMEOUT", "four ports, all of them taken");
    agent.kill()?;
    age(lab.n1(), 6)?;
    let connection = outside.connect(Way::Tcp, "192.0.2.11:30001").context("where ports are short")?;
    age(lab.n1(), 3600)?;
    assert_eq!(connection.ask()?.answer.name, "a", "a connection that is made is not one of those");
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
    flows.collect(false)?;
    assert_eq!(table.len(), 4 * OPEN as usize);
    let again = flows.collect(false)?;
    assert_eq!((again.kept, again.removed), (4 * OPEN as usize, [0, 0]));
    Ok(())
}

/// A full table pushes out whoever is idle. An open connection outlives many times the table's size of closed ones, since
/// those go in time.
#[test]
fn an_idle_connection_outlives_a_tablefull_of_closed_ones() -> Result<()> {
    const ENTRIES: u32 = 8192;
    const ROUND: u32 = ENTRIES / 4 / 4; // flows: a quarter of the table
    if !geteuid().is_root() {
        skip("maps need root");
        return Ok(());
    }
    let mut table = FlowTable::new(ENTRIES)?;
    let flows = table.flows()?;
    table.fill_with(0..1, (seen::ANY, 0))?;
    for round in 0..20 {
        let numbers = 1 + round * ROUND..1 + (round + 1) * ROUND;
        table.fill_with(numbers, (seen::ANY | seen::FIN, PATIENCE + 1))?;
        assert_eq!(table.len(), 4 * (ROUND as usize + 1), "round {round}: what was pushed out");
        flows.collect(true)?;
        assert_eq!(table.len(), 4, "round {round}: the open connection");
    }
    Ok(())
}

/// The collector finds out by itself that the table is crowded.
#[test]
fn a_crowded_table_is_swept_of_half_open_connections() -> Result<()> {
    const ENTRIES: u32 = 8192;
    const OPEN: u32 = ENTRIES / 4 / 4 * 3 + 1; // flows: a little more than three quarters of the table
    const HALF_OPEN: u32 = 100;
    if !geteuid().is_root() {
        skip("maps need root");
        return Ok(());
    }
    let mut table = FlowTable::new(ENTRIES)?;
    table.fill(0..OPEN, false)?;
    table.fill_with(OPEN..OPEN + HALF_OPEN, (seen::ANY | seen::SYN, PATIENCE + 1))?;
    start(table.flows()?, |_| {})?;
    eventually("half-open connections go, a minute before their time", SOON, || {
        ensure!(table.len() == 4 * OPEN as usize, "{} entries are left", table.len());
        Ok(())
    })
}
