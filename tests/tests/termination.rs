//! Endpoints that come and go: who gets new connections, and that open ones go on.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::{LoadKind, Way},
    lab::Lab,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

const TO: &str = "10.96.0.43:80";

fn web() -> Svc {
    Svc::web("web", "10.96.0.43")
}

/// Conditions as they stand in the object; `None` = absent.
fn conditions(ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>) -> Value {
    let mut conditions = json!({});
    for (name, value) in [("ready", ready), ("serving", serving), ("terminating", terminating)] {
        if let Some(value) = value {
            conditions[name] = json!(value);
        }
    }
    conditions
}

#[test]
fn case_06_conditions_row_by_row() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let client = lab.n1().pod(20)?.place.client()?;
    lab.apply(&[&web()])?;
    let (yes, no) = (Some(true), Some(false));
    for (row, ready, serving, terminating, other, expected) in [
        ("publishNotReadyAddresses: ready though terminating", yes, yes, yes, true, "A B"),
        ("absent means ready", None, None, None, true, "A B"),
        ("terminating beside a ready one", no, yes, yes, true, "B"),
        ("only serving and terminating", no, yes, yes, false, "A"),
        ("terminating, not serving", no, no, yes, false, ""),
        ("neither", no, no, no, false, ""),
        ("serving alone is not enough", no, yes, no, false, ""),
        ("ready wins over everything", yes, no, yes, false, "A"),
    ] {
        let slice = Slice::web("web").endpoint("10.244.1.10", "n1", &conditions(ready, serving, terminating));
        lab.apply(&[&if other { slice.ready("10.244.1.11", "n1") } else { slice }])?;
        lab.settle(&agent)?;
        if expected.is_empty() {
            assert_eq!(client.outcome(Way::Tcp, TO)?, "ECONNREFUSED", "{row}");
            continue;
        }
        let names: BTreeSet<_> = client.dial_many(Way::Tcp, TO, 40)?.into_keys().collect();
        assert_eq!(names, expected.split(' ').map(str::to_owned).collect(), "{row}");
        let services = agent.services()?;
        let shown = services.iter().filter(|s| s.name == "web").flat_map(|s| &s.frontends[0].backends);
        let state: Vec<_> = shown.filter(|b| b.address == "10.244.1.10").map(|b| (b.ready, b.terminating)).collect();
        assert_eq!(state, [(ready.unwrap_or(true), terminating.unwrap_or(false))], "{row}: svc list shows the state");
    }
    Ok(())
}

#[test]
fn an_open_connection_outlives_every_state_of_its_backend() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let client = lab.n1().pod(20)?.place.client()?;
    let (a, b) = ("10.244.1.10", "10.244.1.11");
    lab.apply(&[&web(), &Slice::web("web").ready(a, "n1")])?;
    lab.settle(&agent)?;
    let open = client.connect(Way::Tcp, TO)?;
    assert_eq!(open.ask()?.answer.name, "A");
    let beside_b = |slice: Slice| slice.ready(b, "n1");
    for (state, slice) in [
        ("not ready", beside_b(Slice::web("web").not_ready(a, "n1"))),
        ("terminating", beside_b(Slice::web("web").terminating(a, "n1"))),
        ("gone", beside_b(Slice::web("web"))),
        ("the Service is scaled to zero", Slice::web("web")),
        ("back", Slice::web("web").ready(a, "n1")),
    ] {
        lab.apply(&[&slice])?;
        lab.settle(&agent)?;
        assert_eq!((open.ask()?.answer.name.as_str(), open.peer()?), ("A", TO.parse()?), "F28: {state}");
    }
    lab.delete(&[&web()])?;
    lab.settle(&agent)?;
    assert_eq!((open.ask()?.answer.name.as_str(), open.peer()?), ("A", TO.parse()?), "the Service is gone");
    Ok(())
}

/// F49: only where the operator asks for it, and only the connections of that backend.
#[test]
fn with_close_tcp_connections_to_a_removed_backend_end() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let agent = lab.n1().agent_with(&["--close-tcp"])?;
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let pod = lab.n1().pod(20)?;
    let (a, b) = ("10.244.1.10", "10.244.1.11");
    lab.apply(&[&web(), &Slice::web("web").ready(a, "n1").ready(b, "n1")])?;
    lab.settle(&agent)?;
    let clients = [("pod", pod.place.client()?), ("host", lab.n1().host.client()?)];
    let mut open = Vec::new();
    for (from, client) in &clients {
        for _ in 0..12 {
            let socket = client.connect(Way::Tcp, TO)?;
            let name = socket.ask()?.answer.name;
            open.push((from, name, socket));
        }
        open.push((from, "the pod itself".into(), client.connect(Way::Tcp, "10.244.1.10:8080")?));
    }
    assert!(open.iter().any(|(_, name, _)| name == "A") && open.iter().any(|(_, name, _)| name == "B"));
    lab.apply(&[&Slice::web("web").not_ready(a, "n1").ready(b, "n1")])?;
    lab.settle(&agent)?;
    for (from, name, socket) in &open {
        socket.ask().with_context(|| format!("F28: not ready is not removed ({from}, {name})"))?;
    }
    lab.apply(&[&Slice::web("web").ready(b, "n1")])?;
    for (from, name, socket) in &open {
        if name == "A" {
            eventually(&format!("{from}: the connection ends"), SOON, || {
                ensure!(socket.ask().is_err(), "it is answered");
                Ok(())
            })?;
        }
    }
    for (from, name, socket) in open.iter().filter(|(_, name, _)| name != "A") {
        socket.ask().with_context(|| format!("{from}: {name} stays"))?;
    }
    Ok(())
}

#[test]
fn flapping_readiness_breaks_no_connection_and_fails_no_dial() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let client = lab.n1().pod(20)?.place.client()?;
    let (a, b) = ("10.244.1.10", "10.244.1.11");
    lab.apply(&[&web(), &Slice::web("web").ready(a, "n1").ready(b, "n1")])?;
    lab.settle(&agent)?;
    let loads = [LoadKind::Ask, LoadKind::Ask, LoadKind::Dial, LoadKind::Dial]
        .map(|kind| client.load(Way::Tcp, kind, TO, Duration::ZERO))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for _ in 0..5 {
        for slice in [
            Slice::web("web").not_ready(a, "n1").ready(b, "n1"),
            Slice::web("web").ready(a, "n1").not_ready(b, "n1"),
            Slice::web("web").ready(a, "n1").terminating(b, "n1"),
        ] {
            lab.apply(&[&slice])?;
            lab.settle(&agent)?;
        }
    }
    for load in loads {
        let report = load.stop()?;
        assert!(report.failed == 0 && report.answered > 100, "{report:?}");
    }
    Ok(())
}

#[test]
fn a_rolling_update_moves_every_new_connection() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let client = lab.n1().host.client()?;
    let (a, b) = ("10.244.1.10", "10.244.1.11");
    lab.apply(&[&web(), &Slice::web("web").ready(a, "n1")])?;
    lab.settle(&agent)?;
    let load = client.load(Way::Tcp, LoadKind::Dial, TO, Duration::ZERO)?;
    for slice in [
        Slice::web("web").ready(a, "n1").not_ready(b, "n1"),
        Slice::web("web").ready(a, "n1").ready(b, "n1"),
        Slice::web("web").terminating(a, "n1").ready(b, "n1"),
        Slice::web("web").ready(b, "n1"),
    ] {
        lab.apply(&[&slice])?;
        lab.settle(&agent)?;
    }
    let a_total = load.report()?.names.get("A").copied();
    eventually("B answers", SOON, || {
        let report = load.report()?;
        ensure!(report.names.get("B").is_some_and(|times| *times > 20), "{report:?}");
        Ok(())
    })?;
    let report = load.stop()?;
    assert_eq!(report.failed, 0, "{report:?}");
    let later = report.names.get("A").copied().unwrap_or_default() - a_total.unwrap_or_default();
    assert!(later <= 1, "{later} dials reached A after it was gone"); // one was under way
    Ok(())
}
