//! MPTCP: the kernel connects TCP subflows on behalf of a socket of another protocol. Clients and servers of some
//! languages use it without asking.

use std::fs;

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    agent::Agent,
    client::Way,
    lab::Lab,
    objects::{Slice, Svc},
    skip,
    wait::{SOON, eventually},
};

const TO: [&str; 3] = ["10.96.0.20:80", "[2001:db8:f::20]:80", "[::ffff:10.96.0.20]:80"];

/// Waits until the Service has so many live connections.
fn until_connections(agent: &Agent, expected: u64) -> Result<()> {
    eventually(&format!("{expected} connections"), SOON, || {
        let rows = agent.kernel()?;
        let of_service = rows.iter().filter(|row| row.service.as_deref() == Some("t/web"));
        let count: u64 = of_service.flat_map(|row| &row.backends).map(|backend| backend.connections).sum();
        ensure!(count == expected, "{count}");
        Ok(())
    })
}

/// A lab with a Service whose server speaks both protocols; `None` where it cannot be.
fn start() -> Result<Option<(Lab, Agent)>> {
    if !fs::exists("/proc/sys/net/mptcp")? {
        skip("this kernel has no MPTCP");
        return Ok(None);
    }
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(None) };
    if !agent.status()?.features.iter().any(|feature| feature.name == "mptcp" && feature.available) {
        skip("this kernel does not tell programs of MPTCP (Linux 5.19)");
        return Ok(None);
    }
    let four = Slice::new("web-4", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1");
    let six = Slice::new("web-6", "web").port("t", 8080, "TCP").ready("2001:db8:1::10", "n1");
    lab.apply(&[&Svc::new("web").ip("10.96.0.20").ip("2001:db8:f::20").port("t", 80, "TCP"), &four, &six])?;
    lab.settle(&agent)?;
    Ok(Some((lab, agent)))
}

#[test]
fn an_mptcp_socket_sees_the_service_and_counts_until_it_is_closed() -> Result<()> {
    let Some((lab, agent)) = start()? else { return Ok(()) };
    let (backend, pod) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    for server in ["TCP", "MPTCP"] {
        let _server = backend.place.echo("A", &[&format!("8080/{server}")])?;
        for (from, place) in [("host", &lab.n1().host), ("pod", &pod.place)] {
            let client = place.client()?;
            let open = TO
                .map(|to| -> Result<_> {
                    let socket = client.connect(Way::Mptcp, to).with_context(|| format!("{from}, {server}, {to}"))?;
                    assert_eq!(socket.ask()?.answer.name, "A", "{from}, {server}, {to}");
                    assert_eq!(socket.peer()?.to_string(), to, "{from}, {server}");
                    Ok(socket)
                })
                .into_iter()
                .collect::<Result<Vec<_>>>()?;
            until_connections(&agent, 3)?;
            let direct = client.connect(Way::Mptcp, "10.244.1.10:8080")?;
            assert_eq!(direct.peer()?.to_string(), "10.244.1.10:8080", "{from}, {server}: a pod itself");
            drop(open);
            until_connections(&agent, 0)?;
        }
    }
    Ok(())
}

#[test]
fn an_mptcp_socket_meets_the_same_verdicts() -> Result<()> {
    let Some((lab, agent)) = start()? else { return Ok(()) };
    lab.apply(&[&Slice::new("web-4", "web").port("t", 8080, "TCP")])?;
    lab.settle(&agent)?;
    let client = lab.n1().pod(20)?.place.client()?;
    for (row, to, expected) in [
        ("V-1", "10.96.0.20:80", "ECONNREFUSED"),
        ("V-4", "10.96.0.20:81", "ECONNREFUSED"),
        ("V-9", "192.0.2.11:1", "ECONNREFUSED"),
    ] {
        assert_eq!(client.outcome(Way::Mptcp, to)?, expected, "{row}");
    }
    until_connections(&agent, 0)
}

/// A second path goes straight to the backend.
#[test]
fn a_further_path_is_no_further_connection() -> Result<()> {
    let Some((lab, agent)) = start()? else { return Ok(()) };
    let (backend, pod) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    let _server = backend.place.echo("A", &["8080/MPTCP"])?;
    for place in [&backend.place, &pod.place] {
        place.ip("mptcp limits set subflows 2 add_addr_accepted 2")?;
    }
    pod.place.ip("addr add 10.244.1.120/32 dev eth0\nmptcp endpoint add 10.244.1.120 subflow")?;
    lab.n1().host.ip("route add 10.244.1.120/32 dev pod20")?;
    let client = pod.place.client()?;
    let socket = client.connect(Way::Mptcp, TO[0])?;
    socket.ask()?;
    eventually("the second path is there", SOON, || {
        let joined = pod.place.enter(|| mptcp_counter("MPJoinSynAckRx"))??;
        ensure!(joined == 1, "{joined} have joined");
        Ok(())
    })?;
    until_connections(&agent, 1)?;
    assert_eq!(socket.peer()?.to_string(), TO[0]);
    drop(socket);
    until_connections(&agent, 0)
}

/// A counter of the calling thread's network namespace.
fn mptcp_counter(name: &str) -> Result<u64> {
    let text = fs::read_to_string("/proc/thread-self/net/netstat")?;
    let mut lines = text.lines().filter(|line| line.starts_with("MPTcpExt:"));
    let (names, values) = (lines.next().context("no counters of MPTCP")?, lines.next().context("no values")?);
    let position = names.split_whitespace().position(|known| known == name).context("no such counter")?;
    Ok(values.split_whitespace().nth(position).context("no value")?.parse()?)
}
