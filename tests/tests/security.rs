//! The agent has no more power than it needs, keeps it to itself, and no object of the API makes it misuse it.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    background::Background,
    client::Way,
    fake_api::FakeApi,
    lab::Lab,
    node::Node,
    objects::{Object as _, Slice, Svc, Text},
    place::{Place, entered},
    skip,
    wait::{SOON, eventually},
};

/// Bits of capabilities.
const NET_ADMIN: u64 = 1 << 12;
const PERFMON: u64 = 1 << 38;
const BPF: u64 = 1 << 39;

/// Sysctls of the network namespace that looks.
const NETFILTER: &str = "/proc/sys/net/netfilter";

/// Ends a process that is no [`sheave_tests::agent::Agent`].
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The capabilities that each thread may use.
fn capabilities(pid: u32) -> Result<BTreeSet<u64>> {
    let mut found = BTreeSet::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        for set in ["CapEff:", "CapPrm:", "CapInh:"] {
            let hex = status.lines().find_map(|line| line.strip_prefix(set)).context("no capabilities")?;
            found.insert(u64::from_str_radix(hex.trim(), 16)?);
        }
    }
    Ok(found)
}

/// Starts a node's agent by `setpriv`, which `command` leads to, with no other capabilities than these.
fn with_capabilities(node: &Node, mut command: Command, capabilities: &str) -> Result<Ended> {
    let agent = node.paths().agent(&node.name, &node.host)?;
    command.args(["--bounding-set", &format!("-all,{capabilities}"), "--no-new-privs"]).args(entered(&agent));
    let log = fs::File::create(&node.paths().log)?;
    Ok(Ended(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?))
}

/// What the chart grants without closePodSockets suffices for both paths, and what only the start needs is given up by
/// every thread.
#[test]
fn named_capabilities_suffice_and_are_given_up_after_the_start() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    if fs::read_to_string("/proc/sys/kernel/osrelease")?.starts_with("5.10.") {
        skip("Linux 5.10 counts maps as locked memory, which takes SYS_RESOURCE");
        return Ok(());
    }
    let node = lab.n1();
    let _server = node.server(10, "A")?;
    let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP").node_port(30_020);
    lab.apply(&[&web, &Slice::new("web-1", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1")])?;
    let child = with_capabilities(node, node.host.command("setpriv")?, "+bpf,+perfmon,+net_admin")?;

    let (inside, outside) = (node.host.client()?, lab.outside.client()?);
    for (client, to) in [(&inside, "10.96.0.20:80"), (&outside, "192.0.2.11:30020")] {
        eventually(&format!("{to} works"), SOON * 3, || client.dial(Way::Tcp, to))
            .with_context(|| fs::read_to_string(&node.paths().log).unwrap_or_default())?;
    }
    // A device that comes later is served as well.
    let late = node.server(11, "B")?;
    let slice = Slice::new("web-1", "web").port("t", 8080, "TCP").ready("10.244.1.11", "n1");
    lab.apply(&[&slice])?;
    for (client, to) in [(&inside, "10.96.0.20:80"), (&outside, "192.0.2.11:30020")] {
        eventually(&format!("{to} leads to B"), SOON, || {
            ensure!(client.dial(Way::Tcp, to)?.name == "B");
            Ok(())
        })?;
    }
    drop(late);
    // SY-6: with these three, in the host's network namespace.
    if node.host.enter(|| fs::exists(format!("{NETFILTER}/nf_conntrack_max")))?? {
        let values = ["tcp_timeout_established", "tcp_timeout_close_wait", "udp_timeout"]
            .map(|name| node.host.enter(|| fs::read_to_string(format!("{NETFILTER}/nf_conntrack_{name}"))));
        let [established, close_wait, udp] = values;
        assert_eq!((established??.trim(), close_wait??.trim(), udp??.trim()), ("86400", "3600", "30"));
    } else {
        println!("without connection tracking in this kernel, nothing of it is set");
    }
    let left = capabilities(child.0.id())?;
    ensure!(left == BTreeSet::from([0, BPF | NET_ADMIN]), "{left:x?}");
    ensure!(left.iter().all(|set| set & PERFMON == 0));
    Ok(())
}

/// K07: in the chart's container an agent sees no process beside its own, and pods' namespaces by their names alone;
/// those of pods that come later, too.
#[test]
fn sockets_in_pods_are_closed_with_the_capabilities_of_the_chart() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let _servers = [node.server(10, "A")?, node.server(11, "B")?];
    let slice = |pods: &[&str]| pods.iter().fold(Slice::web("web"), |slice, pod| slice.ready(pod, "n1"));
    lab.apply(&[&Svc::web("web", "10.96.0.20"), &slice(&["10.244.1.10"])])?;
    let before = node.pod(20)?;
    let mut container = node.host.command("unshare")?;
    container.args(["--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "slave", "setpriv"]);
    let _agent = with_capabilities(node, container, "+bpf,+perfmon,+net_admin,+sys_admin")?;
    let host = node.host.client()?;
    eventually("the Service works", SOON * 3, || host.dial(Way::Udp, "10.96.0.20:80"))
        .with_context(|| fs::read_to_string(&node.paths().log).unwrap_or_default())?;
    let after = node.pod(21)?;

    for (from, pod, to, late) in
        [("a pod", &before, "10.244.1.11", "10.96.0.21"), ("a later pod", &after, "10.244.1.10", "10.96.0.22")]
    {
        let client = pod.place.client()?;
        let gone = client.connect(Way::Udp, "10.96.0.20:80")?;
        gone.ask()?;
        lab.apply(&[&slice(&[to])])?;
        eventually(&format!("{from}: the socket on the removed backend is closed"), SOON, || {
            ensure!(gone.ask().is_err(), "it is still answered");
            Ok(())
        })?;
        // Nobody translated this one; a name of its own keeps the two rounds apart.
        let early = client.connect(Way::Udp, &format!("{late}:80"))?;
        early.peer()?;
        let name = format!("late{}", pod.v4.octets()[3]);
        lab.apply(&[&Svc::web(&name, late), &Slice::web(&name).ready(to, "n1")])?;
        eventually(&format!("{from}: so is one that came before its Service"), SOON, || {
            ensure!(early.peer().is_err(), "it is still connected");
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_root_agent_keeps_no_more_than_it_can_use() -> Result<()> {
    let Some((_lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let kept: u64 =
        sheave_agent::lifecycle::privileges::KEPT.iter().map(|(capability, _)| 1 << capability.index()).sum();
    for set in capabilities(agent.pid().as_raw().cast_unsigned())? {
        ensure!(set & !kept == 0, "{set:x} is more than {kept:x}");
    }
    Ok(())
}

#[test]
fn socket_lock_and_pins_are_for_root_only() -> Result<()> {
    let Some((lab, _agent)) = Lab::with_agent()? else { return Ok(()) };
    let (paths, pins) = (lab.n1().paths(), lab.n1().pins());
    let mut checked = 0;
    let mut check = |path: PathBuf, open_to_others: u32| -> Result<()> {
        let metadata = fs::symlink_metadata(&path).with_context(|| path.display().to_string())?;
        ensure!(metadata.uid() == 0, "{} belongs to {}", path.display(), metadata.uid());
        let mode = metadata.permissions().mode() & 0o077;
        ensure!(mode & !open_to_others == 0, "{} has mode {mode:o} for others", path.display());
        checked += 1;
        Ok(())
    };
    check(paths.run.join("agent.sock"), 0)?;
    for directory in [&pins.base, &pins.root, &pins.maps(), &pins.links()] {
        check(directory.clone(), 0)?;
        for entry in fs::read_dir(directory)? {
            check(entry?.path(), 0)?;
        }
    }
    ensure!(checked > 30, "{checked} files");
    Ok(())
}

fn names(directory: &Path) -> Result<usize> {
    Ok(fs::read_dir(directory)?.count())
}

/// Objects that want too much, or what is not theirs: none crashes, stalls or hijacks.
#[test]
fn hostile_objects_do_not_crash_stall_or_hijack() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let _servers = [node.server(10, "A")?, node.server(66, "evil")?];
    let inside = node.host.client()?;
    let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP");
    lab.apply(&[&web, &Slice::new("web-1", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1")])?;
    agent.until_programmed("web")?;

    let evil = |name: &str| Slice::new(&format!("{name}-1"), name).port("t", 8080, "TCP").ready("10.244.1.66", "n1");
    let takes = |name: &str, ips: &[&str], port: u16| {
        Svc::new(name).ip("10.96.0.66").created(59).port("t", port, "TCP").set("externalIPs", json!(ips))
    };
    // CVE-2020-8554: another Service's ClusterIP, loopback, the discard address, and everything that is no host's address.
    let hijack = takes("hijack", &["10.96.0.20", "127.0.0.1", "0.0.0.0", "255.255.255.255", "224.0.0.1", "::1"], 80);
    let absurd = takes("absurd", &["not-an-ip", "1.2.3", "fe80::1%eth0", "::ffff:10.96.0.20", ""], 80);
    let ports =
        (1..=5000_u16).fold(Svc::new("ports").ip("10.96.0.67"), |svc, port| svc.port(&format!("p{port}"), port, "TCP"));
    let mut huge = Slice::new("huge-1", "huge").port("t", 8080, "TCP");
    for i in 0..5000_u32 {
        huge = huge.ready(&format!("10.200.{}.{}", i / 250, i % 250 + 1), "n9");
    }
    let long = "x".repeat(64_000);
    let named = Text {
        file: "named.yaml".to_owned(),
        text: format!(
            "{{apiVersion: v1, kind: Service, metadata: {{name: '{long}', namespace: '../../etc'}}, \
             spec: {{clusterIP: 10.96.0.68, ports: [{{port: 80, protocol: 'T\\u0000P'}}, {{port: -1}}, {{port: 99999999}}]}}}}"
        ),
    };
    let pins = names(&node.pins().maps())?;
    lab.apply(&[&hijack, &evil("hijack"), &absurd, &evil("absurd"), &named, &ports, &evil("ports")])?;
    lab.apply(&[&Svc::new("huge").ip("10.96.0.69").port("t", 80, "TCP"), &huge])?;
    eventually("everything is read", SOON * 3, || lab.settle(&agent))?;

    ensure!(inside.dial(Way::Tcp, "10.96.0.20:80")?.name == "A", "the older Service keeps its address");
    for to in ["127.0.0.1:80", "0.0.0.0:80"] {
        ensure!(inside.outcome(Way::Tcp, to)? != "evil", "{to}");
    }
    ensure!(agent.status()?.health == "ok", "{:?}", agent.status()?);
    ensure!(agent.services()?.iter().any(|service| service.name == "hijack"), "it is shown, with what is wrong");
    ensure!(names(&node.pins().maps())? == pins, "no name becomes a path");
    lab.delete(&[&hijack, &absurd, &named, &ports, &huge])?;
    lab.settle(&agent)
}

/// A Service may have a node's address, as with kube-proxy, but neither the API server nor the node's own agents: else
/// its deletion would never be learnt.
#[test]
fn no_service_takes_over_the_api_server_or_the_nodes_agents() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (node, background) = (lab.n1(), Background::start()?);
    let api = FakeApi::start_at("192.0.2.11:6443", &background, Some(&node.host), true)?;
    let kubeconfig = node.paths().run.join("kubeconfig");
    api.kubeconfig(&kubeconfig)?;
    let _server = node.server(66, "evil")?;
    let mut evil = Svc::new("evil").ip("10.96.0.66").set("externalIPs", json!(["192.0.2.11"]));
    let mut slice = Slice::new("evil-1", "evil");
    for port in [6443, 7777, 10_250, 10_256] {
        evil = evil.port(&format!("p{port}"), port, "TCP");
        slice = slice.port(&format!("p{port}"), 8080, "TCP");
    }
    api.put(&evil.text());
    api.put(&slice.ready("10.244.1.66", "n1").text());

    let mut agent = node.agent_of(&kubeconfig)?;
    let (inside, outside) = (node.host.client()?, lab.outside.client()?);
    for (from, client) in [("the host", &inside), ("outside", &outside)] {
        ensure!(client.dial(Way::Tcp, "192.0.2.11:7777")?.name == "evil", "{from}: a node's address may be had");
        for to in ["192.0.2.11:6443", "192.0.2.11:10250", "192.0.2.11:10256"] {
            ensure!(client.outcome(Way::Tcp, to)? != "evil", "{from}: {to} is taken over");
        }
    }
    let kept = |port: u16| -> Result<bool> {
        let services = agent.services()?;
        let mut frontends = services.iter().filter(|s| s.name == "evil").flat_map(|s| &s.frontends);
        let external = frontends.find(|f| f.kind == "ExternalIP" && f.port == port).context("not listed")?;
        Ok(!external.programmed
            && external.message.as_ref().is_some_and(|message| message.contains("no Service gets it")))
    };
    for (port, expected) in [(6443, true), (10_250, true), (10_256, true), (7777, false)] {
        ensure!(kept(port)? == expected, "{port}: {:?}", agent.services()?);
    }
    ensure!(agent.status()?.frontends_kept == 3, "{:?}", agent.status()?);

    agent.kill()?; // its connections with it: the next one dials anew
    agent.restart()?;
    api.delete(&evil.text());
    agent.expect("evil", &[])?;
    Ok(())
}

/// CVE-2020-8554, the operator's answer: addresses that the cluster does not own are served to nobody.
#[test]
fn external_ips_are_served_only_where_the_operator_says() -> Result<()> {
    for (flags, outcome) in [
        (&["--allow-service-external-ips=false"][..], false),
        (&["--external-ip-cidrs=198.51.100.0/24"], false),
        (&["--external-ip-cidrs=203.0.113.0/24"], true),
        (&[], true),
    ] {
        let Some(lab) = Lab::new(1)? else { return Ok(()) };
        let agent = lab.n1().agent_with(flags)?;
        let _server = lab.n1().server(10, "A")?;
        let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP").set("externalIPs", json!(["203.0.113.5"]));
        lab.apply(&[&web, &Slice::new("web-1", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1")])?;
        agent.until_programmed("web")?;
        let served = agent.kernel()?.iter().any(|row| row.address == "203.0.113.5");
        ensure!(served == outcome, "{flags:?}");
    }
    Ok(())
}

/// CVE-2020-8558: what listens on loopback only is not reached from the network, whatever Services say.
#[test]
fn loopback_is_not_reached_from_the_network() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let _server = node.server(10, "A")?;
    let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP").node_port(30_020);
    lab.apply(&[&web, &Slice::new("web-1", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1")])?;
    agent.until_programmed("web")?;
    let _secret = node.host.echo("secret", &["127.0.0.1:9999/TCP"])?;
    let route_localnet = |place: &Place, value: &str| {
        place.enter(|| fs::write("/proc/sys/net/ipv4/conf/all/route_localnet", value))?.context("route_localnet")
    };
    // The attack: neighbours that send packets for 127.0.0.1 to the node.
    for (place, route) in [(&lab.outside, "via 198.51.100.1 src 198.51.100.10"), (&lab.fabric, "via 192.0.2.11")] {
        route_localnet(place, "1")?;
        for device in ["all", "default", if place.netns == lab.outside.netns { "eth0" } else { "br0" }] {
            place.enter(|| fs::write(format!("/proc/sys/net/ipv4/conf/{device}/rp_filter"), "0"))??;
        }
        place.ip(&format!(
            "rule add pref 200 lookup local\nrule del pref 0\nrule add pref 100 to 127.0.0.1 lookup 100\nroute add 127.0.0.1/32 {route} table 100"
        ))?;
    }
    for to in ["127.0.0.1:9999", "127.0.0.1:30020"] {
        let outcome = lab.outside.client()?.outcome(Way::Tcp, to)?;
        ensure!(outcome != "secret" && outcome != "A", "{to}: {outcome}");
    }
    // With what kube-proxy used to set, the same packets arrive.
    route_localnet(&node.host, "1")?;
    ensure!(lab.outside.client()?.outcome(Way::Tcp, "127.0.0.1:9999")? == "secret", "the attack does not work at all");
    ensure!(lab.outside.client()?.outcome(Way::Tcp, "127.0.0.1:30020")? != "A", "not even then is a NodePort reached");
    Ok(())
}
