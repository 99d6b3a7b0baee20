//! Services and slices as they come, change and go: what the lists show and where connections land. The ids are those
//! of `docs/testing.md`'s cases.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use serde_json::json;
use sheave_tests::{
    client::{LoadKind, Way},
    lab::Lab,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

/// Every dial answered by one server.
fn only(name: &str, times: usize) -> BTreeMap<String, usize> {
    BTreeMap::from([(name.to_owned(), times)])
}

#[test]
fn case_01_tcp_and_udp_of_one_port_are_told_apart() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (a, b) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    // Both listen on everything: whoever is reached wrongly answers with the wrong name.
    let _servers =
        [("A", &a), ("B", &b)].map(|(name, pod)| pod.place.echo(name, &["5301/UDP", "5302/TCP", "5301/TCP"]));
    let udp_only = Svc::new("dns").ip("10.96.0.10").port("u", 53, "UDP");
    let both = udp_only.clone().port("t", 53, "TCP");
    let udp = Slice::new("dns-u", "dns").port("u", 5301, "UDP").ready("10.244.1.10", "n1");
    let tcp = Slice::new("dns-t", "dns").port("t", 5302, "TCP").ready("10.244.1.20", "n1");
    let (udp_line, tcp_line) = ("10.96.0.10:53/UDP → 10.244.1.10:5301", "10.96.0.10:53/TCP → 10.244.1.20:5302");
    let client = lab.n1().host.client()?;

    lab.apply(&[&both, &udp, &tcp])?;
    agent.expect("dns", &[udp_line, tcp_line])?;
    assert_eq!(client.dial_many(Way::Tcp, "10.96.0.10:53", 50)?, only("B", 50));
    assert_eq!(client.dial_many(Way::Udp, "10.96.0.10:53", 50)?, only("A", 50));

    lab.apply(&[&udp_only])?; // (b)
    agent.expect("dns", &[udp_line])?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.10:53")?, "ECONNREFUSED", "A listens on 5301/TCP, too");
    assert_eq!(client.outcome(Way::Udp, "10.96.0.10:53")?, "A");

    lab.apply(&[&both])?; // (c)
    agent.expect("dns", &[udp_line, tcp_line])?;
    assert_eq!(client.dial_many(Way::Tcp, "10.96.0.10:53", 10)?, only("B", 10));

    lab.delete(&[&udp])?; // (d)
    agent.expect("dns", &["10.96.0.10:53/UDP → refused", tcp_line])?;
    assert_eq!(client.outcome(Way::Udp, "10.96.0.10:53")?, "ECONNREFUSED");
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.10:53")?, "B");
    Ok(())
}

#[test]
fn case_02_one_address_in_two_slices_serves_both_ports() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _servers = [pod.place.echo("8080", &["8080/TCP"])?, pod.place.echo("9090", &["9090/TCP"])?];
    let client = lab.n1().host.client()?;
    let service = Svc::new("two").ip("10.96.0.21").port("one", 80, "TCP").port("two", 81, "TCP");
    let a = Slice::new("two-a", "two").port("one", 8080, "TCP").ready("10.244.1.10", "n1");
    let b = Slice::new("two-b", "two").port("two", 9090, "TCP").ready("10.244.1.10", "n1");
    let full = ["10.96.0.21:80/TCP → 10.244.1.10:8080", "10.96.0.21:81/TCP → 10.244.1.10:9090"];
    let (only_a, only_b) = ([full[0], "10.96.0.21:81/TCP → refused"], ["10.96.0.21:80/TCP → refused", full[1]]);

    for (first, half, second) in [(&a, only_a, &b), (&b, only_b, &a)] {
        lab.apply(&[&service, first])?;
        agent.expect("two", &half)?;
        lab.apply(&[second])?;
        agent.expect("two", &full)?;
        lab.apply(&[&a.clone().annotate("touched", "yes")])?;
        agent.expect("two", &full)?;
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.21:80")?, "8080");
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.21:81")?, "9090");
        lab.delete(&[&b])?;
        agent.expect("two", &only_a)?;
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.21:80")?, "8080");
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.21:81")?, "ECONNREFUSED");
        lab.delete(&[&a, &service])?;
        agent.expect("two", &[])?;
    }
    Ok(())
}

#[test]
fn case_03_two_ports_of_one_address_are_two_backends() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let host = &lab.n1().host;
    let _servers = [host.echo("8080", &["8080/TCP"])?, host.echo("8081", &["8081/TCP"])?];
    let client = host.client()?;
    let service = Svc::new("hn").ip("10.96.0.22").port("http", 80, "TCP");
    let [one, two] = [("hn-1", 8080), ("hn-2", 8081)]
        .map(|(name, port)| Slice::new(name, "hn").port("http", port, "TCP").ready("192.0.2.11", "n1"));

    lab.apply(&[&service, &one, &two])?;
    agent.expect("hn", &["10.96.0.22:80/TCP → 192.0.2.11:8080 192.0.2.11:8081"])?;
    let names = client.dial_many(Way::Tcp, "10.96.0.22:80", 200)?;
    assert!(names.len() == 2 && names.values().all(|times| *times >= 40), "{names:?}");

    lab.delete(&[&two])?;
    agent.expect("hn", &["10.96.0.22:80/TCP → 192.0.2.11:8080"])?;
    assert_eq!(client.dial_many(Way::Tcp, "10.96.0.22:80", 20)?, only("8080", 20));
    Ok(())
}

#[test]
fn case_05_a_slice_of_dns_names_is_left_alone() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let client = lab.n1().host.client()?;
    let service = Svc::new("ext").ip("10.96.0.23").port("http", 80, "TCP");
    let good = Slice::new("ext-1", "ext").port("http", 8080, "TCP").ready("10.244.1.10", "n1");
    let named = Slice::new("ext-2", "ext").port("http", 8080, "TCP").address_type("FQDN");
    let line = ["10.96.0.23:80/TCP → 10.244.1.10:8080"];
    lab.apply(&[&service, &good])?;
    agent.expect("ext", &line)?;

    let after = Svc::new("after").ip("10.96.0.123").port("http", 80, "TCP");
    for (version, slice) in
        [("one", named.clone().ready("backend.example.org", "n1")), ("two", named.ready("other.example.org", "n1"))]
    {
        lab.apply(&[&slice, &after.clone().annotate("version", version)])?;
        agent.expect("after", &["10.96.0.123:80/TCP → refused"])?; // so the slice before it has been read
        agent.expect("ext", &line)?;
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.23:80")?, "A", "{version}");
        if version == "two" {
            lab.delete(&[&slice])?;
        }
    }
    lab.apply(&[&Slice::new("after-1", "after").port("http", 8080, "TCP").ready("10.244.1.10", "n1")])?;
    agent.expect("after", &["10.96.0.123:80/TCP → 10.244.1.10:8080"])?;
    agent.expect("ext", &line)?;
    let said = agent.log().lines().filter(|line| line.contains("ext-2")).count();
    assert!(said <= 2, "one line per version of the slice at most:\n{}", agent.log());
    assert!(agent.is_running()?);
    Ok(())
}

#[test]
fn case_07_external_name_and_headless_have_no_frontend() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let client = lab.n1().host.client()?;
    let slice = |name: &str, address: &str| Slice::new(name, "x").port("http", 8080, "TCP").ready(address, "n1");
    let (current, old) = (slice("x-1", "10.244.1.10"), slice("x-old", "10.244.1.99"));
    let first = Svc::new("x").ip("10.96.0.24").port("http", 80, "TCP");
    let second = Svc::new("x").ip("10.96.0.25").port("http", 80, "TCP");
    let external = Svc::new("x")
        .port("http", 80, "TCP")
        .set("type", json!("ExternalName"))
        .set("externalName", json!("a.example.org"));
    let headless = Svc::new("x").ip("None").port("http", 80, "TCP");

    lab.apply(&[&first, &current])?;
    agent.expect("x", &["10.96.0.24:80/TCP → 10.244.1.10:8080"])?;
    for (name, without) in [("ExternalName", &external), ("headless", &headless)] {
        lab.apply(&[without, &old])?;
        agent.expect("x", &[])?;
        assert_ne!(client.outcome(Way::Tcp, "10.96.0.24:80")?, "A", "{name}");
        lab.apply(&[&second])?;
        agent.expect("x", &["10.96.0.25:80/TCP → 10.244.1.10:8080 10.244.1.99:8080"])?;
        lab.delete(&[&old])?;
        agent.expect("x", &["10.96.0.25:80/TCP → 10.244.1.10:8080"])?;
        assert_eq!(client.dial_many(Way::Tcp, "10.96.0.25:80", 20)?, only("A", 20), "{name}");
        assert_ne!(client.outcome(Way::Tcp, "10.96.0.24:80")?, "A", "{name}: the old address stays dead");
    }
    Ok(())
}

#[test]
fn case_09_a_port_removed_or_renumbered_is_gone_from_the_kernel() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP", "8081/TCP"])?;
    let (client, outside) = (lab.n1().host.client()?, lab.outside.client()?);
    let slice = Slice::new("p-1", "p").port("a", 8080, "TCP").port("b", 8081, "TCP").ready("10.244.1.10", "n1");
    let before = Svc::new("p").ip("10.96.0.26").port("a", 80, "TCP").node_port(30080);
    lab.apply(&[&slice, &before.port("b", 81, "TCP").node_port(30081)])?;
    let (a, b) = ("10.244.1.10:8080", "10.244.1.10:8081");
    let kept = format!("192.0.2.11:30081/TCP → {b}");
    let lines = [format!("10.96.0.26:80/TCP → {a}"), format!("192.0.2.11:30080/TCP → {a}")];
    agent.expect("p", &[&lines[0], &lines[1], &format!("10.96.0.26:81/TCP → {b}"), &kept])?;
    let rows = agent.kernel()?.len();
    let loads = [&client, &outside]
        .map(|client| client.load(Way::Tcp, LoadKind::Dial, "192.0.2.11:30081", Duration::ZERO))
        .into_iter()
        .collect::<Result<Vec<_>>>()?;

    lab.apply(&[&Svc::new("p").ip("10.96.0.26").port("b", 82, "TCP").node_port(30081)])?;
    agent.expect("p", &[&format!("10.96.0.26:82/TCP → {b}"), &kept])?;
    for load in loads {
        let report = load.stop()?;
        assert!(report.failed == 0 && report.answered > 0, "its node port serves it all the while: {report:?}");
    }
    let gone = rows - agent.kernel()?.len();
    assert_eq!(gone, 3, "port 80, node port 30080 and its loopback side");
    for (to, outcome) in [
        ("10.96.0.26:80", "ECONNREFUSED"),
        ("10.96.0.26:81", "ECONNREFUSED"),
        ("10.96.0.26:82", "A"),
        ("192.0.2.11:30080", "ECONNREFUSED"),
    ] {
        assert_eq!(client.outcome(Way::Tcp, to)?, outcome, "{to}");
    }
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:30080")?, "ECONNREFUSED");
    Ok(())
}

#[test]
fn case_11_a_pod_of_two_services_outlives_either() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let (pod, other) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let client = other.place.client()?;
    let backends = agent.status()?.backends;
    let [(s1, e1), (s2, e2)] = [("s1", "10.96.0.27"), ("s2", "10.96.0.28")].map(|(name, ip)| {
        let slice = Slice::new(&format!("{name}-1"), name).port("http", 8080, "TCP").ready("10.244.1.10", "n1");
        (Svc::new(name).ip(ip).port("http", 80, "TCP"), slice)
    });
    let (line1, line2) = ("10.96.0.27:80/TCP → 10.244.1.10:8080", "10.96.0.28:80/TCP → 10.244.1.10:8080");
    lab.apply(&[&s1, &e1, &s2, &e2])?;
    agent.expect("s1", &[line1])?;
    agent.expect("s2", &[line2])?;

    let load = client.load(Way::Tcp, LoadKind::Dial, "10.96.0.28:80", Duration::ZERO)?;
    for _ in 0..10 {
        lab.delete(&[&s1, &e1])?;
        agent.expect("s1", &[])?;
        lab.apply(&[&s1, &e1])?;
        agent.expect("s1", &[line1])?;
    }
    let report = load.stop()?;
    assert!(report.failed == 0 && report.answered > 10, "{report:?}");

    lab.apply(&[&Slice::new("s2-1", "s2").port("http", 8080, "TCP")])?;
    agent.expect("s2", &["10.96.0.28:80/TCP → refused"])?;
    lab.apply(&[&e2])?;
    agent.expect("s2", &[line2])?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.28:80")?, "A");

    lab.delete(&[&s1, &e1, &s2, &e2])?;
    eventually("nothing is left", SOON, || {
        let (rows, now) = (agent.kernel()?, agent.status()?.backends);
        anyhow::ensure!(rows.is_empty() && now == backends, "{now} backends, {rows:?}");
        Ok(())
    })
}

#[test]
fn case_26_each_family_reaches_its_own_pods() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let client = lab.n1().host.client()?;
    let slice = |name: &str, address: &str| Slice::new(name, "ds").port("http", 8080, "TCP").ready(address, "n1");
    let (four, six) = (slice("ds-4", "10.244.1.10"), slice("ds-6", "2001:db8:1::10"));
    let service = |ips: &[&str]| ips.iter().fold(Svc::new("ds"), |svc, ip| svc.ip(ip)).port("http", 80, "TCP");
    let (v4, v6) = ("10.96.0.38", "2001:db8:f::38");
    let (line4, line6) = ("10.96.0.38:80/TCP → 10.244.1.10:8080", "[2001:db8:f::38]:80/TCP → [2001:db8:1::10]:8080");
    let dialled_family = |to: &str| -> Result<bool> { Ok(client.dial(Way::Tcp, to)?.client.is_ipv4()) };

    for (name, ips) in [("(a)", [v4, v6]), ("(b) reversed", [v6, v4])] {
        lab.apply(&[&service(&ips), &four, &six])?;
        agent.expect("ds", &[line4, line6])?;
        assert!(dialled_family("10.96.0.38:80")?, "{name}");
        assert!(!dialled_family("[2001:db8:f::38]:80")?, "{name}");
    }
    lab.apply(&[&service(&[v4])])?; // (c)
    agent.expect("ds", &[line4])?;
    assert_ne!(client.outcome(Way::Tcp, "[2001:db8:f::38]:80")?, "A");
    lab.apply(&[&service(&[v4, v6])])?; // (d)
    lab.delete(&[&four])?;
    agent.expect("ds", &["10.96.0.38:80/TCP → refused", line6])?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.38:80")?, "ECONNREFUSED");
    assert!(!dialled_family("[2001:db8:f::38]:80")?);
    Ok(())
}
