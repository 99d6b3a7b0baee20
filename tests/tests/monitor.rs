//! `sheave monitor`: what is told of real connections.

use std::{
    io::{BufRead as _, BufReader},
    process::Stdio,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};
use sheave_agent::monitor::EventView;
use sheave_tests::{
    client::{LoadKind, Way},
    lab::Lab,
    monitor::Monitor,
    objects::{Slice, Svc},
    place::program,
    wait::{SOON, eventually},
};

/// A service that is served, one that is not, and one whose policy leaves nobody.
fn services(lab: &Lab) -> Result<()> {
    let node_port = |name: &str, n: u16| {
        Svc::new(name).ip(&format!("10.96.0.{n}")).port("t", 80, "TCP").node_port(30_000 + n).port("u", 80, "UDP")
    };
    let slice = |name: &str| Slice::new(name, name).port("t", 8080, "TCP").port("u", 8080, "UDP");
    lab.apply(&[
        &node_port("web", 1),
        &slice("web").ready("10.244.1.10", "n1"),
        &node_port("none", 2),
        &node_port("far", 3).set("externalTrafficPolicy", json!("Local")).set("internalTrafficPolicy", json!("Local")),
        &slice("far").ready("10.244.2.10", "n2"),
    ])
}

#[test]
fn connections_are_told_with_names_and_reasons() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "a")?;
    services(&lab)?;
    lab.settle(&agent)?;
    let (mut inside, mut outside) = (lab.n1().pod(20)?.place.client()?, lab.outside.client()?);
    (inside.patience, outside.patience) = (Duration::from_millis(300), Duration::from_millis(300));
    let before = inside.outcome(Way::Tcp, "10.96.0.1:80")?; // not watched, not told
    assert_eq!(before, "a");
    let mut monitor = Monitor::start(lab.n1(), &agent, &[])?;

    let cases = [
        (&inside, Way::Tcp, "10.96.0.1:80", "forward TCP P 10.96.0.1:80 10.244.1.10:8080 t/web socket_connect"),
        (&inside, Way::UdpSendto, "10.96.0.1:80", "forward UDP P 10.96.0.1:80 10.244.1.10:8080 t/web socket_send"),
        (&inside, Way::Tcp, "10.96.0.2:80", "reject TCP P 10.96.0.2:80 - t/none socket_reject"),
        (&inside, Way::Tcp, "10.96.0.1:81", "reject TCP P 10.96.0.1:81 - - socket_unknown_port"),
        (&inside, Way::Udp, "10.96.0.3:80", "drop UDP P 10.96.0.3:80 - t/far socket_drop"),
        (
            &outside,
            Way::Tcp,
            "192.0.2.11:30001",
            "forward TCP C 192.0.2.11:30001 10.244.1.10:8080 t/web packet_forward",
        ),
        (&outside, Way::Tcp, "192.0.2.11:30002", "reject TCP C 192.0.2.11:30002 - t/none packet_reject"),
        (&outside, Way::Tcp, "192.0.2.11:30003", "drop TCP C 192.0.2.11:30003 - t/far packet_drop"),
    ];
    for (client, way, to, expected) in cases {
        let _ = client.outcome(way, to)?;
        let mut told = monitor.line()?;
        let who = std::mem::take(&mut told[2]);
        told[2] = match who.as_str() {
            who if who.starts_with("sheave-client[") => "P",
            who if who.starts_with("198.51.100.10:") => "C",
            _ => &who,
        }
        .to_owned();
        assert_eq!(told.join(" "), expected, "{way:?} {to}");
    }
    assert_eq!(monitor.end(Signal::SIGINT)?, "");
    Ok(())
}

#[test]
fn filters_leave_out_what_is_not_wanted() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "a")?;
    services(&lab)?;
    lab.settle(&agent)?;
    let inside = lab.n1().pod(20)?.place.client()?;
    agent.kill()?; // the kernel tells, with or without an agent
    for (flags, expected) in [
        (&["--drops"][..], "10.96.0.2:80"),
        (&["none"], "10.96.0.2:80"),
        (&["t/none"], "10.96.0.2:80"),
        (&["web", "-n", "t"], "10.96.0.1:80"),
        (&["-n", "t"], "10.96.0.1:80"),
    ] {
        let mut monitor = Monitor::start(lab.n1(), &agent, flags)?;
        for to in ["10.96.0.1:80", "10.96.0.2:80"] {
            let _ = inside.outcome(Way::Tcp, to)?;
        }
        assert_eq!(monitor.line()?[3], expected, "{flags:?}");
        monitor.end(Signal::SIGTERM)?;
    }
    Ok(())
}

#[test]
fn json_is_one_object_a_line_and_count_ends_it() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "a")?;
    services(&lab)?;
    lab.settle(&agent)?;
    let inside = lab.n1().pod(20)?.place.client()?;
    let mut command = lab.n1().host.command(program("sheave")?)?;
    command.args(["monitor", "-o", "json", "--count", "2"]).args(agent.flags().split(' ')).stdout(Stdio::piped());
    let child = command.spawn()?;
    let watched = || inside.outcome(Way::Tcp, "10.96.0.1:80");
    let mut child = Some(child);
    eventually("it has read two records", SOON, || {
        watched()?;
        let running = child.as_mut().context("no process")?;
        ensure!(running.try_wait()?.is_some(), "it still runs");
        Ok(())
    })?;
    let output = child.take().context("no process")?.wait_with_output()?;
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout)?;
    let events: Vec<EventView> = text.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>()?;
    assert_eq!(events.len(), 2, "{text}");
    let value: Value = serde_json::from_str(text.lines().next().context("no line")?)?;
    for (field, wanted) in [
        ("verdict", json!("forward")),
        ("reason", json!("socket_connect")),
        ("path", json!("socket")),
        ("protocol", json!("TCP")),
        ("client", json!(null)),
        ("process", json!("sheave-client")),
        ("frontend", json!("10.96.0.1:80")),
        ("backend", json!("10.244.1.10:8080")),
        ("service", json!("t/web")),
    ] {
        assert_eq!(value[field], wanted, "{field}");
    }
    assert!(value["pid"].as_u64().is_some_and(|pid| pid > 0) && value["time"].is_string(), "{value}");
    Ok(())
}

/// One reads at a time, and says so; a killed reader is no hindrance, and what it left behind is nobody's.
#[test]
fn a_second_reader_is_told_of_the_first() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "a")?;
    services(&lab)?;
    lab.settle(&agent)?;
    let inside = lab.n1().pod(20)?.place.client()?;
    let first = Monitor::start(lab.n1(), &agent, &[])?;
    let refused = agent.sheave(&["monitor"]).err().context("a second reader got in")?;
    assert!(format!("{refused:#}").contains("another `sheave monitor` is running"), "{refused:#}");
    first.end(Signal::SIGKILL)?;
    inside.outcome(Way::Tcp, "10.96.0.2:80")?; // still told, and read by nobody
    let mut second = Monitor::start(lab.n1(), &agent, &[])?;
    inside.outcome(Way::Tcp, "10.96.0.1:80")?;
    assert_eq!(second.line()?[3], "10.96.0.1:80");
    Ok(())
}

/// A reader that does not read loses records, which are counted, and hears of it.
#[test]
fn lost_records_are_counted_and_said() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    services(&lab)?;
    lab.settle(&agent)?;
    let inside = lab.n1().pod(20)?.place.client()?;
    let Monitor { mut child, mut lines } = Monitor::start(lab.n1(), &agent, &[])?;
    let tell = |signal| kill(Pid::from_raw(child.id().cast_signed()), signal);
    let refused = inside.load(Way::UdpSendto, LoadKind::Send, "10.96.0.2:80", Duration::ZERO)?;
    eventually("the buffer is full", Duration::from_secs(60), || {
        tell(Signal::SIGCONT)?; // the wish of a reader that is stopped ends after three seconds
        tell(Signal::SIGSTOP)?;
        eventually("records are lost", Duration::from_secs(2), || {
            let lost = agent.status()?.counters.get("event_lost").copied().unwrap_or_default();
            ensure!(lost > 0, "none is lost");
            Ok(())
        })
    })?;
    refused.stop()?;
    tell(Signal::SIGCONT)?;
    let mut stderr = BufReader::new(child.stderr.take().context("no stderr")?);
    let mut said = String::new();
    thread::scope(|scope| {
        scope.spawn(move || std::io::copy(&mut lines, &mut std::io::sink())); // it is not to wait for us
        let heard = stderr.read_line(&mut said);
        child.kill().and_then(|()| child.wait()).and(heard)
    })?;
    assert!(said.ends_with("records were lost: more came than could be printed\n"), "{said:?}");
    Ok(())
}
