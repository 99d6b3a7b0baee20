//! Traffic policies, topology and verdicts, as a program on the node meets them.

use std::{collections::BTreeSet, net::SocketAddr, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::{Client, Errno, LoadKind, Way},
    lab::Lab,
    objects::{Slice, Svc, node_with, service_cidr},
    skip,
    wait::{SOON, eventually},
};

/// Longer than any answer in a lab takes, on an idle machine as on a busy one.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a program sees of a connection that is dropped: it waits.
const SILENCE: &str = "TIMEOUT";

/// Clients on the node and in a pod of it.
fn clients(lab: &Lab) -> Result<[(&'static str, Client); 2]> {
    let pod = lab.n1().pod(20)?;
    let mut clients = [("host", lab.n1().host.client()?), ("pod", pod.place.client()?)];
    clients.iter_mut().for_each(|(_, client)| client.patience = PATIENCE);
    Ok(clients)
}

/// Who answers in many dials.
fn names(client: &Client, to: &str) -> Result<BTreeSet<String>> {
    Ok(client.dial_many(Way::Tcp, to, 40)?.into_keys().collect())
}

fn set(names: &str) -> BTreeSet<String> {
    names.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn verdicts_of_every_kind_of_address() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let clients = clients(&lab)?;
    let tap = lab.fabric.tap()?;
    let service = |internal: &str, external: &str| {
        let service = Svc::new("v").ip("10.96.0.40").ingress("203.0.113.31", "VIP");
        let service = service.port("t", 80, "TCP").node_port(30090).port("u", 80, "UDP").node_port(30090);
        let service = service.set("externalIPs", json!(["203.0.113.32"]));
        service.set("internalTrafficPolicy", json!(internal)).set("externalTrafficPolicy", json!(external))
    };
    let none = Slice::web("v");
    let local = none.clone().ready("10.244.1.10", "n1");
    let remote = none.clone().ready("10.244.1.10", "n2");
    let leaving = none.clone().terminating("10.244.1.10", "n2");
    let unready = none.clone().not_ready("10.244.1.10", "n1");
    let refused = "ECONNREFUSED";
    for (row, internal, external, slice, at_cluster_ip, elsewhere) in [
        ("V-1, no endpoint", "Cluster", "Cluster", &none, refused, refused),
        ("V-1, no endpoint, Local", "Local", "Local", &none, refused, refused),
        ("V-1, none ready", "Local", "Local", &unready, refused, refused),
        ("V-2, F20", "Local", "Cluster", &remote, SILENCE, "A"),
        ("V-2, V-3: inside clients use every endpoint", "Local", "Local", &remote, SILENCE, "A"),
        ("V-2, C27: terminating elsewhere", "Local", "Local", &leaving, SILENCE, "A"),
        ("V-3", "Cluster", "Local", &remote, "A", "A"),
        ("C25", "Local", "Local", &local, "A", "A"),
    ] {
        lab.apply(&[&service(internal, external), slice])?;
        let cluster_ip = |way| match at_cluster_ip {
            "A" => format!("10.96.0.40:80/{way} → 10.244.1.10:8080"),
            SILENCE => format!("10.96.0.40:80/{way} → dropped"),
            _ => format!("10.96.0.40:80/{way} → refused"),
        };
        let others = ["192.0.2.11:30090", "203.0.113.31:80", "203.0.113.32:80"];
        let to = if elsewhere == "A" { "10.244.1.10:8080" } else { "refused" };
        let ways = ["TCP", "UDP"];
        let lines: Vec<_> = ways
            .iter()
            .map(cluster_ip)
            .chain(others.iter().flat_map(|at| ways.map(|way| format!("{at}/{way} → {to}"))))
            .collect();
        agent.expect("v", &lines.iter().map(String::as_str).collect::<Vec<_>>()).context(row)?;
        for (from, client) in &clients {
            for way in Way::ALL {
                assert_eq!(client.outcome(way, "10.96.0.40:80")?, at_cluster_ip, "{row}: {from}, {way:?}");
                for to in others {
                    assert_eq!(client.outcome(way, to)?, elsewhere, "{row}: {from}, {way:?} to {to}");
                }
            }
        }
    }
    for vip in ["10.96.0.40", "203.0.113.31", "203.0.113.32"] {
        assert_eq!(tap.to(vip)?, 0, "nothing to {vip} leaves the node");
    }

    for (from, client) in &clients {
        for way in Way::ALL {
            assert_eq!(client.outcome(way, "10.96.0.40:81")?, refused, "V-4: {from}, {way:?}");
        }
        let _ = client.outcome(Way::UdpSendto, "203.0.113.31:81")?;
    }
    assert_eq!(tap.to("10.96.0.40")?, 0, "V-4: an unknown port of a cluster IP does not leave the node either");
    assert_ne!(tap.to("203.0.113.31")?, 0, "F31: who dials another virtual address here may mean whoever has it");
    Ok(())
}

/// Where the kernel gives no discard device, what should meet silence fails at once, and `status` says so.
#[test]
fn without_a_discard_device_silence_is_a_timeout_at_once() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    // One of its name to which there can be no IPv4 route: its packets are too short.
    let make = |kind: &&str| node.host.ip(&format!("link add sheave-drop type {kind}")).is_ok();
    if !["dummy", "ifb"].iter().any(make) {
        skip("this kernel has neither dummy nor ifb devices");
        return Ok(());
    }
    node.host.ip("link set sheave-drop mtu 64")?;
    let service = Svc::new("local").ip("10.96.0.40").port("t", 80, "TCP").port("u", 80, "UDP");
    let slice = Slice::new("local", "local").port("t", 8080, "TCP").port("u", 8080, "UDP");
    lab.apply(&[&service.set("internalTrafficPolicy", json!("Local")), &slice.ready("10.244.2.10", "n2")])?;
    let agent = node.agent()?;
    agent.until_programmed("local")?;
    let features = agent.status()?.features;
    let route = features.iter().find(|feature| feature.name == "discard-route").context("no such feature")?;
    assert!(!route.available, "{route:?}");
    for (from, client) in clients(&lab)? {
        for way in Way::ALL {
            assert_eq!(client.outcome(way, "10.96.0.40:80")?, "ETIMEDOUT", "V-2: {from}, {way:?}");
        }
    }
    Ok(())
}

/// With kube-proxy the next SYN that is sent again gets through. Here the dial fails, so that it can be tried again.
#[test]
fn a_dial_that_waits_in_silence_ends_when_there_is_somebody() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let local = Svc::web("v", "10.96.0.44").ingress("203.0.113.44", "VIP").set("internalTrafficPolicy", json!("Local"));
    let ranges = |range: &str| local.clone().set("loadBalancerSourceRanges", json!([range]));
    let elsewhere = Slice::web("v").ready("10.244.1.10", "n2");
    let pod = lab.n1().pod(20)?;
    let waiting = || -> Result<u64> {
        let counters = agent.status()?.counters;
        Ok(["socket_drop", "socket_source_range"].iter().filter_map(|name| counters.get(*name)).sum())
    };
    for (row, to) in [("V-2", "10.96.0.44:80"), ("V-6", "203.0.113.44:80")] {
        lab.apply(&[&ranges("198.51.100.0/24"), &elsewhere])?;
        lab.settle(&agent)?;
        let before = waiting()?;
        thread::scope(|scope| -> Result<()> {
            let dials = [&pod.place, &lab.n1().host].map(|place| {
                scope.spawn(move || -> Result<Errno> {
                    let mut client = place.client()?;
                    client.patience = Duration::from_secs(20);
                    client.connect(Way::Tcp, to).err().context("it connects")?.downcast()
                })
            });
            let waits = || -> Result<()> {
                let now = waiting()?;
                ensure!(now == before + 2, "{now} dials, {before} before");
                Ok(())
            };
            eventually("both wait", SOON, waits)?;
            lab.apply(&[&ranges("0.0.0.0/0"), &Slice::web("v").ready("10.244.1.10", "n1")])?;
            for dial in dials {
                let error = dial.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                assert!(error.name == "ECONNABORTED" && error.after < Duration::from_secs(15), "{row}: {error}");
            }
            Ok(())
        })?;
        lab.settle(&agent)?;
        assert_eq!(pod.place.client()?.outcome(Way::Tcp, to)?, "A", "{row}");
    }
    Ok(())
}

#[test]
fn v5_unallocated_addresses_of_the_service_networks_meet_silence() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let agent = lab.n1().agent_with(&["--service-cidrs=10.96.0.0/16,2001:db8:f::/112"])?;
    let service = Svc::web("v", "10.96.0.42");
    lab.apply(&[&service, &Slice::web("v").ready("10.244.1.10", "n1")])?;
    lab.settle(&agent)?;
    let tap = lab.fabric.tap()?;
    for (from, client) in clients(&lab)? {
        for way in Way::ALL {
            assert_eq!(client.outcome(way, "10.96.0.42:80")?, "A", "{from}, {way:?}");
            assert_eq!(client.outcome(way, "10.96.0.42:81")?, "ECONNREFUSED", "V-4: {from}, {way:?}");
            for to in ["10.96.99.99:80", "[2001:db8:f::9999]:80", "[::ffff:10.96.99.99]:80"] {
                assert_eq!(client.outcome(way, to)?, SILENCE, "V-5: {from}, {way:?} to {to}");
            }
        }
    }
    assert_eq!((tap.to("10.96.99.99")?, tap.to("2001:db8:f::9999")?), (0, 0), "nothing leaves the node");
    // A Service that goes leaves its address unallocated.
    let client = lab.n1().host.client()?;
    lab.delete(&[&service])?;
    lab.settle(&agent)?;
    assert_eq!(client.outcome(Way::UdpSendto, "10.96.0.42:80")?, SILENCE, "deleted");
    assert_eq!(tap.to("10.96.0.42")?, 0, "deleted");
    // Whoever waits there is told when there is a Service; behind kube-proxy its next SYN would get through.
    let pause = Duration::from_millis(1);
    let [told, left] = ["10.96.0.42:80", "10.96.99.99:80"].map(|to| client.load(Way::Tcp, LoadKind::Dial, to, pause));
    let (told, left) = (told?, left?);
    eventually("a dial has waited in vain", SOON, || {
        ensure!(told.report()?.failed > 0 && left.report()?.failed > 0, "not yet");
        Ok(())
    })?;
    lab.apply(&[&service])?;
    eventually("a dial gets there", SOON, || {
        ensure!(told.report()?.answered > 0, "{:?}", told.report()?);
        Ok(())
    })?;
    assert_eq!(told.stop()?.failures.last().map(String::as_str), Some("ECONNABORTED"), "one dial is ended");
    assert!(left.stop()?.failures.iter().all(|error| error == SILENCE), "nobody has the other address");
    Ok(())
}

/// SC-1 to SC-4: the cluster's own objects say which networks those are, one at a time.
#[test]
fn v5_service_cidrs_come_and_go() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let tap = lab.fabric.tap()?;
    let clients = clients(&lab)?;
    let cidr = service_cidr;
    let (first, second) = ("10.96.99.99", "10.97.99.99");
    let mut sent = [0, 0];
    for (row, objects, restart, silent) in [
        ("none", vec![], false, [false, false]),
        ("SC-1", vec![cidr("foo", &["10.96.0.0/16"])], false, [true, false]),
        ("SC-2", vec![cidr("bar", &["10.97.0.0/16", "2001:db8:f::/112"])], false, [true, true]),
        ("after a restart", vec![], true, [true, true]),
        ("SC-3", vec![cidr("foo", &["10.98.0.0/16"])], false, [false, true]),
        ("all in one", vec![cidr("foo", &["10.96.0.0/15"])], false, [true, true]),
    ] {
        objects.iter().try_for_each(|object| lab.apply(&[object]))?;
        if restart {
            agent.kill()?;
            agent.restart()?;
        }
        // Networks are written after the frontends: the second marker shows that the first pass is over.
        lab.settle(&agent)?;
        lab.settle(&agent)?;
        for (index, to) in [first, second].into_iter().enumerate() {
            for (from, client) in &clients {
                let outcome = client.outcome(Way::Tcp, &format!("{to}:80"))?;
                assert!(!silent[index] || outcome == SILENCE, "{row}: {from} to {to}: {outcome}");
            }
            let before = std::mem::replace(&mut sent[index], tap.to(to)?);
            assert_eq!(sent[index] == before, silent[index], "{row}: what leaves the node for {to}");
        }
    }
    // F52: the address of a Service that is left to somebody else is not nobody's.
    let dns = Svc::web("dns", first);
    lab.apply(&[&dns.clone().annotate("sheave.io/skip", "true")])?;
    lab.settle(&agent)?;
    lab.settle(&agent)?;
    clients[0].1.outcome(Way::Tcp, &format!("{first}:80"))?;
    assert!(tap.to(first)? > sent[0], "left alone");
    lab.delete(&[&dns])?;
    lab.settle(&agent)?;
    lab.settle(&agent)?;
    sent[0] = tap.to(first)?;
    assert_eq!(clients[0].1.outcome(Way::Tcp, &format!("{first}:80"))?, SILENCE, "nobody's again");
    assert_eq!(tap.to(first)?, sent[0], "nobody's again");
    Ok(())
}

#[test]
fn source_ranges_bind_clients_on_the_node_too() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let clients = clients(&lab)?;
    let slice = Slice::web("s").ready("10.244.1.10", "n1");
    let service = |ranges: Value| {
        let service = Svc::new("s").ip("10.96.0.41").ingress("203.0.113.31", "VIP");
        service.port("t", 80, "TCP").node_port(30091).set("loadBalancerSourceRanges", ranges)
    };
    for (row, ranges, host, pod) in [
        ("V-6: neither", json!(["198.51.100.0/24"]), SILENCE, SILENCE),
        ("F22: the node's own address admits it", json!(["192.0.2.0/24"]), "A", SILENCE),
        ("F22: pods of this node", json!(["10.244.0.0/16"]), SILENCE, "A"),
        ("F22: two halves of the pods", json!(["10.244.1.0/25", "10.244.1.128/25"]), SILENCE, "A"),
        ("F22: some pods of this node, this one too", json!(["10.244.1.16/28"]), SILENCE, "A"),
        ("F22: some pods of this node, not this one", json!(["10.244.1.128/25"]), SILENCE, SILENCE),
        ("S19: the other family only", json!(["2001:db8::/32"]), "A", "A"),
        ("S19: everyone", json!(["198.51.100.0/24", "0.0.0.0/0"]), "A", "A"),
        ("no ranges", json!([]), "A", "A"),
    ] {
        lab.apply(&[&service(ranges), &slice])?;
        lab.settle(&agent)?;
        for ((from, client), expected) in clients.iter().zip([host, pod]) {
            // A dial that waits while the ranges change is ended once, so that it may try again.
            eventually(&format!("{row}: {from}"), SOON, || {
                let seen = client.outcome(Way::Tcp, "203.0.113.31:80")?;
                ensure!(seen == expected, "{seen} instead of {expected}");
                Ok(())
            })?;
            assert_eq!(
                client.outcome(Way::Tcp, "10.96.0.41:80")?,
                "A",
                "{row}: {from}, the cluster IP is not filtered"
            );
            assert_eq!(client.outcome(Way::Tcp, "192.0.2.11:30091")?, "A", "{row}: {from}, nor the node port");
        }
        let list = agent.sheave(&["lb", "list", "--source-ranges", "-n", "t"])?;
        let is_shown = list.lines().any(|line| line.split_whitespace().eq(["t/s", "t", "TCP", "198.51.100.0/24"]));
        assert_eq!(is_shown, row.starts_with("V-6"), "{row}: {list}");
    }
    Ok(())
}

#[test]
fn source_ranges_know_a_bound_socket_by_its_address_and_come_before_everything_else() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let (inside, outside) = (lab.n1().pod(20)?, lab.n1().pod(21)?);
    let service = Svc::web("s", "10.96.0.41").ingress("203.0.113.31", "VIP");
    let service = service.set("loadBalancerSourceRanges", json!(["10.244.1.20/32"]));
    let slice = Slice::web("s").ready("10.244.1.10", "n1");
    lab.apply(&[&service, &slice])?;
    lab.settle(&agent)?;
    let tap = lab.fabric.tap()?;
    for (pod, expected) in [(&inside, Ok("A")), (&outside, Err(SILENCE))] {
        let mut client = pod.place.client()?;
        client.patience = PATIENCE;
        for way in Way::ALL {
            let dialled = client.dial_from(way, "203.0.113.31:80", Some(pod.at(0)));
            let seen = dialled.as_ref().map(|d| d.name.as_str()).map_err(|e| e.downcast_ref::<Errno>());
            assert_eq!(seen.map_err(|e| e.map_or("?", |e| &e.name)), expected, "F22: {way:?} from {}", pod.v4);
        }
    }
    lab.apply(&[&Slice::web("s")])?;
    lab.settle(&agent)?;
    let mut client = outside.place.client()?;
    client.patience = PATIENCE;
    assert_eq!(client.outcome(Way::Tcp, "203.0.113.31:80")?, SILENCE, "V-6 before V-1");
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.41:80")?, "ECONNREFUSED", "V-1 at the cluster IP");
    assert_eq!(tap.to("203.0.113.31")?, 0, "nothing leaves the node");
    Ok(())
}

/// FLOW-4: a node that carries a load-balancer address dials it from that address, and is the node all the same.
#[test]
fn source_ranges_that_admit_the_node_admit_the_load_balancer_addresses_that_it_carries() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let vips = ["203.0.113.31", "2001:db8:5::31"];
    for vip in vips {
        lab.n1().host.ip(&format!("addr add {vip} dev lo"))?;
    }
    let mut client = lab.n1().host.client()?;
    client.patience = PATIENCE;
    let slice = Slice::web("s").ready("10.244.1.10", "n1");
    let slice6 = Slice::new("s6", "s").port("t", 8080, "TCP").port("u", 8080, "UDP").ready("2001:db8:1::10", "n1");
    let service = Svc::web("s", "10.96.0.41").ip("fd00:10:96::41");
    let service = vips.iter().fold(service, |service, vip| service.ingress(vip, "VIP"));
    for (row, ranges, expected) in [
        ("an own address lies in the ranges", ["192.0.2.0/24", "2001:db8::/64"], "A"),
        ("derived: none does", ["198.51.100.0/24", "2001:db8:9::/64"], SILENCE),
    ] {
        let service = service.clone().set("loadBalancerSourceRanges", json!(ranges));
        lab.apply(&[&service, &slice, &slice6])?;
        lab.settle(&agent)?;
        for vip in vips {
            let vip = vip.parse()?;
            for way in Way::ALL {
                let (to, from) = (SocketAddr::new(vip, 80), SocketAddr::new(vip, 0));
                let seen = match client.dial_from(way, &to.to_string(), Some(from)) {
                    Ok(dialled) => dialled.name,
                    Err(error) => error.downcast::<Errno>()?.name,
                };
                assert_eq!(seen, expected, "FLOW-4 {row}: {way:?} from {vip} to itself");
            }
        }
    }
    Ok(())
}

#[test]
fn hints_lead_to_the_same_node_or_zone_and_a_changed_node_label_is_taken_up_live() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [(10, "A"), (11, "B"), (12, "C")].map(|(number, name)| lab.n1().server(number, name));
    let client = lab.n1().pod(20)?.place.client()?;
    let zones = |zones: &[&str]| json!({"forZones": zones.iter().map(|z| json!({"name": z})).collect::<Vec<_>>()});
    let both = |zone: &str, node: &str| json!({"forZones": [{"name": zone}], "forNodes": [{"name": node}]});
    let slice = |hints: [Value; 3]| {
        let endpoints = ["10.244.1.10", "10.244.1.11", "10.244.1.12"].into_iter().zip(hints);
        endpoints.fold(Slice::web("h"), |slice, (address, hints)| slice.ready(address, "n2").with("hints", hints))
    };
    let by_zone = slice([zones(&["zone-1"]), zones(&["zone-2"]), zones(&["zone-1", "zone-3"])]);
    let by_node = slice([both("zone-1", "n2"), both("zone-2", "n1"), both("zone-3", "n3")]);
    let unhinted = slice([zones(&["zone-1"]), zones(&["zone-2"]), Value::Null]);
    let node_half = slice([both("zone-1", "n2"), zones(&["zone-2"]), both("zone-3", "n1")]);
    let service = Svc::web("h", "10.96.0.42");
    lab.apply(&[&service.clone().set("trafficDistribution", json!("PreferSameZone"))])?;
    for (row, zone, slice, expected) in [
        ("F25: the field alone means nothing", "zone-1", &slice([Value::Null, Value::Null, Value::Null]), "A B C"),
        ("C01", "zone-1", &by_zone, "A C"),
        ("TP-3: label changed", "zone-2", &by_zone, "B"),
        ("TP-3: and again", "zone-3", &by_zone, "C"),
        ("C05: no zone", "", &by_zone, "A B C"),
        ("C06: a zone without endpoints", "zone-9", &by_zone, "A B C"),
        ("C09: one without hint", "zone-1", &unhinted, "A B C"),
        ("C12: node before zone", "zone-1", &by_node, "B"),
        ("C14: zone where a node hint is missing", "zone-2", &node_half, "B"),
    ] {
        lab.apply(&[&node_with(1, zone, &["192.0.2.11", "2001:db8::11"]), slice])?;
        lab.settle(&agent)?;
        assert_eq!(names(&client, "10.96.0.42:80")?, set(expected), "{row}");
    }
    // C02, F17: policies know no hints.
    lab.apply(&[
        &node_with(1, "zone-1", &["192.0.2.11"]),
        &by_zone.clone().ready("10.244.1.11", "n1"),
        &service.set("internalTrafficPolicy", json!("Local")),
    ])?;
    lab.settle(&agent)?;
    assert_eq!(names(&client, "10.96.0.42:80")?, set("B"), "F25: not applied to Local");
    Ok(())
}
