//! The packet path in time: devices come and go, the agent dies and returns, everything is taken away again.

use std::{fs, net::IpAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use sheave_agent::{datapath::programs::tc::is_tcx_there, options::TcAttach};
use sheave_tests::{
    client::{LoadKind, Way},
    foreign,
    lab::Lab,
    node::{Node, Pod},
    objects::{Slice, Svc},
    place::program,
    wait::{SOON, eventually},
};

/// A NodePort service of a pod of n1.
fn serve(lab: &Lab, number: u16, pod: &Pod) -> Result<()> {
    let name = format!("web{number}");
    let service = Svc::new(&name).ip(&format!("10.96.0.{number}"));
    let service =
        service.port("t", 80, "TCP").node_port(30_000 + number).port("u", 80, "UDP").node_port(30_000 + number);
    let slice = Slice::new(&name, &name).port("t", 8080, "TCP").port("u", 8080, "UDP");
    lab.apply(&[&service, &slice.ready(&pod.v4.to_string(), "n1")])
}

fn slice(pod: &Pod) -> Slice {
    Slice::new("web", "web").port("t", 8080, "TCP").ready(&pod.v4.to_string(), "n1")
}

fn links(node: &Node) -> Result<Vec<String>> {
    let directory = node.pins().links();
    let names = fs::read_dir(&directory).with_context(|| directory.display().to_string())?;
    Ok(names.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).filter(|n| n.starts_with("tc_")).collect())
}

#[test]
fn devices_are_followed_as_they_come_and_go() -> Result<()> {
    let Some((lab, _agent)) = Lab::with_agent()? else { return Ok(()) };
    let outside = lab.outside.client()?;
    let before = links(lab.n1())?.len();
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["8080/TCP", "8080/UDP"])?;
    serve(&lab, 1, &pod)?;
    for way in [Way::Tcp, Way::Udp] {
        eventually("the new pod is reached", SOON, || outside.dial(way, "192.0.2.11:30001"))?;
    }
    eventually("its links are there", SOON, || {
        ensure!(links(lab.n1())?.len() == before + 2, "{:?}", links(lab.n1())?);
        Ok(())
    })?;
    lab.n1().remove(pod)?;
    eventually("its links are gone", SOON, || {
        let left = links(lab.n1())?;
        ensure!(left.len() == before, "{left:?}");
        Ok(())
    })
}

/// Every packet of a pod pays for a program on its device: there is none while no client outside can need it.
#[test]
fn workload_devices_have_programs_only_while_they_may_hide_a_client() -> Result<()> {
    let Some((lab, _agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["8080/TCP", "8080/UDP"])?;
    let has = |wanted: usize| {
        eventually(&format!("programs on the pod's device: {wanted}"), SOON, || {
            let found = lab.n1().by_tcx("pod10")?;
            ensure!(found == wanted, "{found}");
            Ok(())
        })
    };
    let inside = || lab.apply(&[&Svc::new("web").ip("10.96.0.7").port("t", 80, "TCP"), &slice(&pod)]);
    inside()?;
    eventually("the service is there", SOON, || lab.n1().host.client()?.dial(Way::Tcp, "10.96.0.7:80"))?;
    has(0)?;

    let outside = lab.outside.client()?;
    let both = || lab.apply(&[&Svc::new("web").ip("10.96.0.7").port("t", 80, "TCP").node_port(30_007), &slice(&pod)]);
    both()?;
    has(2)?;
    inside()?;
    has(0)?;

    // A ClusterIP is for the cluster, but whoever is routed to it is served (FLOW-3), and hidden as soon as can be.
    lab.route("10.96.0.0/16", lab.n1())?;
    assert_eq!(outside.dial(Way::Tcp, "10.96.0.7:80")?.name, "a", "the first connection is served at once");
    has(2)?;
    both()?;
    eventually("the NodePort answers", SOON, || outside.dial(Way::Tcp, "192.0.2.11:30007"))?;
    for frontend in ["10.96.0.7:80", "192.0.2.11:30007"] {
        let seen = outside.dial(Way::Tcp, frontend)?.client.ip();
        assert_eq!(seen, "10.244.1.1".parse::<IpAddr>()?, "{frontend}: the client is hidden");
    }
    Ok(())
}

/// Invariant 2 and 5: killed and started again under load, nothing fails and no second copy runs.
#[test]
fn a_restart_is_not_noticed_and_leaves_one_copy_of_each_program() -> Result<()> {
    for (flags, tcx, filters) in [(&[][..], 2, 0), (&["--tc-attach", "clsact"], 0, 2)] {
        let Some(lab) = Lab::new(1)? else { return Ok(()) };
        let pod = lab.n1().pod(10)?;
        let _server = pod.place.echo("a", &["8080/TCP", "8080/UDP"])?;
        serve(&lab, 1, &pod)?;
        let mut agent = lab.n1().agent_with(flags)?;
        let outside = lab.outside.client()?;
        let asks = outside.load(Way::Tcp, LoadKind::Ask, "192.0.2.11:30001", Duration::from_millis(2))?;
        let dials = outside.load(Way::Tcp, LoadKind::Dial, "192.0.2.11:30001", Duration::from_millis(2))?;
        let datagrams = outside.load(Way::Udp, LoadKind::Dial, "192.0.2.11:30001", Duration::from_millis(2))?;
        for _ in 0..2 {
            agent.kill()?;
            assert_eq!(outside.dial(Way::Tcp, "192.0.2.11:30001")?.name, "a", "{flags:?}: while no agent runs");
            agent.restart()?;
        }
        for (name, load) in [("one connection", asks), ("connections", dials), ("datagrams", datagrams)] {
            let report = load.stop()?;
            assert!(report.failed == 0 && report.answered > 20, "{flags:?}, {name}: {report:?}");
        }
        for device in ["eth0", "pod10"] {
            // The kernel takes a link off a while after its pin is gone.
            eventually("one copy", SOON, || {
                let found = (lab.n1().by_tcx(device)?, lab.n1().by_filter(device)?);
                ensure!(found == (tcx, filters), "{flags:?} {device}: {found:?}");
                Ok(())
            })?;
        }
    }
    Ok(())
}

/// From one way of attaching to the other and back: never two copies.
#[test]
fn another_way_of_attaching_takes_over_from_the_first() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("a", &["8080/TCP", "8080/UDP"])?;
    serve(&lab, 1, &pod)?;
    let outside = lab.outside.client()?;
    for (flags, tcx, filters) in
        [(&[][..], 2, 0), (&["--tc-attach", "clsact"], 0, 2), (&[], 2, 0), (&["--packet-path=false"], 0, 0)]
    {
        let mut agent = lab.n1().agent_with(flags)?;
        // The kernel detaches a link whose last pin went in its own time.
        eventually(&format!("{flags:?}"), SOON, || {
            let served = outside.dial(Way::Tcp, "192.0.2.11:30001").is_ok();
            ensure!(served == (tcx + filters > 0), "served: {served}");
            for device in ["eth0", "pod10"] {
                let found = (lab.n1().by_tcx(device)?, lab.n1().by_filter(device)?);
                ensure!(found == (tcx, filters), "{device}: {found:?}");
            }
            Ok(())
        })?;
        agent.terminate()?;
    }
    Ok(())
}

/// ADR 9: programs that end the chain, though they were there before the agent, do not switch ours off.
#[test]
fn programs_of_others_that_let_nobody_see_a_packet_come_after_ours() -> Result<()> {
    let by_tcx = is_tcx_there().then_some((&[][..], TcAttach::Auto));
    for (flags, by) in by_tcx.into_iter().chain([(&["--tc-attach", "clsact"][..], TcAttach::Clsact)]) {
        let Some(lab) = Lab::new(1)? else { return Ok(()) };
        let node = lab.n1();
        let bpffs = &node.paths().bpffs;
        let foreign = |device: &'static str| {
            let pin = bpffs.join(format!("foreign-{device}"));
            node.host.enter(move || foreign::classify(device, by, &pin))?
        };
        let pod = node.pod(10)?;
        let _server = pod.place.echo("a", &["8080/TCP", "8080/UDP"])?;
        serve(&lab, 1, &pod)?;
        ["eth0", "pod10"].into_iter().try_for_each(foreign)?;
        let _agent = node.agent_with(flags)?;
        let outside = lab.outside.client()?;
        for way in [Way::Tcp, Way::Udp] {
            let seen = outside.dial(way, "192.0.2.11:30001")?;
            assert_eq!(seen.name, "a", "{flags:?}, {way:?}: they were there before");
            assert_eq!(seen.client.ip(), IpAddr::from([10, 244, 1, 1]), "{flags:?}, {way:?}: the client is hidden");
        }
    }
    Ok(())
}

/// We are a guest: others' filters stay when we go.
#[test]
fn cleanup_takes_ours_and_leaves_theirs() -> Result<()> {
    for flags in [&[][..], &["--tc-attach", "clsact"]] {
        let Some(lab) = Lab::new(1)? else { return Ok(()) };
        let pod = lab.n1().pod(10)?;
        let _server = pod.place.echo("a", &["8080/TCP", "8080/UDP"])?;
        serve(&lab, 1, &pod)?;
        let node = lab.n1();
        let pin = node.paths().bpffs.join("foreign");
        node.host.enter(move || foreign::classify("eth0", TcAttach::Clsact, &pin))??;
        let mut agent = node.agent_with(flags)?;
        let outside = lab.outside.client()?;
        assert_eq!(outside.dial(Way::Tcp, "192.0.2.11:30001")?.name, "a", "{flags:?}");
        agent.terminate()?;

        let bpffs = node.paths().bpffs.to_string_lossy().into_owned();
        let run = node.paths().run.to_string_lossy().into_owned();
        node.host.run(program("sheave")?, &["cleanup", "--bpffs", &bpffs, "--run-dir", &run])?;
        for device in ["eth0", "pod10"] {
            assert_eq!((node.by_tcx(device)?, node.by_filter(device)?), (0, 0), "{flags:?} {device}");
        }
        let left = node.host.run("tc", &["filter", "show", "dev", "eth0", "ingress"])?;
        assert!(left.contains("handle 0x7"), "{flags:?}: {left}");
        assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:30001")?, "ECONNREFUSED", "nobody serves it any more");
    }
    Ok(())
}
