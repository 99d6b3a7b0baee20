//! Another build takes over: with other programs, with another map layout, and killed while it does.

use std::{collections::BTreeMap, fs, process::Stdio, thread, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use aya::programs::loaded_programs;
use sheave_agent::datapath::tables::pins::Pins;
use sheave_ebpf::ABI_VERSION;
use sheave_tests::{
    agent::Agent,
    client::{Client, LoadKind, Running, Way},
    foreign,
    lab::Lab,
    node::{Node, Server},
    objects::{Slice, Svc},
    other_build,
    place::Place,
    wait::{SOON, eventually},
};

const SERVICE: &str = "10.96.0.20:80";
const STICKY: &str = "10.96.0.21:80";
const NODE_PORT: &str = "192.0.2.11:30020";

/// Servers A and B behind two Services, and an agent that serves them.
struct Scene {
    lab: Lab,
    agent: Agent,
    _servers: [Server; 2],
    inside: Client,
    outside: Client,
}

impl Scene {
    fn new() -> Result<Option<Self>> {
        let Some((lab, agent)) = Lab::with_agent()? else { return Ok(None) };
        let servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
        for (name, ip, port) in [("web", "10.96.0.20", 30_020), ("sticky", "10.96.0.21", 30_021)] {
            let service = Svc::new(name).ip(ip).port("t", 80, "TCP").node_port(port);
            let service = service.port("u", 80, "UDP").node_port(port);
            let service = if name == "sticky" { service.affinity(3600) } else { service };
            let slice = Slice::new(&format!("{name}-1"), name).port("t", 8080, "TCP").port("u", 8080, "UDP");
            let slice = slice.ready("10.244.1.10", "n1").ready("10.244.1.11", "n1");
            lab.apply(&[&service, &slice])?;
            agent.until_programmed(name)?;
        }
        let (inside, outside) = (lab.n1().host.client()?, lab.outside.client()?);
        eventually("the packet path works", SOON, || outside.dial(Way::Udp, NODE_PORT))?;
        Ok(Some(Self { lab, agent, _servers: servers, inside, outside }))
    }

    fn node(&self) -> &Node {
        self.lab.n1()
    }
}

/// Dials and flows that must not fail, on both paths.
fn loads<'a>(inside: &'a Client, outside: &'a Client) -> Result<Vec<Running<'a>>> {
    let pause = Duration::from_millis(2);
    [
        (inside, Way::Tcp, LoadKind::Dial, SERVICE),
        (inside, Way::UdpSendto, LoadKind::Dial, SERVICE),
        (inside, Way::Tcp, LoadKind::Ask, SERVICE),
        (outside, Way::Tcp, LoadKind::Dial, NODE_PORT),
        (outside, Way::Tcp, LoadKind::Ask, NODE_PORT),
        (outside, Way::Udp, LoadKind::Dial, NODE_PORT),
    ]
    .into_iter()
    .map(|(client, way, kind, to)| client.load(way, kind, to, pause))
    .collect()
}

fn none_failed(loads: Vec<Running<'_>>) -> Result<()> {
    for load in loads {
        let report = load.stop()?;
        ensure!(report.failed == 0 && report.answered > 0, "{report:?}");
    }
    Ok(())
}

/// Makes the pins those of another version, as if its agent had made them.
fn pretend(node: &Node, version: u32) -> Result<Pins> {
    let (ours, theirs) = (node.pins(), node.pins().of_version(version));
    fs::rename(&ours.root, &theirs.root).with_context(|| theirs.root.display().to_string())?;
    Ok(theirs)
}

/// The program of each of the cgroup's hooks, by its id: one copy. Empty without bpftool.
fn one_program_per_hook(place: &Place) -> Result<BTreeMap<String, u64>> {
    let hooks = foreign::attached(&place.cgroup)?.unwrap_or_default();
    let one = |(hook, ids): (String, Vec<u64>)| match ids[..] {
        [id] => Ok((hook, id)),
        _ => bail!("{hook}: {ids:?}"),
    };
    hooks.into_iter().map(one).collect()
}

/// What the kernel calls the code of each program, by the program's id.
fn tags() -> BTreeMap<u64, u64> {
    loaded_programs().filter_map(|program| program.ok().map(|it| (it.id().into(), it.tag()))).collect()
}

/// An agent ends, under load, and the next one has its own programs in the same links. The code of each hook's program,
/// before and after.
fn replaced_under_load(next: impl FnOnce(&Lab) -> Result<Agent>) -> Result<Vec<[u64; 2]>> {
    let Some(mut scene) = Scene::new()? else { return Ok(Vec::new()) };
    let (inside, outside) = (&scene.inside, &scene.outside);
    let before = (scene.agent.ids()?, one_program_per_hook(&scene.node().host)?);
    let tags_before = tags();
    let loads = loads(inside, outside)?;
    scene.agent.terminate()?;
    let other = next(&scene.lab)?;
    let after = (other.ids()?, one_program_per_hook(&scene.lab.n1().host)?);
    let tags_after = tags();
    ensure!(after.0 == before.0, "{after:?}");
    ensure!(after.1.keys().eq(before.1.keys()), "the same hooks: {before:?}, {after:?}");
    ensure!(after.1.values().zip(before.1.values()).all(|(new, old)| new != old), "new ones: {before:?}, {after:?}");
    none_failed(loads)?;
    let pairs = before.1.values().zip(after.1.values());
    pairs
        .map(|(old, new)| Ok([*tags_before.get(old).context("no tag")?, *tags_after.get(new).context("no tag")?]))
        .collect()
}

/// Constants are no part of the code, but with these the verifier keeps other branches.
#[test]
fn other_constants_in_the_same_programs_go_into_the_links_under_load() -> Result<()> {
    let flags = ["--close-tcp", "--loopback-nodeports=false", "--masquerade-all"];
    for [old, new] in replaced_under_load(|lab| lab.n1().agent_with(&flags))? {
        ensure!(old == new, "the code of a program is another: {old:x}, {new:x}");
    }
    Ok(())
}

/// An upgrade: every program is another.
#[test]
fn other_programs_over_the_same_maps_go_into_the_links_under_load() -> Result<()> {
    let replaced = replaced_under_load(|lab| {
        let program = std::env::temp_dir().join(&lab.name).join("sheave");
        other_build::write(&program)?;
        lab.n1().agent_built_as(&program)
    })?;
    for [old, new] in replaced {
        ensure!(old != new, "the code of a program is the same: {old:x}");
    }
    Ok(())
}

#[test]
fn maps_that_mean_the_same_in_another_layout_are_taken_over_with_what_they_hold() -> Result<()> {
    let Some(mut scene) = Scene::new()? else { return Ok(()) };
    let node = scene.lab.n1();
    let (inside, outside) = (&scene.inside, &scene.outside);
    let ids = scene.agent.ids()?;
    let pinned = inside.dial(Way::Tcp, STICKY)?.name;
    let pinned_outside = outside.dial(Way::Tcp, "192.0.2.11:30021")?.name;
    let open = inside.connect(Way::Udp, SERVICE)?;
    let talks_to = open.ask()?.answer.name;
    let loads = loads(inside, outside)?;

    scene.agent.kill()?;
    let old = pretend(node, ABI_VERSION - 1)?;
    // A session map that changed since begins anew, and nothing else.
    fs::remove_file(old.map("CURSORS"))?;
    scene.agent.restart()?;

    ensure!(scene.agent.ids()? == ids, "every number is the same");
    ensure!(!old.root.exists(), "the old pins are gone");
    one_program_per_hook(&node.host)?;
    for _ in 0..20 {
        ensure!(inside.dial(Way::Tcp, STICKY)?.name == pinned, "affinity is kept");
        ensure!(outside.dial(Way::Tcp, "192.0.2.11:30021")?.name == pinned_outside, "on the packet path, too");
    }
    ensure!(open.ask()?.answer.name == talks_to && open.peer()? == SERVICE.parse()?, "sockets know what they dialled");
    none_failed(loads)
}

/// Of a newer version nothing is known: a downgrade fills its own tables while the newer programs serve. Sessions begin
/// anew, so that an answer may be lost which is on its way at the moment of the change: no TCP dial of a socket is.
#[test]
fn tables_that_mean_something_else_serve_until_ours_are_filled() -> Result<()> {
    for (name, version) in [("downgrade", ABI_VERSION + 1), ("the tables' layout changed", ABI_VERSION - 1)] {
        let Some(mut scene) = Scene::new()? else { return Ok(()) };
        let node = scene.lab.n1();
        let (inside, outside) = (&scene.inside, &scene.outside);
        scene.agent.kill()?;
        let old = pretend(node, version)?;
        if version < ABI_VERSION {
            fs::remove_file(old.map("FRONTENDS"))?;
        }
        let load = inside.load(Way::Tcp, LoadKind::Dial, SERVICE, Duration::from_millis(2))?;
        scene.agent.restart()?;
        eventually(name, SOON, || {
            ensure!(!old.root.exists(), "the old pins are still there:\n{}", scene.agent.log());
            Ok(())
        })?;
        ensure!(scene.agent.log().contains("its programs keep serving until ours are filled"), "{}", scene.agent.log());
        one_program_per_hook(&node.host).context(name)?;
        none_failed(vec![load]).context(name)?;
        for (client, way, to) in
            [(inside, Way::UdpSendto, SERVICE), (outside, Way::Tcp, NODE_PORT), (outside, Way::Udp, NODE_PORT)]
        {
            client.dial(way, to).with_context(|| format!("{name}: {way:?} {to}"))?;
        }
    }
    Ok(())
}

#[test]
fn killed_at_any_moment_of_an_upgrade_the_next_start_completes_it() -> Result<()> {
    let Some(mut scene) = Scene::new()? else { return Ok(()) };
    let node = scene.lab.n1();
    let (inside, outside) = (&scene.inside, &scene.outside);
    let ids = scene.agent.ids()?;
    let loads = loads(inside, outside)?;
    scene.agent.kill()?;
    let old = pretend(node, ABI_VERSION - 1)?;
    for moment in (0..30).map(|step| Duration::from_millis(step * 25)) {
        scene.agent.launch()?;
        thread::sleep(moment); // the moment of death is what varies
        scene.agent.kill()?;
        if !old.root.exists() {
            pretend(node, ABI_VERSION - 1)?; // it was through: once more
        }
    }
    scene.agent.restart()?;
    ensure!(scene.agent.ids()? == ids, "every number is the same");
    ensure!(!old.root.exists() && !node.pins().next().root.exists(), "nothing is left of the way");
    none_failed(loads)
}

/// Two pods of a rolling update may overlap: one of them does it, the other refuses and changes nothing.
#[test]
fn of_two_agents_that_start_an_upgrade_together_one_does_it() -> Result<()> {
    let Some(mut scene) = Scene::new()? else { return Ok(()) };
    let node = scene.lab.n1();
    let (inside, outside) = (&scene.inside, &scene.outside);
    let ids = scene.agent.ids()?;
    let loads = loads(inside, outside)?;
    scene.agent.kill()?;
    for _ in 0..3 {
        let old = pretend(node, ABI_VERSION - 1)?;
        scene.agent.launch()?;
        let mut rival =
            node.paths().agent(&node.name, &node.host)?.stdin(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let rival_lost =
            eventually("one of them gives up", SOON, || match (rival.try_wait()?, scene.agent.is_running()?) {
                (Some(_), true) => Ok(true),
                (None, false) => Ok(false),
                both => bail!("{both:?}"),
            });
        if let Ok(true) = rival_lost {
            scene.agent.ready()?;
        }
        eventually("the upgrade is through", SOON, || {
            ensure!(!old.root.exists());
            Ok(())
        })?;
        ensure!(scene.agent.ids()? == ids, "every number is the same");
        one_program_per_hook(&node.host)?;
        rival.kill()?;
        rival.wait()?;
        scene.agent.kill()?;
        rival_lost?;
    }
    scene.agent.restart()?;
    none_failed(loads)
}
