//! How a backend is chosen, and that its connections are counted.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    agent::Agent,
    client::{Client, Way},
    lab::Lab,
    node::Server,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

const TO: &str = "10.96.0.60:80";

/// Servers A, B, C.
fn servers(lab: &Lab) -> Result<Vec<Server>> {
    (10..).zip(["A", "B", "C"]).map(|(number, name)| lab.n1().server(number, name)).collect()
}

fn service(algorithm: &str) -> Svc {
    Svc::web("alg", "10.96.0.60").annotate("sheave.io/lb-algorithm", algorithm)
}

fn slice(backends: usize) -> Slice {
    let addresses = ["10.244.1.10", "10.244.1.11", "10.244.1.12"];
    addresses[..backends].iter().fold(Slice::web("alg"), |slice, address| slice.ready(address, "n1"))
}

/// Live connections of each backend of the TCP port, as `lb list` shows them, in order of the addresses.
fn connections(agent: &Agent, port_name: &str) -> Result<Vec<u64>> {
    let rows = agent.kernel()?;
    let row =
        rows.iter().find(|row| row.service.as_deref() == Some("t/alg") && row.port_name.as_deref() == Some(port_name));
    Ok(row.context("no such row")?.backends.iter().map(|backend| backend.connections).collect())
}

/// Waits until they are so: a socket is released some time after its last descriptor is closed.
fn until_connections(agent: &Agent, port_name: &str, what: &str, expected: &[u64]) -> Result<()> {
    eventually(what, SOON, || {
        let connections = connections(agent, port_name)?;
        ensure!(connections == expected, "{connections:?}, not {expected:?}");
        Ok(())
    })
}

fn spread(client: &Client, way: Way, times: usize) -> Result<[usize; 3]> {
    let names: BTreeMap<String, usize> = client.dial_many(way, TO, times)?;
    Ok(["A", "B", "C"].map(|name| names.get(name).copied().unwrap_or_default()))
}

#[test]
fn each_algorithm_spreads_as_it_says() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let client = lab.n1().pod(20)?.place.client()?;
    // Bounds five standard deviations wide: one run in a million is beyond.
    for (algorithm, low, high) in [
        ("random", 59, 141),
        ("round-robin", 100, 100),
        ("least-connections", 59, 141),
        ("maglev", 59, 141),
        ("nonsense", 59, 141),
    ] {
        lab.apply(&[&service(algorithm), &slice(3)])?;
        lab.settle(&agent)?;
        for way in [Way::Tcp, Way::UdpSendto] {
            let spread = spread(&client, way, 300)?;
            assert!(spread.iter().all(|times| (low..=high).contains(times)), "{algorithm}, {way:?}: {spread:?}");
        }
        let shown = agent
            .kernel()?
            .into_iter()
            .find(|row| row.address == "10.96.0.60" && row.port == 80)
            .context("no row")?
            .algorithm;
        assert_eq!(shown, if algorithm == "nonsense" { "random" } else { algorithm });
    }
    Ok(())
}

#[test]
fn round_robin_takes_turns_exactly_and_over_changes() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let client = lab.n1().pod(20)?.place.client()?;
    let agent = lab.n1().agent_with(&["--lb-algorithm=round-robin"])?; // the flag, in place of the annotation
    lab.apply(&[&Svc::web("alg", "10.96.0.60"), &slice(3)])?;
    lab.settle(&agent)?;
    let names = (0..9).map(|_| Ok(client.dial(Way::Tcp, TO)?.name)).collect::<Result<Vec<_>>>()?;
    assert!(
        names.windows(3).all(|three| three[0] != three[1] && three[1] != three[2] && three[0] != three[2]),
        "{names:?}"
    );
    for backends in [2, 3] {
        lab.apply(&[&slice(backends)])?;
        lab.settle(&agent)?;
        let spread = spread(&client, Way::Tcp, 30)?;
        assert!(spread[..backends].iter().all(|times| *times == 30 / backends), "{spread:?}");
    }
    // An annotation beats the flag.
    lab.apply(&[&service("random")])?;
    lab.settle(&agent)?;
    let names = (0..60).map(|_| Ok(client.dial(Way::Tcp, TO)?.name)).collect::<Result<Vec<_>>>()?;
    assert!(names.windows(2).any(|two| two[0] == two[1]), "random repeats itself now and then: {names:?}");
    Ok(())
}

#[test]
fn least_connections_prefers_the_idle_one() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let client = lab.n1().pod(20)?.place.client()?;
    lab.apply(&[&service("least-connections"), &slice(2)])?;
    lab.settle(&agent)?;
    let mut open: Vec<_> = (0..10).map(|_| client.connect(Way::Tcp, TO)).collect::<Result<_>>()?;
    until_connections(&agent, "t", "long-lived connections are balanced", &[5, 5])?;
    // All that A has are closed, B keeps its own: the next ones go to A until both are even.
    let mut of_b = Vec::new();
    for socket in open.drain(..) {
        if socket.ask()?.answer.name == "B" {
            of_b.push(socket);
        }
    }
    until_connections(&agent, "t", "A is idle", &[0, 5])?;
    let next: Vec<_> = (0..5).map(|_| client.connect(Way::Tcp, TO)).collect::<Result<_>>()?;
    for socket in &next {
        assert_eq!(socket.ask()?.answer.name, "A");
    }
    until_connections(&agent, "t", "both are even", &[5, 5])?;
    // A third one that comes late is preferred whenever it is one of the two that are compared.
    lab.apply(&[&slice(3)])?;
    lab.settle(&agent)?;
    let late: Vec<_> = (0..4).map(|_| client.connect(Way::Tcp, TO)).collect::<Result<_>>()?;
    let busiest = connections(&agent, "t")?.into_iter().max();
    assert!(late.len() == 4 && busiest.is_some_and(|most| most <= 8), "{busiest:?}");
    Ok(())
}

#[test]
fn weights_of_slices_are_shares() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let client = lab.n1().pod(20)?.place.client()?;
    let other = Slice::new("alg-2", "alg").port("t", 8080, "TCP").port("u", 8080, "UDP").ready("10.244.1.12", "n1");
    for algorithm in ["random", "round-robin", "maglev"] {
        for (weight, low, high) in [("100", 50, 150), ("25", 5, 65), ("0", 0, 0)] {
            lab.apply(&[&service(algorithm), &slice(2), &other.clone().annotate("sheave.io/weight", weight)])?;
            lab.settle(&agent)?;
            let spread = spread(&client, Way::Tcp, 300)?;
            assert!((low..=high).contains(&spread[2]), "{algorithm}, weight {weight}: {spread:?}");
            assert!(spread[0] > 50 && spread[1] > 50, "{algorithm}, weight {weight}: {spread:?}");
        }
    }
    // 0 is maintenance: connections go on.
    lab.apply(&[&service("random"), &other.clone().annotate("sheave.io/weight", "100"), &slice(0)])?;
    lab.settle(&agent)?;
    let open = client.connect(Way::Tcp, TO)?;
    lab.apply(&[&other.annotate("sheave.io/weight", "0"), &slice(2)])?;
    lab.settle(&agent)?;
    assert_eq!(open.ask()?.answer.name, "C", "F44");
    Ok(())
}

#[test]
fn live_connections_are_counted_up_and_down() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = servers(&lab)?;
    let pod = lab.n1().pod(20)?;
    let (client, host) = (pod.place.client()?, lab.n1().host.client()?);
    lab.apply(&[&service("round-robin"), &slice(2)])?;
    lab.settle(&agent)?;
    let open = (0..4).map(|_| client.connect(Way::Tcp, TO)).collect::<Result<Vec<_>>>()?;
    let of_host = (0..2).map(|_| host.connect(Way::Tcp, TO)).collect::<Result<Vec<_>>>()?;
    until_connections(&agent, "t", "six connections", &[3, 3])?;
    let text = agent.sheave(&["lb", "list", "-A", "--backends"])?;
    let shown = text.lines().filter(|line| line.contains("10.244.1.1") && line.split_whitespace().any(|w| w == "3"));
    assert_eq!(shown.count(), 2, "lb list --backends shows them:\n{text}");
    drop(open);
    until_connections(&agent, "t", "four closed", &[1, 1])?;

    // UDP: connecting again is another connection in place of the first.
    let udp = host.open(Way::Udp, TO.parse()?, None)?;
    for turn in 0..4 {
        udp.connect(TO.parse()?)?;
        udp.ask()?;
        let expected = if turn % 2 == 0 { [1, 0] } else { [0, 1] };
        until_connections(&agent, "u", "a UDP socket counts once", &expected)?;
    }
    udp.connect("10.244.1.10:8080".parse()?)?;
    until_connections(&agent, "u", "it talks to a pod now", &[0, 0])?;
    // connect(AF_UNSPEC), as resolvers do, is seen at the next datagram, to whomever.
    for (to, expected) in [("10.244.1.10:8080", [0, 0]), (TO, [0, 0])] {
        udp.connect(TO.parse()?)?;
        ensure!(connections(&agent, "u")?.iter().sum::<u64>() == 1, "connected before {to}");
        udp.disconnect()?;
        let received = udp.ask_at(to.parse()?)?;
        ensure!(received.source == to.parse()?, "the answer of {to} comes from {}", received.source);
        until_connections(&agent, "u", "it is connected to nobody", &expected)?;
        udp.connect("10.244.1.10:8080".parse()?)?;
    }
    drop(udp);

    // Refused and failed dials leave nothing behind.
    let _ = client.outcome(Way::Tcp, "10.96.0.60:81")?;
    until_connections(&agent, "t", "nothing new", &[1, 1])?;

    // The counts live in the kernel: an agent's end changes nothing, nor does it miss a close.
    let more = (0..4).map(|_| client.connect(Way::Tcp, TO)).collect::<Result<Vec<_>>>()?;
    agent.kill()?;
    drop(more);
    until_connections(&agent, "t", "closed while nobody was at home", &[1, 1])?;
    let last = client.connect(Way::Tcp, TO)?;
    agent.restart()?;
    ensure!(connections(&agent, "t")?.iter().sum::<u64>() == 3, "adopted");

    // kill -9 of a client closes its sockets.
    last.ask()?;
    std::mem::forget(last); // its client is killed with the socket open
    drop(client);
    until_connections(&agent, "t", "a killed client", &[1, 1])?;
    drop(of_host);
    until_connections(&agent, "t", "all closed", &[0, 0])
}
