//! What a program sees on its sockets: where it lands, and that the other side seems to be the Service.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount, umount};
use sheave_tests::{
    client::{Client, Way},
    lab::Lab,
    node::Node,
    objects::{Slice, Svc},
    skip,
    wait::{SOON, eventually},
};

/// All ways to talk.
const WAYS: [Way; 3] = [Way::Tcp, Way::Udp, Way::UdpSendto];

/// A dual-stack Service of TCP and UDP port 53 with one backend in each family.
fn dual(name: &str, v4: &str, v6: &str) -> (Svc, [Slice; 2]) {
    let service = Svc::new(name).ip(v4).ip(v6).port("t", 53, "TCP").port("u", 53, "UDP");
    let slices = [("4", "10.244.1.10"), ("6", "2001:db8:1::10")].map(|(family, address)| {
        let slice = Slice::new(&format!("{name}-{family}"), name).port("t", 8080, "TCP").port("u", 8080, "UDP");
        slice.ready(address, "n1")
    });
    (service, slices)
}

/// The lines of [`dual`].
fn dual_lines(v4: &str, v6: &str) -> [String; 4] {
    [
        format!("{v4}:53/TCP → 10.244.1.10:8080"),
        format!("{v4}:53/UDP → 10.244.1.10:8080"),
        format!("[{v6}]:53/TCP → [2001:db8:1::10]:8080"),
        format!("[{v6}]:53/UDP → [2001:db8:1::10]:8080"),
    ]
}

#[test]
fn every_way_to_talk_reaches_a_cluster_ip_from_every_place() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (backend, pod, far) = (lab.n1().pod(10)?, lab.n1().pod(20)?, lab.n2().pod(30)?);
    let _server = backend.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    let (service, [four, six]) = dual("web", "10.96.0.20", "2001:db8:f::20");
    lab.apply(&[&service, &four, &six])?;
    let lines = dual_lines("10.96.0.20", "2001:db8:f::20");
    let agents = lab.nodes.iter().map(Node::agent).collect::<Result<Vec<_>>>()?;
    for agent in &agents {
        agent.expect("web", &lines.each_ref().map(String::as_str))?;
    }
    let places = [
        ("a pod", &pod.place),
        ("the node", &lab.n1().host),
        ("a pod on another node", &far.place),
        ("another node", &lab.n2().host),
        ("the backend itself", &backend.place), // F20: hairpin
    ];
    for (from, place) in places {
        let client = place.client()?;
        for to in ["10.96.0.20:53", "[2001:db8:f::20]:53", "[::ffff:10.96.0.20]:53"] {
            for way in WAYS {
                let what = format!("from {from}, {way:?} to {to}");
                let dialled = client.dial(way, to).with_context(|| what.clone())?;
                assert_eq!(dialled.name, "A", "{what}");
                assert_eq!(dialled.peer.to_string(), to, "{what}: the peer");
                assert_eq!(dialled.source.to_string(), to, "{what}: the source of the answer");
                assert_eq!(dialled.client.is_ipv4(), to.contains("10.96"), "{what}: the family that the server sees");
            }
        }
    }
    Ok(())
}

#[test]
fn case_13_getpeername_names_the_service_as_long_as_the_socket_lives() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (backend, pod) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    let _server = backend.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    let (service, [four, six]) = dual("mon", "10.96.0.29", "2001:db8:f::29");
    lab.apply(&[&service, &four, &six])?;
    agent.expect("mon", &dual_lines("10.96.0.29", "2001:db8:f::29").each_ref().map(String::as_str))?;
    let clients = [("host", lab.n1().host.client()?), ("pod", pod.place.client()?)];
    let mut open = Vec::new();
    for (from, client) in &clients {
        for way in [Way::Tcp, Way::Udp] {
            for to in ["10.96.0.29:53", "[2001:db8:f::29]:53", "10.244.1.10:8080", "[2001:db8:1::10]:8080"] {
                let what = format!("{from} {way:?} {to}");
                let outlives_service = way == Way::Tcp || to.ends_with("8080"); // the rest is closed: case 22
                open.push((what.clone(), to, outlives_service, client.connect(way, to).context(what)?));
            }
        }
    }
    for service_is_there in [true, false] {
        for (what, to, _, socket) in open.iter().filter(|(_, _, outlives, _)| service_is_there || *outlives) {
            assert_eq!(socket.peer()?.to_string(), *to, "{what}, service there: {service_is_there}");
            assert_eq!(socket.ask().with_context(|| what.clone())?.answer.name, "A", "{what}");
        }
        if service_is_there {
            lab.delete(&[&service, &four, &six])?;
            agent.expect("mon", &[])?;
        }
    }
    Ok(())
}

#[test]
fn case_15_an_answer_comes_from_where_its_question_went() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (backend, pod) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    let _server = backend.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    for (name, v4, v6) in [("dns", "10.96.0.10", "2001:db8:f::10"), ("dns2", "10.96.0.11", "2001:db8:f::11")] {
        let (service, [four, six]) = dual(name, v4, v6);
        lab.apply(&[&service, &four, &six])?;
        agent.expect(name, &dual_lines(v4, v6).each_ref().map(String::as_str))?;
    }
    let check = |from: &str, client: &Client, like: &str, targets: &[&str]| -> Result<()> {
        let socket = client.open(Way::UdpSendto, like.parse()?, None)?;
        for to in targets.iter().chain(targets.iter().rev()) {
            let received = socket.ask_at(to.parse()?).with_context(|| format!("{from} to {to}"))?;
            assert_eq!(received.source.to_string(), *to, "{from}");
        }
        Ok(())
    };
    for (from, client) in [("host", lab.n1().host.client()?), ("pod", pod.place.client()?)] {
        check(from, &client, "10.96.0.10:53", &["10.96.0.10:53", "10.244.1.10:8080", "10.96.0.11:53"])?;
        let six = ["[2001:db8:f::10]:53", "[2001:db8:1::10]:8080", "[2001:db8:f::11]:53", "[::ffff:10.96.0.10]:53"];
        check(from, &client, six[0], &six)?;
    }
    Ok(())
}

#[test]
fn case_16_an_ipv6_socket_dials_an_ipv4_service() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (backend, pod) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    let _server = backend.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    let service = Svc::new("v4").ip("10.96.0.31").port("http", 80, "TCP").node_port(30031);
    let service = service.port("d", 53, "UDP").node_port(30053);
    let slice = Slice::new("v4-1", "v4").port("http", 8080, "TCP").port("d", 8080, "UDP").ready("10.244.1.10", "n1");
    lab.apply(&[&service, &slice])?;
    let clients = [("pod", pod.place.client()?), ("host", lab.n1().host.client()?)];
    agent.until_programmed("v4")?;
    let tap = lab.fabric.tap()?;
    for (from, client) in &clients {
        for (way, to) in [
            (Way::Tcp, "[::ffff:10.96.0.31]:80"),
            (Way::Udp, "[::ffff:10.96.0.31]:53"),
            (Way::UdpSendto, "[::ffff:10.96.0.31]:53"),
            (Way::Tcp, "[::ffff:192.0.2.11]:30031"),
            (Way::Udp, "[::ffff:192.0.2.11]:30053"),
            (Way::UdpSendto, "[::ffff:192.0.2.11]:30053"),
            (Way::Tcp, "[::ffff:127.0.0.1]:30031"),
            (Way::UdpSendto, "[::ffff:127.0.0.1]:30053"),
        ] {
            let what = format!("{from} {way:?} {to}");
            if *from == "pod" && to.contains("127.0.0.1") {
                assert_ne!(client.outcome(way, to)?, "A", "{what}: loopback is the pod's own");
                continue;
            }
            let dialled = client.dial(way, to).with_context(|| what.clone())?;
            assert_eq!((dialled.name.as_str(), dialled.peer.to_string()), ("A", to.to_owned()), "{what}");
            assert_eq!(dialled.source.to_string(), to, "{what}");
        }
        let direct = client.dial(Way::Tcp, "[2001:db8:1::10]:8080")?;
        assert_eq!(direct.peer.to_string(), "[2001:db8:1::10]:8080", "{from}: a genuine IPv6 address is left alone");
    }
    assert_eq!(tap.to("10.96.0.31")?, 0, "packets for the ClusterIP left the node");
    Ok(())
}

#[test]
fn case_17_without_endpoints_a_dial_is_refused_at_once() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (backend, pod) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    let _server = backend.place.echo("A", &["8080/TCP", "8080/UDP"])?;
    let service = Svc::new("empty").ip("10.96.0.32").port("t", 80, "TCP").node_port(30032);
    let service = service.port("u", 80, "UDP").node_port(30032);
    let slice = Slice::new("empty-1", "empty").port("t", 8080, "TCP").port("u", 8080, "UDP");
    let ready = slice.clone().ready("10.244.1.10", "n1");
    let not_ready = slice.clone().not_ready("10.244.1.10", "n1");
    let clients = [("host", lab.n1().host.client()?), ("pod", pod.place.client()?)];
    let outside = lab.outside.client()?;
    let tap = lab.fabric.tap()?;
    let lines = |to: &str| {
        let at = ["10.96.0.32:80/TCP", "10.96.0.32:80/UDP", "192.0.2.11:30032/TCP", "192.0.2.11:30032/UDP"];
        at.map(|at| format!("{at} → {to}"))
    };
    let (refused, served) = (lines("refused"), lines("10.244.1.10:8080"));

    lab.apply(&[&service])?;
    for (phase, change, lines, outcome) in [
        ("no slice", None, &refused, "ECONNREFUSED"),
        ("only a not-ready endpoint", Some(&not_ready), &refused, "ECONNREFUSED"),
        ("one ready endpoint", Some(&ready), &served, "A"),
        ("none again", Some(&slice), &refused, "ECONNREFUSED"),
    ] {
        if let Some(slice) = change {
            lab.apply(&[slice])?;
        }
        agent.expect("empty", &lines.each_ref().map(String::as_str))?;
        for (from, client) in &clients {
            for (way, to) in WAYS.into_iter().flat_map(|way| [(way, "10.96.0.32:80"), (way, "[::ffff:10.96.0.32]:80")])
            {
                let start = std::time::Instant::now();
                assert_eq!(client.outcome(way, to)?, outcome, "{phase}: {from}, {way:?} {to}");
                assert!(start.elapsed().as_secs() < 1, "{phase}: {from}, {way:?} {to} took {:?}", start.elapsed());
            }
        }
        // A RST, or ICMP port unreachable; nothing tells a socket that is not connected.
        for way in [Way::Tcp, Way::Udp] {
            assert_eq!(outside.outcome(way, "192.0.2.11:30032")?, outcome, "{phase}: from outside, {way:?}");
        }
    }
    assert_eq!(tap.to("10.96.0.32")?, 0, "packets for the ClusterIP left the node");
    Ok(())
}

#[test]
fn case_18_a_pod_reaches_itself_through_its_service() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let pods = [10, 11, 12].map(|number| lab.n1().pod(number)).into_iter().collect::<Result<Vec<_>>>()?;
    let _servers = (pods.iter().zip(["A", "B", "C"]))
        .map(|(pod, name)| pod.place.echo(name, &["8080/TCP", "8080/UDP"]))
        .collect::<Result<Vec<_>>>()?;
    let service = Svc::new("self").ip("10.96.0.33").ip("2001:db8:f::33");
    lab.apply(&[&service.port("t", 80, "TCP").node_port(30033).port("u", 80, "UDP").node_port(30033)])?;
    let client = pods[0].place.client()?;
    for count in [1, 3] {
        for (family, addresses) in [
            ("4", pods.iter().map(|pod| pod.v4.to_string()).collect::<Vec<_>>()),
            ("6", pods.iter().map(|pod| pod.v6.to_string()).collect()),
        ] {
            let slice = Slice::new(&format!("self-{family}"), "self").port("t", 8080, "TCP").port("u", 8080, "UDP");
            lab.apply(&[&addresses[..count].iter().fold(slice, |slice, address| slice.ready(address, "n1"))])?;
        }
        eventually("all backends are known", SOON, || {
            let rows = agent.kernel()?;
            let rows: Vec<_> = rows.iter().filter(|row| row.service.is_some()).collect();
            ensure!(rows.len() >= 8 && rows.iter().all(|row| row.backends.len() == count), "{rows:#?}");
            Ok(())
        })?;
        for to in ["10.96.0.33:80", "[2001:db8:f::33]:80", "192.0.2.11:30033", "[2001:db8::11]:30033"] {
            for way in [Way::Tcp, Way::Udp, Way::UdpSendto] {
                let names =
                    client.dial_many(way, to, 100).with_context(|| format!("{count} backends, {way:?} {to}"))?;
                assert_eq!(names.len(), count, "{count} backends, {way:?} {to}: {names:?}");
            }
        }
    }
    Ok(())
}

/// A group with a class id of cgroup v1's net_cls; removed when dropped.
struct NetCls(PathBuf);

impl NetCls {
    /// `None` where there is no such controller, or it belongs to cgroup v2.
    fn new(at: &Path) -> Result<Option<Self>> {
        fs::create_dir_all(at)?;
        if mount(Some("net_cls"), at, Some("cgroup"), MsFlags::empty(), Some("net_cls")).is_err() {
            return Ok(None);
        }
        let group = Self(at.to_owned());
        fs::create_dir_all(group.0.join("group"))?;
        fs::write(group.0.join("group/net_cls.classid"), "1048577")?;
        Ok(Some(group))
    }
}

impl Drop for NetCls {
    fn drop(&mut self) {
        // Processes in it go back to where they would be without it.
        let group = self.0.join("group");
        for process in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(self.0.join("cgroup.procs"), process);
        }
        let _ = fs::remove_dir(group);
        let _ = umount(&self.0);
    }
}

/// Before Linux 5.15, and before the point releases of older kernels that have its fix, a socket was in cgroup v2 or in
/// net_cls; `sheave check` warns of either, since it cannot tell.
#[test]
fn case_43_a_client_in_a_net_cls_group_is_served() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let agent = node.agent_with(&["--packet-path=false"])?;
    let Some(group) = NetCls::new(&node.paths().run.join("net_cls"))? else {
        skip("this host has no net_cls of cgroup v1");
        return Ok(());
    };
    let _server = node.server(10, "A")?;
    let (service, [four, six]) = dual("web", "10.96.0.20", "2001:db8:f::20");
    lab.apply(&[&service, &four, &six])?;
    agent.until_programmed("web")?;
    let client = node.pod(20)?.place.client()?;
    fs::write(group.0.join("group/cgroup.procs"), client.id().to_string())?;
    let groups = fs::read_to_string(format!("/proc/{}/cgroup", client.id()))?;
    ensure!(groups.lines().any(|line| line.ends_with("net_cls:/group")), "{groups}");
    for way in WAYS {
        for to in ["10.96.0.20:53", "[2001:db8:f::20]:53"] {
            let dialled = client.dial(way, to).with_context(|| format!("{way:?} to {to}"))?;
            assert_eq!((dialled.name.as_str(), dialled.peer.to_string().as_str()), ("A", to), "{way:?}");
        }
    }
    Ok(())
}
