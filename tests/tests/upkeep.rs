//! What somebody takes away behind the agent's back is put back, and what holds meanwhile does not fail.

use std::{fs, path::Path, time::Duration};

use anyhow::{Result, ensure};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use sheave_tests::{
    agent::Agent,
    client::{Client, LoadKind, Running, Way},
    foreign, http,
    lab::Lab,
    node::{Node, Server},
    objects::{Slice, Svc},
    wait::eventually,
};

/// The agent looks every two seconds; a look at a busy machine takes its time.
const NOTICED: Duration = Duration::from_secs(30);

const SERVICE: &str = "10.96.0.20:80";
const NODE_PORT: &str = "192.0.2.11:30020";

/// A Service of one pod of n1, by ClusterIP and NodePort.
fn serve(lab: &Lab) -> Result<Server> {
    let server = lab.n1().server(10, "A")?;
    publish(lab)?;
    Ok(server)
}

/// The Service of the pod that is there already.
fn publish(lab: &Lab) -> Result<()> {
    let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP").node_port(30_020);
    let web = web.port("u", 80, "UDP").node_port(30_020);
    let slice = Slice::new("web-1", "web").port("t", 8080, "TCP").port("u", 8080, "UDP");
    lab.apply(&[&web, &slice.ready("10.244.1.10", "n1")])
}

/// Dials that must not fail, from a pod's host and from outside.
fn loads<'a>(inside: &'a Client, outside: &'a Client) -> Result<Vec<Running<'a>>> {
    [(inside, Way::Tcp, SERVICE), (inside, Way::UdpSendto, SERVICE), (outside, Way::Tcp, NODE_PORT)]
        .into_iter()
        .map(|(client, way, to)| client.load(way, LoadKind::Dial, to, Duration::from_millis(2)))
        .collect()
}

/// How often a part was put back, as `status` says.
fn repairs(agent: &Agent, part: &str) -> Result<u64> {
    Ok(agent.status()?.repairs.get(part).copied().unwrap_or_default())
}

fn index(node: &Node, device: &str) -> Result<u32> {
    let text = node.host.run("ip", &["-o", "link", "show", "dev", device])?;
    Ok(text.split(':').next().unwrap_or_default().trim().parse()?)
}

/// Name, part, what is done.
type Case<'a> = (&'a str, &'a str, &'a dyn Fn() -> Result<()>);

#[test]
fn what_is_taken_away_is_put_back_counted_and_told_once() -> Result<()> {
    for flags in [&[][..], &["--tc-attach", "clsact"]] {
        let Some(lab) = Lab::new(1)? else { return Ok(()) };
        let node = lab.n1();
        let _server = serve(&lab)?;
        let agent = node.agent_with(flags)?;
        let (inside, outside) = (node.host.client()?, lab.outside.client()?);
        let works = || -> Result<()> {
            for (client, way, to) in [
                (&inside, Way::Tcp, SERVICE),
                (&inside, Way::UdpSendto, SERVICE),
                (&outside, Way::Tcp, NODE_PORT),
                (&outside, Way::Udp, NODE_PORT),
            ] {
                ensure!(client.dial(way, to)?.name == "A", "{way:?} {to}");
            }
            Ok(())
        };
        eventually("it works", NOTICED, works)?;
        let pins = node.pins();
        let detach = |name: &str| foreign::detach(&pins.link(name));
        let eth0 = index(node, "eth0")?;
        let by_tcx: [Case<'_>; 2] = [
            ("a device's link is detached", "device-programs", &|| foreign::detach(&pins.device_link(eth0, "in"))),
            ("a device's pin is removed", "pin", &|| Ok(fs::remove_file(pins.device_link(eth0, "out"))?)),
        ];
        let by_clsact: [Case<'_>; 2] = [
            ("the qdisc is deleted", "device-programs", &|| tc(node, &["qdisc", "del", "dev", "eth0", "clsact"])),
            ("one filter is deleted", "device-programs", &|| tc(node, &["filter", "del", "dev", "eth0", "egress"])),
        ];
        let common: [Case<'_>; 7] = [
            ("a program of the cgroup is detached", "cgroup-program", &|| detach("connect4")),
            ("another", "cgroup-program", &|| detach("sendmsg4")),
            ("a map's pin is removed", "pin", &|| Ok(fs::remove_file(pins.map("NAMES"))?)),
            ("every pin is removed", "pin", &|| Ok(fs::remove_dir_all(&pins.base)?)),
            ("the run directory is removed", "agent-socket", &|| Ok(fs::remove_dir_all(&node.paths().run)?)),
            ("the discard device is deleted", "discard-device", &|| node.host.ip("link del sheave-drop")),
            ("its route is deleted", "discard-device", &|| node.host.ip("route del 192.0.0.8 dev sheave-drop")),
        ];
        for (name, part, take_away) in common.iter().chain(if flags.is_empty() { &by_tcx } else { &by_clsact }) {
            let before = repairs(&agent, part)?;
            let complaints = complaints(&agent);
            take_away()?;
            eventually(name, NOTICED, || {
                ensure!(repairs(&agent, part)? > before, "{part} was not put back");
                works()
            })?;
            let told = complaints_since(&agent, complaints);
            ensure!((1..=2).contains(&told.len()), "{name}: told once for each part: {told:?}");
        }
        let metrics = http::get(&node.host, "127.0.0.1:10249", "/metrics")?.body;
        ensure!(metrics.contains("sheave_repairs_total{part=\"cgroup-program\"} 2"), "{metrics}");
        let files: Vec<_> = fs::read_dir(pins.maps())?.collect();
        ensure!(files.len() == sheave_ebpf::maps::ALL.len(), "every pin is back: {files:?}");
    }
    Ok(())
}

fn tc(node: &Node, args: &[&str]) -> Result<()> {
    node.host.run("tc", args).map(drop)
}

fn complaints(agent: &Agent) -> usize {
    complaints_since(agent, 0).len()
}

fn complaints_since(agent: &Agent, known: usize) -> Vec<String> {
    agent
        .log()
        .lines()
        .filter(|line| line.contains("something else removed this"))
        .skip(known)
        .map(str::to_owned)
        .collect()
}

/// A bpffs that is emptied, taken away or made read-only is the agent's trouble, not the traffic's.
#[test]
fn a_lost_bpffs_is_not_noticed_by_traffic_and_the_next_agent_adopts_what_was_put_back() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let _server = serve(&lab)?;
    agent.until_programmed("web")?;
    let ids = agent.ids()?;
    let (inside, outside) = (node.host.client()?, lab.outside.client()?);
    eventually("it works", NOTICED, || outside.dial(Way::Tcp, NODE_PORT))?;
    let loads = loads(&inside, &outside)?;
    let bpffs = &node.paths().bpffs;

    fs::remove_dir_all(node.pins().base)?;
    eventually("wiped: all is back", NOTICED, || {
        ensure!(agent.ids()? == ids);
        ensure!(repairs(&agent, "pin")? > 0);
        Ok(())
    })?;

    umount2(bpffs, MntFlags::MNT_DETACH)?;
    complains(&agent, "unmounted: the agent says so")?;
    mount(Some("bpf"), bpffs, Some("bpf"), MsFlags::empty(), None::<&str>)?;
    is_well(&agent, "mounted again: all is back")?;
    ensure!(agent.ids()? == ids);

    read_only(bpffs, true)?;
    let pod = node.pod(11)?; // a device that comes now is served all the same
    complains(&agent, "read-only: a new device's link cannot be pinned")?;
    let client = pod.place.client()?;
    ensure!(client.dial(Way::Tcp, SERVICE)?.name == "A");
    agent.kill()?;
    agent.launch()?;
    eventually("read-only: the next agent refuses", NOTICED, || {
        ensure!(!agent.is_running()?);
        Ok(())
    })?;
    ensure!(agent.log().contains("read-only"), "{}", agent.log());
    read_only(bpffs, false)?;
    agent.restart()?;
    ensure!(agent.ids()? == ids, "adopted");

    for load in loads {
        let report = load.stop()?;
        ensure!(report.failed == 0 && report.answered > 0, "{report:?}");
    }
    Ok(())
}

fn complains(agent: &Agent, what: &str) -> Result<()> {
    eventually(what, NOTICED, || {
        let status = agent.status()?;
        ensure!(status.health == "degraded", "{status:?}");
        ensure!(status.problems.iter().any(|p| p.contains("cannot be put in its place: pin")), "{status:?}");
        Ok(())
    })
}

fn is_well(agent: &Agent, what: &str) -> Result<()> {
    eventually(what, NOTICED, || {
        let status = agent.status()?;
        ensure!(status.health == "ok" && status.problems.is_empty(), "{status:?}");
        Ok(())
    })
}

fn read_only(bpffs: &Path, on: bool) -> Result<()> {
    let flags = if on { MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY } else { MsFlags::MS_REMOUNT };
    Ok(mount(None::<&str>, bpffs, None::<&str>, flags, None::<&str>)?)
}

/// What stands in the way of a device's programs is told until it is gone: then clients are served.
#[test]
fn a_device_that_cannot_have_its_programs_is_a_problem_until_it_has() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let _server = node.server(10, "A")?;
    let agent = node.agent_with(&["--tc-attach", "clsact"])?; // a pod's device has no programs yet
    tc(node, &["qdisc", "add", "dev", "pod10", "ingress"])?;
    publish(&lab)?;
    let outside = lab.outside.client()?;
    eventually("the agent says so", NOTICED, || {
        let status = agent.status()?;
        let is_told = |p: &String| p.contains("device-programs pod10") && p.contains("a qdisc `ingress`");
        ensure!(status.health == "degraded" && status.problems.iter().any(is_told), "{status:?}");
        Ok(())
    })?;
    let metrics = http::get(&node.host, "127.0.0.1:10249", "/metrics")?.body;
    ensure!(metrics.contains("sheave_problems 1"), "{metrics}");
    tc(node, &["qdisc", "del", "dev", "pod10", "ingress"])?;
    is_well(&agent, "it has them")?;
    ensure!(outside.dial(Way::Tcp, NODE_PORT)?.name == "A");
    Ok(())
}
