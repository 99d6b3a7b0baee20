//! Traffic does not notice the agent: killed, restarted, ended, absent while the cluster changes.

use std::{fs, os::unix::fs::PermissionsExt as _, thread, time::Duration};

use anyhow::{Result, ensure};
use sheave_tests::{
    agent::Paths,
    client::{LoadKind, Running, Way},
    foreign,
    lab::Lab,
    objects::{Slice, Svc},
    place::program,
    skip,
    wait::{SOON, eventually},
};

/// A Service of TCP and UDP port 80 and its slice, with backends on n1.
fn service(name: &str, ip: &str, backends: &[&str]) -> (Svc, Slice) {
    let service = Svc::new(name).ip(ip).port("t", 80, "TCP").port("u", 80, "UDP");
    let slice = Slice::new(&format!("{name}-1"), name).port("t", 8080, "TCP").port("u", 8080, "UDP");
    (service, backends.iter().fold(slice, |slice, backend| slice.ready(backend, "n1")))
}

/// Waits until each load has been answered this many times more.
fn more(loads: &[Running<'_>], times: u64) -> Result<()> {
    for load in loads {
        let before = load.report()?.answered;
        eventually("the load goes on", SOON, || {
            let report = load.report()?;
            ensure!(report.answered >= before + times, "{report:?}");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn killed_under_load_no_dial_fails_and_the_next_agent_adopts_everything() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let pods = [10, 11, 12, 20].map(|number| lab.n1().pod(number)).into_iter().collect::<Result<Vec<_>>>()?;
    let _servers = (pods[..3].iter().zip(["A", "B", "C"]))
        .map(|(pod, name)| pod.place.echo(name, &["8080/TCP", "8080/UDP"]))
        .collect::<Result<Vec<_>>>()?;
    let client = pods[3].place.client()?;
    let (web, slice) = service("web", "10.96.0.20", &["10.244.1.10", "10.244.1.11", "10.244.1.12"]);
    let (sticky, sticky_slice) = service("sticky", "10.96.0.21", &["10.244.1.10", "10.244.1.11", "10.244.1.12"]);
    lab.apply(&[&web, &slice, &sticky.affinity(3600), &sticky_slice])?;
    agent.until_programmed("web")?;
    agent.until_programmed("sticky")?;
    let ids = agent.ids()?;
    let pinned = client.dial(Way::Tcp, "10.96.0.21:80")?.name;
    let open = client.connect(Way::Tcp, "10.96.0.20:80")?;
    let talks_to = open.ask()?.answer.name;

    let loads = [(Way::Tcp, LoadKind::Dial), (Way::Udp, LoadKind::Dial), (Way::UdpSendto, LoadKind::Dial)]
        .map(|(way, kind)| client.load(way, kind, "10.96.0.20:80", Duration::ZERO))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
    for _ in 0..3 {
        more(&loads, 20)?;
        agent.kill()?;
        more(&loads, 20)?; // nobody at home
        agent.restart()?;
    }
    more(&loads, 20)?;
    for load in loads {
        let report = load.stop()?;
        assert_eq!(report.failed, 0, "{report:?}");
        assert_eq!(report.names.len(), 3, "all three backends are used: {report:?}");
    }
    assert_eq!(agent.ids()?, ids, "every number is the same");
    for _ in 0..20 {
        assert_eq!(client.dial(Way::Tcp, "10.96.0.21:80")?.name, pinned, "affinity survives");
    }
    assert_eq!((open.ask()?.answer.name, open.peer()?), (talks_to, "10.96.0.20:80".parse()?));
    Ok(())
}

/// Where in its life the agent dies is what varies: 200 moments of a start, each after a change of the cluster.
#[test]
fn killed_two_hundred_times_at_random_moments_no_dial_fails_or_is_misdirected() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let _servers = [node.server(10, "A")?, node.server(11, "B")?, node.server(12, "other")?];
    let (inside, outside) = (node.pod(20)?.place.client()?, lab.outside.client()?);
    let web = Svc::new("web").ip("10.96.0.20").port("u", 80, "UDP").node_port(30_020);
    let web = web.port("t", 80, "TCP").node_port(30_020);
    let slice = |backends: &[&str]| service("web", "10.96.0.20", backends).1;
    let both = slice(&["10.244.1.10", "10.244.1.11"]);
    lab.apply(&[&web, &both])?;
    agent.until_programmed("web")?;
    eventually("the packet path works", SOON, || outside.dial(Way::Tcp, "192.0.2.11:30020"))?;
    let loads = [
        inside.load(Way::Tcp, LoadKind::Dial, "10.96.0.20:80", Duration::from_millis(1))?,
        inside.load(Way::UdpSendto, LoadKind::Dial, "10.96.0.20:80", Duration::from_millis(1))?,
        inside.load(Way::Tcp, LoadKind::Ask, "10.96.0.20:80", Duration::from_millis(1))?,
        outside.load(Way::Tcp, LoadKind::Dial, "192.0.2.11:30020", Duration::from_millis(1))?,
        outside.load(Way::Tcp, LoadKind::Ask, "192.0.2.11:30020", Duration::from_millis(1))?,
        outside.load(Way::Udp, LoadKind::Dial, "192.0.2.11:30020", Duration::from_millis(1))?,
        outside.load(Way::Udp, LoadKind::Ask, "192.0.2.11:30020", Duration::from_millis(1))?,
    ];
    let mut random = 0x5eed_u64;
    for turn in 0..200_u16 {
        agent.kill()?;
        // Services come and go around the one that is dialled, and its slice is written again and again.
        let (passing, passing_slice) = service(&format!("s{}", turn % 7), "10.96.0.30", &["10.244.1.12"]);
        if turn % 2 == 0 {
            lab.apply(&[&passing, &passing_slice, &both])?;
        } else {
            lab.apply(&[&both])?;
        }
        agent.launch()?;
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        thread::sleep(Duration::from_millis(random >> 33 & 0xff)); // the moment of death
    }
    agent.kill()?;
    agent.restart()?;
    for load in loads {
        let report = load.stop()?;
        ensure!(report.failed == 0 && report.answered > 0, "{report:?}");
        ensure!(report.names.keys().all(|name| name == "A" || name == "B"), "misdirected: {report:?}");
    }
    let frontends = ["10.96.0.20:80/TCP", "10.96.0.20:80/UDP", "192.0.2.11:30020/TCP", "192.0.2.11:30020/UDP"];
    let lines = frontends.map(|frontend| format!("{frontend} → 10.244.1.10:8080 10.244.1.11:8080"));
    agent.expect("web", &lines.each_ref().map(String::as_str))
}

#[test]
fn ended_politely_the_agent_leaves_the_datapath_working() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    let client = lab.n1().host.client()?;
    let (web, slice) = service("web", "10.96.0.20", &["10.244.1.10"]);
    lab.apply(&[&web, &slice])?;
    agent.until_programmed("web")?;
    let before = agent.kernel()?;
    agent.terminate()?;
    for way in [Way::Tcp, Way::Udp, Way::UdpSendto] {
        assert_eq!(client.outcome(way, "10.96.0.20:80")?, "A", "{way:?}");
    }
    assert_eq!(agent.kernel()?, before, "lb list works while the agent is down");
    assert!(agent.services().is_err(), "svc list needs the agent");
    Ok(())
}

#[test]
fn ended_politely_and_started_again_under_load_no_dial_fails() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let _servers = [node.server(10, "A")?, node.server(11, "B")?];
    let (inside, outside) = (node.pod(20)?.place.client()?, lab.outside.client()?);
    let (_, slice) = service("web", "10.96.0.20", &["10.244.1.10", "10.244.1.11"]);
    let web = Svc::new("web").ip("10.96.0.20").port("u", 80, "UDP").node_port(30_020);
    lab.apply(&[&web.port("t", 80, "TCP").node_port(30_020), &slice])?;
    agent.until_programmed("web")?;
    eventually("the packet path works", SOON, || outside.dial(Way::Udp, "192.0.2.11:30020"))?;
    let loads = [(&inside, "10.96.0.20:80"), (&outside, "192.0.2.11:30020")]
        .iter()
        .flat_map(|(client, to)| {
            [
                (Way::Tcp, LoadKind::Dial),
                (Way::Tcp, LoadKind::Ask),
                (Way::Udp, LoadKind::Dial),
                (Way::Udp, LoadKind::Ask),
            ]
            .map(|(way, kind)| client.load(way, kind, to, Duration::from_millis(1)))
        })
        .collect::<Result<Vec<_>>>()?;
    for _ in 0..5 {
        agent.terminate()?;
        more(&loads, 20)?; // nobody at home
        agent.restart()?;
        more(&loads, 20)?;
    }
    for load in loads {
        let report = load.stop()?;
        ensure!(report.failed == 0, "{report:?}");
        ensure!(report.names.keys().all(|name| name == "A" || name == "B"), "misdirected: {report:?}");
    }
    Ok(())
}

#[test]
fn case_32_what_was_deleted_while_the_agent_was_down_is_gone_after_its_start() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let pods = [10, 11, 12].map(|number| lab.n1().pod(number)).into_iter().collect::<Result<Vec<_>>>()?;
    let _servers = (pods.iter().zip(["A", "B", "C"]))
        .map(|(pod, name)| pod.place.echo(name, &["8080/TCP", "8080/UDP"]))
        .collect::<Result<Vec<_>>>()?;
    let client = lab.n1().host.client()?;
    let (gone, gone_slice) = service("gone", "10.96.0.50", &["10.244.1.10"]);
    let (moved, moved_slice) = service("moved", "10.96.0.51", &["10.244.1.10"]);
    let (shrunk, shrunk_slice) = service("shrunk", "10.96.0.52", &["10.244.1.10", "10.244.1.11"]);
    lab.apply(&[&gone, &gone_slice, &moved, &moved_slice, &shrunk, &shrunk_slice])?;
    for name in ["gone", "moved", "shrunk"] {
        agent.until_programmed(name)?;
    }

    agent.terminate()?;
    lab.delete(&[&gone, &gone_slice])?;
    let (reused, reused_slice) = service("reused", "10.96.0.50", &["10.244.1.12"]);
    let (moved, _) = service("moved", "10.96.0.53", &[]);
    let (_, shrunk_slice) = service("shrunk", "10.96.0.52", &["10.244.1.11"]);
    lab.apply(&[&reused, &reused_slice, &moved, &shrunk_slice])?;
    for _ in 0..10 {
        // Old entries may serve until the agent is back, but a Service is never a mixture.
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.50:80")?, "A");
    }
    agent.restart()?;

    for (name, address, backend) in [
        ("reused", "10.96.0.50", "10.244.1.12"),
        ("moved", "10.96.0.53", "10.244.1.10"),
        ("shrunk", "10.96.0.52", "10.244.1.11"),
    ] {
        let lines = ["TCP", "UDP"].map(|protocol| format!("{address}:80/{protocol} → {backend}:8080"));
        agent.expect(name, &lines.each_ref().map(String::as_str))?;
    }
    agent.expect("gone", &[])?;
    let known: Vec<_> = agent.kernel()?.into_iter().filter(|row| row.kind != "UnknownPort").collect();
    assert_eq!(known.len(), 6, "{known:#?}");
    for (address, name) in [("10.96.0.50", "C"), ("10.96.0.53", "A"), ("10.96.0.52", "B")] {
        assert_eq!(client.outcome(Way::Tcp, &format!("{address}:80"))?, name);
    }
    assert_ne!(client.outcome(Way::Tcp, "10.96.0.51:80")?, "A", "the old address is dead");
    Ok(())
}

#[test]
fn exactly_one_copy_of_each_program_is_attached_beside_a_foreign_one() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (node, pod) = (lab.n1(), lab.n1().pod(10)?);
    let _server = pod.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    foreign::attach(&node.host.cgroup)?;
    let Some(before) = foreign::attached(&node.host.cgroup)? else {
        skip("bpftool is missing");
        return Ok(());
    };
    assert_eq!(before.len(), 1, "{before:?}");
    let mut agent = node.agent()?;
    let (web, slice) = service("web", "10.96.0.20", &["10.244.1.10"]);
    lab.apply(&[&web, &slice])?;
    agent.until_programmed("web")?;
    let client = node.host.client()?;
    let names = |attached: &std::collections::BTreeMap<String, Vec<u64>>| attached.keys().cloned().collect::<Vec<_>>();
    let first = foreign::attached(&node.host.cgroup)?.unwrap_or_default();
    for restart in ["none", "killed", "ended", "killed again"] {
        match restart {
            "none" => {}
            "ended" => agent.terminate().and_then(|()| agent.restart())?,
            _ => agent.kill().and_then(|()| agent.restart())?,
        }
        let now = foreign::attached(&node.host.cgroup)?.unwrap_or_default();
        assert_eq!(names(&now), names(&first), "{restart}");
        assert!(now.len() > 8 && now.values().all(|ids| ids.len() == 1), "{restart}: {now:?}");
        assert!(before.iter().all(|(name, ids)| now.get(name) == Some(ids)), "{restart}: the foreign one stays");
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.20:80")?, "A", "{restart}");
    }
    Ok(())
}

/// Pinned links lead to a cgroup, and stay there.
#[test]
fn with_another_cgroup_root_the_next_agent_serves_that_one() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (node, pod) = (lab.n1(), lab.n1().pod(10)?);
    let _server = pod.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    let (web, slice) = service("web", "10.96.0.20", &["10.244.1.10"]);
    lab.apply(&[&web, &slice])?;
    let below = node.host.cgroup.join("below");
    fs::create_dir(&below)?;
    let client = node.host.client()?;
    for (root, is_served) in [(&below, false), (&node.host.cgroup, true), (&below, false)] {
        let mut agent = node.agent_at(&Paths { cgroup: root.clone(), ..node.paths().clone() })?;
        agent.until_programmed("web")?;
        let outcome = client.outcome(Way::Tcp, "10.96.0.20:80")?;
        ensure!((outcome == "A") == is_served, "the client is served through {}: {outcome}", root.display());
        agent.kill()?;
    }
    Ok(fs::remove_dir(&below)?)
}

/// Two descriptors for each device with programs are more than the usual limit on a large node.
#[test]
fn a_low_limit_of_open_files_is_raised_as_far_as_it_may_be() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let wrapper = node.paths().run.join("limited");
    fs::write(&wrapper, format!("#!/bin/sh\nulimit -Sn 40\nexec {} \"$@\"\n", program("sheave")?.display()))?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
    let agent = node.agent_built_as(&wrapper)?;
    let limits = fs::read_to_string(format!("/proc/{}/limits", agent.pid()))?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or_default();
    let mut numbers = line.split_whitespace();
    let (soft, hard) = (numbers.next(), numbers.next());
    ensure!(soft.is_some() && soft == hard, "{limits}");
    Ok(())
}
