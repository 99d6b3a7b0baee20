//! UDP sockets that live longer than the backends they talk to.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    client::{LoadKind, Way},
    lab::Lab,
    objects::{Slice, Svc},
    wait::{eventually, throughout},
};

/// The cases' limit for what has to follow a change.
const SOON: Duration = Duration::from_secs(5);

fn slice(backends: &[&str]) -> Slice {
    let slice = Slice::new("dns-1", "dns").port("u", 53, "UDP").port("t", 53, "TCP");
    backends.iter().fold(slice, |slice, address| slice.ready(address, "n1"))
}

fn lines(backends: &str) -> [String; 2] {
    ["TCP", "UDP"].map(|protocol| format!("10.96.0.10:53/{protocol} → {backends}"))
}

#[test]
fn case_21_a_connected_socket_leaves_a_removed_backend() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let (a, b, c) = (lab.n1().pod(10)?, lab.n1().pod(11)?, lab.n1().pod(12)?);
    let mut servers = [("A", &a), ("B", &b), ("C", &c)]
        .map(|(name, pod)| pod.place.echo(name, &["53/UDP", "53/TCP"]))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    let pod = lab.n1().pod(20)?;
    lab.apply(&[
        &Svc::new("dns").ip("10.96.0.10").port("u", 53, "UDP").port("t", 53, "TCP"),
        &slice(&["10.244.1.10"]),
    ])?;
    agent.expect("dns", &lines("10.244.1.10:53").each_ref().map(String::as_str))?;
    let clients = [("host", lab.n1().host.client()?), ("pod", pod.place.client()?)];
    let pause = Duration::from_millis(50);
    let loads = clients.each_ref().map(|(_, client)| client.load(Way::Udp, LoadKind::Ask, "10.96.0.10:53", pause));
    let loads = loads.into_iter().collect::<Result<Vec<_>>>()?;
    let answered_by = |load: &sheave_tests::client::Running<'_>, name: &str| {
        eventually(&format!("{name} answers"), SOON, || {
            let report = load.report()?;
            ensure!(report.names.contains_key(name), "{report:?}");
            Ok(())
        })
    };
    for load in &loads {
        answered_by(load, "A")?;
    }
    agent.kill()?; // it must hold for sockets that are older than the agent
    agent.restart()?;
    lab.apply(&[&slice(&["10.244.1.10", "10.244.1.11"])])?;
    agent.expect("dns", &lines("10.244.1.10:53 10.244.1.11:53").each_ref().map(String::as_str))?;

    // Sockets of B, opened before A goes, must not notice.
    let client = pod.place.client()?;
    let of_b = |way| -> Result<_> {
        for _ in 0..100 {
            let socket = client.connect(way, "10.96.0.10:53")?;
            if socket.ask()?.answer.name == "B" {
                return Ok(socket);
            }
        }
        anyhow::bail!("a hundred dials and none reached B")
    };
    let kept = [of_b(Way::Udp)?, of_b(Way::Tcp)?];

    lab.apply(&[&slice(&["10.244.1.11"])])?;
    agent.expect("dns", &lines("10.244.1.11:53").each_ref().map(String::as_str))?;
    for ((from, _), load) in clients.iter().zip(&loads) {
        answered_by(load, "B").with_context(|| format!("from the {from}"))?;
    }
    let seen = servers[0].seen()?;
    throughout(Duration::from_secs(1), || {
        let now = servers[0].seen()?;
        ensure!(now == seen, "A was still sent {} datagrams", now - seen);
        Ok(())
    })?;
    for socket in &kept {
        assert_eq!(socket.ask()?.answer.name, "B", "a socket on the surviving backend");
    }

    lab.apply(&[&slice(&["10.244.1.12"])])?;
    for load in &loads {
        answered_by(load, "C")?;
    }
    for load in loads {
        let report = load.stop()?;
        assert!(report.longest_gap < Duration::from_secs(10), "{report:?}");
    }
    Ok(())
}

#[test]
fn case_22_nothing_is_sent_to_where_a_backend_was() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (pod, client_pod) = (lab.n1().pod(11)?, lab.n1().pod(20)?);
    let mut newcomer = pod.place.echo("new", &["53/UDP"])?;
    let service = Svc::new("dns").ip("10.96.0.10").port("u", 53, "UDP").port("t", 53, "TCP");
    let client = client_pod.place.client()?;
    let pause = Duration::from_millis(50);
    // After a deletion a connected socket has nothing to connect to, so it is not among the senders then.
    for (name, ways, deleted) in
        [("scaled to zero", &[Way::Udp, Way::UdpSendto][..], false), ("deleted", &[Way::UdpSendto][..], true)]
    {
        let old = lab.n1().pod(10)?;
        let mut server = old.place.echo("old", &["53/UDP"])?;
        lab.apply(&[&service, &slice(&["10.244.1.10"])])?;
        agent.expect("dns", &lines("10.244.1.10:53").each_ref().map(String::as_str))?;
        let loads = ways.iter().map(|way| client.load(*way, LoadKind::Send, "10.96.0.10:53", pause));
        let loads = loads.collect::<Result<Vec<_>>>()?;
        eventually("datagrams arrive", SOON, || {
            let seen = server.seen()?;
            ensure!(seen > 10, "{seen}");
            Ok(())
        })?;

        if deleted {
            lab.delete(&[&service, &slice(&[])])?;
            agent.expect("dns", &[])?;
        } else {
            lab.apply(&[&slice(&[])])?;
            agent.expect("dns", &lines("refused").each_ref().map(String::as_str))?;
        }
        let mut last = server.seen()?;
        eventually("no datagram arrives", SOON, || {
            let before = std::mem::replace(&mut last, server.seen()?);
            ensure!(before == last, "{} more", last - before);
            throughout(Duration::from_millis(300), || {
                let now = server.seen()?;
                ensure!(now == last, "{} more", now - last);
                Ok(())
            })
        })
        .context(name)?;
        drop(server);
        lab.n1().remove(old)?;
        let unrelated = lab.n1().pod(10)?;
        let mut bystander = unrelated.place.echo("unrelated", &["53/UDP"])?;
        throughout(Duration::from_secs(1), || {
            let seen = bystander.seen()?;
            ensure!(seen == 0, "{name}: the unrelated pod got {seen} datagrams");
            Ok(())
        })?;

        let before = newcomer.seen()?;
        lab.apply(&[&service, &slice(&["10.244.1.11"])])?;
        let wanted = u64::try_from(ways.len())? * 10;
        eventually("the new backend is reached", SOON, || {
            let seen = newcomer.seen()? - before;
            ensure!(seen > wanted, "{seen}");
            Ok(())
        })
        .context(name)?;
        drop(loads);
        assert_eq!(bystander.seen()?, 0, "{name}");
        drop(bystander);
        lab.n1().remove(unrelated)?;
    }
    Ok(())
}
