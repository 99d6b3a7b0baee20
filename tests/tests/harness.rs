//! The harness itself: what every other test takes for granted, without an agent.

use std::time::Duration;

use anyhow::{Context, Result};
use sheave_tests::{
    client::{LoadKind, Way},
    lab::Lab,
    wait::{SOON, eventually},
};

#[test]
fn clients_and_servers_of_both_families_talk_over_plain_routes() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
    let _servers = [
        a.place.echo("a", &["8080/TCP", "8080/UDP"])?,
        b.place.echo("b", &["8080/TCP", "8080/UDP"])?,
        lab.n1().host.echo("n1", &["9090/TCP", "9090/UDP"])?,
    ];
    let mapped = format!("[::ffff:{}]:8080", b.v4);
    for (name, place) in [("pod", &a.place), ("host", &lab.n1().host), ("other host", &lab.n2().host)] {
        let client = place.client()?;
        for (to, server) in [
            (a.at(8080).to_string(), "a"),
            (a.at6(8080).to_string(), "a"),
            (b.at(8080).to_string(), "b"),
            (b.at6(8080).to_string(), "b"),
            (mapped.clone(), "b"),
            ("192.0.2.11:9090".into(), "n1"),
            ("[2001:db8::11]:9090".into(), "n1"),
        ] {
            for way in [Way::Tcp, Way::Udp, Way::UdpSendto] {
                let dialled = client.dial(way, &to).map_err(|e| e.context(format!("{name} {way:?} {to}")))?;
                assert_eq!(dialled.name, server, "{name} {way:?} {to}");
                assert_eq!(dialled.peer, to.parse()?, "{name} {way:?} {to}");
            }
        }
        assert_eq!(client.outcome(Way::Tcp, &a.at(1).to_string())?, "ECONNREFUSED", "{name}");
    }
    let outside = lab.outside.client()?;
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:9090")?, "n1");
    assert_ne!(outside.outcome(Way::Tcp, &a.at(8080).to_string())?, "a", "the fabric knows no pod address");
    Ok(())
}

#[test]
fn a_load_tells_who_answered_and_what_failed() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let (mut server, client) = (pod.place.echo("a", &["8080/TCP", "8080/UDP"])?, lab.n1().host.client()?);
    for (way, kind) in [(Way::Tcp, LoadKind::Dial), (Way::Udp, LoadKind::Ask), (Way::UdpSendto, LoadKind::Send)] {
        let before = server.seen()?;
        let load = client.load(way, kind, &pod.at(8080).to_string(), Duration::from_millis(1))?;
        eventually("twenty were answered", SOON, || {
            let report = load.report()?;
            anyhow::ensure!(report.answered >= 20, "{report:?}");
            Ok(())
        })?;
        let report = load.stop()?;
        assert_eq!(report.failed, 0, "{way:?}: {report:?}");
        eventually("all arrived", SOON, || {
            let seen = server.seen()? - before;
            anyhow::ensure!(seen >= report.answered, "{way:?}: {seen} of {}", report.answered);
            Ok(())
        })?;
    }
    let load = client.load(Way::Tcp, LoadKind::Ask, &pod.at(8080).to_string(), Duration::from_millis(1))?;
    eventually("the first is answered", SOON, || (load.report()?.answered > 0).then_some(()).context("none"))?;
    drop(server);
    eventually("a failure is told", SOON, || (load.report()?.failed > 0).then_some(()).context("none"))?;
    assert!(
        load.stop()?.failures.iter().any(|name| name == "ECONNREFUSED" || name == "CLOSED" || name == "ECONNRESET")
    );
    Ok(())
}

#[test]
fn nothing_is_left_behind() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["8080/TCP"])?;
    let (name, cgroup) = (lab.name.clone(), pod.place.cgroup.clone());
    assert!(cgroup.exists());
    drop(lab);
    assert!(!cgroup.exists());
    let mounts = std::fs::read_to_string("/proc/mounts")?;
    assert!(!mounts.contains(&format!("{name}/")), "{mounts}");
    let left = std::fs::read_dir("/run/netns")?.flatten().filter(|entry| {
        entry.file_name().to_string_lossy().strip_prefix(&name).is_some_and(|rest| rest.starts_with('-'))
    });
    assert_eq!(left.count(), 0);
    Ok(())
}
