//! What every supported kernel does, and what older ones do instead (`docs/kernel.md`). Runs on this host, and in a
//! virtual machine of each kernel of `kernels.toml`: `cargo xtask vm`. Few tests and few agents, since software
//! emulation is ten times slower.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use sheave_agent::datapath::programs::probe::KernelVersion;
use sheave_tests::{
    agent::Agent,
    client::{LoadKind, Way},
    lab::Lab,
    monitor::Monitor,
    node::Node,
    objects::{Slice, Svc},
    pair::{N1, N1_6, N1_6_UPLINK, N1_UPLINK, OUTSIDE, OUTSIDE6, Pair, WAYS, reaches},
    place::program,
    transfer::{reached, serve_near_far_seen},
    wait::{SOON, eventually},
};

/// Nothing answers: long enough to be sure.
const SILENCE: Duration = Duration::from_secs(1);

/// The version of the running kernel.
fn kernel() -> Result<KernelVersion> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    KernelVersion::parse(&release).with_context(|| format!("{release} names no version"))
}

/// A Service "web" with a node port, and its slices of both families with pod 10 of n1.
fn web() -> (Svc, [Slice; 2]) {
    let service = Svc::new("web").ip("10.96.0.20").ip("2001:db8:f::20").set("type", json!("NodePort"));
    let service = service.port("t", 80, "TCP").node_port(30020).port("u", 80, "UDP").node_port(30020);
    let slices = [("4", "10.244.1.10"), ("6", "2001:db8:1::10")].map(|(family, address)| {
        let slice = Slice::new(&format!("web-{family}"), "web").port("t", 8080, "TCP").port("u", 8080, "UDP");
        slice.ready(address, "n1")
    });
    (service, slices)
}

/// The agent says which features it misses, and they are those that `docs/kernel.md` lists for this kernel; `check` says
/// the same.
fn features_are_those_of(kernel: KernelVersion, agent: &Agent, node: &Node) -> Result<()> {
    let since = |major, minor| kernel >= KernelVersion(major, minor);
    let expected = [
        ("set-retval", since(5, 18)),
        ("netns-cookie", since(5, 14)),
        ("mptcp", since(5, 19) || !Path::new("/proc/sys/net/mptcp").exists()),
        ("discard-route", true),
        ("checksum-ipv6", since(6, 16)),
        ("current-task", true),
        ("tcx", since(6, 6)),
        ("classifiers", true),
    ];
    let expected = expected.map(|(name, available)| (name.to_owned(), available)).to_vec();
    let said = agent.status()?.features.into_iter().map(|feature| (feature.name, feature.available));
    assert_eq!(said.collect::<Vec<_>>(), expected, "status on {kernel:?}");
    let cgroup = node.host.cgroup.to_string_lossy();
    let bpffs = node.paths().bpffs.to_string_lossy();
    let args = ["check", "--bpffs", &bpffs, "--cgroup-root", &cgroup, "-o", "json"];
    let findings: Value = serde_json::from_str(&node.host.run(program("sheave")?, &args)?)?;
    for (name, available) in expected {
        let finding =
            findings["items"].as_array().into_iter().flatten().find(|finding| finding["name"] == name.as_str());
        let status = &finding.with_context(|| format!("check says nothing of {name}"))?["status"];
        assert_eq!(status, if available { "ok" } else { "warn" }, "check on {kernel:?}: {name}");
    }
    Ok(())
}

#[test]
fn sockets_are_served() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let kernel = kernel()?;
    let node = lab.n1();
    let (a, _b) = (node.server(10, "A")?, node.server(11, "B")?);
    let (service, slices) = web();
    let empty = Svc::web("empty", "10.96.0.21");
    let local = Svc::web("local", "10.96.0.22").set("internalTrafficPolicy", json!("Local"));
    let elsewhere = Slice::web("local").ready("10.244.2.10", "n2");
    lab.apply(&[&service, &slices[0], &slices[1], &empty, &local, &elsewhere])?;
    let mut agent = node.agent_with(&["--packet-path=false"])?; // loads in a tenth of the time
    features_are_those_of(kernel, &agent, node)?;

    let pod = node.pod(20)?;
    let (mut host, mut inside) = (node.host.client()?, pod.place.client()?);
    (host.patience, inside.patience) = (SILENCE, SILENCE);
    let refused = if kernel >= KernelVersion(5, 18) { "ECONNREFUSED" } else { "EPERM" };
    let loopback = if kernel >= KernelVersion(5, 14) { "A" } else { "ECONNREFUSED" };
    let cluster_ips = ["10.96.0.20:80", "[2001:db8:f::20]:80", "[::ffff:10.96.0.20]:80"];
    for (from, client) in [("the host", &host), ("a pod", &inside)] {
        for way in Way::ALL {
            for to in cluster_ips.into_iter().chain(["192.0.2.11:30020"]) {
                let dialled = client.dial(way, to).with_context(|| format!("{from}, {way:?} to {to}"))?;
                assert_eq!((dialled.name.as_str(), dialled.peer.to_string().as_str()), ("A", to), "{from}, {way:?}");
            }
            assert_eq!(client.outcome(way, "10.96.0.21:80")?, refused, "{from}, {way:?}: no endpoint");
        }
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.22:80")?, "TIMEOUT", "{from}: no endpoint on this node");
    }
    assert_eq!(host.outcome(Way::Tcp, "127.0.0.1:30020")?, loopback, "a node port on loopback");
    assert_eq!(inside.outcome(Way::Tcp, "127.0.0.1:30020")?, "ECONNREFUSED", "a pod's loopback is its own");
    let taken = "0.0.0.0:30020".parse()?;
    let bound = host.open(Way::Udp, taken, Some(taken)).map(drop);
    assert_eq!(bound.is_err(), kernel >= KernelVersion(5, 14), "F40: a node port is bound by the host: {bound:?}");

    // Case 17: endpoints come, and go again.
    for (phase, slice, outcome) in [
        ("not ready", Slice::web("empty").not_ready("10.244.1.10", "n1"), refused),
        ("ready", Slice::web("empty").ready("10.244.1.10", "n1"), "A"),
        ("gone", Slice::web("empty"), refused),
    ] {
        lab.apply(&[&slice])?;
        lab.settle(&agent)?;
        assert_eq!(inside.outcome(Way::Tcp, "10.96.0.21:80")?, outcome, "case 17, {phase}");
    }

    // The agent dies; its programs go on. The next one finds everything and adopts it.
    let kept = inside.connect(Way::Tcp, cluster_ips[0])?;
    let before = agent.ids()?;
    agent.kill()?;
    assert_eq!(inside.outcome(Way::Tcp, cluster_ips[0])?, "A", "without an agent");
    agent.restart()?;
    assert_eq!(agent.ids()?, before, "ids after a restart");
    assert_eq!(kept.ask()?.answer.name, "A");
    assert_eq!(kept.peer()?.to_string(), cluster_ips[0]);

    // A connected UDP socket follows its Service to another backend.
    let load = inside.load(Way::Udp, LoadKind::Ask, cluster_ips[0], Duration::from_millis(50))?;
    for (name, backend) in [("A", a.pod.v4.to_string()), ("B", "10.244.1.11".to_owned())] {
        let slice = Slice::new("web-4", "web").port("t", 8080, "TCP").port("u", 8080, "UDP").ready(&backend, "n1");
        lab.apply(&[&slice])?;
        eventually(&format!("{name} answers"), SOON, || {
            let report = load.report()?;
            ensure!(report.names.contains_key(name), "{report:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// One agent for all of it: under emulation, the verifier's look at the packet programs takes longer than everything
/// that is done with them.
#[test]
fn packets_from_outside_are_served() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let Pair { lab, a, b, .. } = &pair;
    pair.service("here", 41, &[a], |s| s)?;
    pair.service("there", 42, &[b], |s| s)?;
    let local = |s: Svc| s.set("externalTrafficPolicy", json!("Local"));
    pair.service("shown", 43, &[a], local)?;
    pair.service("none", 44, &[], |s| s)?;
    pair.service("away", 45, &[b], local)?;
    let for_range = |address: &'static str, range: &'static str| {
        let ranges = json!([range]);
        move |s: Svc| s.ingress(address, "VIP").set("loadBalancerSourceRanges", ranges.clone())
    };
    pair.service("open", 46, &[a], for_range("203.0.113.1", "198.51.100.0/24"))?;
    pair.service("shut", 47, &[a], for_range("203.0.113.2", "192.0.2.0/25"))?;
    pair.service("sticky", 48, &[a, b], |s| s.affinity(600))?;
    serve_near_far_seen(lab, a, b)?;
    let mut agent = lab.n1().agent()?;
    let (mut outside, inside) = (lab.outside.client()?, lab.n1().pod(30)?.place.client()?);

    for way in WAYS {
        for (to, name, seen) in [
            ("192.0.2.11:30041", "a", N1),
            ("[2001:db8::11]:30041", "a", N1_6),
            ("192.0.2.11:30042", "b", N1_UPLINK),
            ("[2001:db8::11]:30042", "b", N1_6_UPLINK),
            ("192.0.2.11:30043", "a", OUTSIDE),
            ("[2001:db8::11]:30043", "a", OUTSIDE6),
        ] {
            reaches(&outside, way, to, &[(name, seen)])?;
        }
        for (to, outcome) in [
            ("192.0.2.11:30044", "ECONNREFUSED"),
            ("[2001:db8::11]:30044", "ECONNREFUSED"),
            ("192.0.2.11:30045", "TIMEOUT"),
            ("203.0.113.1:80", "a"),
            ("203.0.113.2:80", "TIMEOUT"),
        ] {
            outside.patience = if outcome == "a" { SOON } else { SILENCE };
            let said = if outcome == "ECONNREFUSED" { outside.refusal(way, to)? } else { outside.outcome(way, to)? };
            assert_eq!(said, outcome, "{way:?} to {to}");
        }
        for (who, client, to) in [("outside", &outside, "192.0.2.11:30048"), ("a pod", &inside, "10.96.0.48:80")] {
            assert_eq!(client.dial_many(way, to, 10)?.len(), 1, "{who} stays with its backend, {way:?}");
        }
    }

    // Case 17: an endpoint comes, and goes again.
    for (phase, backends, outcome) in [("ready", &[a][..], "a"), ("gone", &[], "ECONNREFUSED")] {
        pair.service("none", 44, backends, |s| s)?;
        lab.settle(&agent)?;
        outside.patience = if outcome == "a" { SOON } else { SILENCE };
        for way in WAYS {
            assert_eq!(outside.refusal(way, "192.0.2.11:30044")?, outcome, "case 17, {phase}, {way:?}");
        }
    }

    outside.patience = SOON;
    let mut monitor = Monitor::start(lab.n1(), &agent, &[])?;
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:30044")?, "ECONNREFUSED");
    let told = monitor.line()?;
    assert_eq!([&told[0], &told[3], &told[5]], ["reject", "192.0.2.11:30044", "t/none"], "{told:?}");
    assert_eq!(monitor.end(Signal::SIGINT)?, "");

    // The agent dies; its programs go on. The next one finds them on the devices, by tcx or as filters, and doubles none.
    let kept = outside.connect(Way::Tcp, "192.0.2.11:30041")?;
    assert_eq!(kept.ask()?.answer.name, "a");
    agent.kill()?;
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:30041")?, "a", "without an agent");
    agent.restart()?;
    assert_eq!(kept.ask()?.answer.name, "a", "an open connection after a restart");
    let has_tcx = kernel()? >= KernelVersion(6, 6);
    for device in ["eth0", "pod10"] {
        // The kernel takes a link off a while after its pin is gone.
        eventually("one copy of each program", SOON, || {
            let by_tcx = if has_tcx { lab.n1().by_tcx(device)? } else { 0 };
            let found = (by_tcx, lab.n1().by_filter(device)?);
            ensure!(found == if has_tcx { (2, 0) } else { (0, 2) }, "{device}: {found:?}");
            Ok(())
        })?;
    }
    drop(kept);

    // Fragments, and links that are smaller than both ends believe, see packets_real.rs.
    lab.n1().host.ip("link set pod10 mtu 1320")?;
    lab.n2().host.ip("link set pod20 mtu 1320")?;
    lab.fabric.ip("link set outside mtu 1316")?;
    reached(lab, a, b)
}
