//! What packets meet at virtual addresses beside their Services' ports, and who counts as a pod there.

use std::{fs, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    client::Way,
    lab::Lab,
    objects::{Slice, Svc, node},
    wait::{SOON, eventually},
};

/// F32: pings are answered where the operator wants it, for addresses that exist.
#[test]
fn pings_of_virtual_addresses_are_answered_when_asked_for() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    for prefix in ["10.96.0.0/16", "203.0.113.0/24", "2001:db8:96::/64"] {
        lab.route(prefix, lab.n1())?;
    }
    let service = Svc::new("web").ip("10.96.0.41").ip("2001:db8:96::41").port("t", 80, "TCP");
    lab.apply(&[&service.ingress("203.0.113.41", "VIP").set("externalIPs", json!(["203.0.113.42"]))])?;
    lab.outside.enter(|| fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0"))??;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    let mut agent = lab.n1().agent()?;
    for (flags, answer) in [(&[][..], "TIMEOUT"), (&["--answer-pings"], "8 bytes")] {
        agent.kill()?;
        agent = lab.n1().agent_with(flags)?;
        for (to, outcome) in [
            ("10.96.0.41:7", answer),
            ("203.0.113.41:7", answer),
            ("203.0.113.42:7", answer),
            ("[2001:db8:96::41]:7", answer),
            ("10.96.0.99:7", "TIMEOUT"),
            ("192.0.2.11:7", "8 bytes"), // by the kernel, as ever
        ] {
            // A routing loop ends with an error, which is no answer either.
            let said = outside.outcome(Way::Ping, to)?;
            assert_eq!(said == "8 bytes", outcome == "8 bytes", "{flags:?} {to}: {said}");
        }
    }
    Ok(())
}

/// F31: what the network leads here and no Service serves would go back into the network, and the network here again. An
/// address that this host or another node has is left to whoever listens there.
#[test]
fn unknown_ports_of_virtual_addresses_are_refused_to_clients_outside() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    for prefix in ["203.0.113.0/24", "2001:db8:203::/64"] {
        lab.route(prefix, lab.n1())?;
    }
    let host = &lab.n1().host;
    host.ip("addr add 203.0.113.43/32 dev lo")?;
    let _pod = lab.n1().server(10, "a")?;
    let _hosts = [host.echo("n1", &["81/TCP"])?, lab.n2().host.echo("n2", &["81/TCP"])?];
    let service = Svc::new("web").ip("10.96.0.41").ip("2001:db8:96::41").port("t", 80, "TCP");
    let ips = ["203.0.113.42", "203.0.113.43", "192.0.2.11", "192.0.2.12", "2001:db8:203::42"];
    lab.apply(&[
        &service.ingress("203.0.113.41", "VIP").set("externalIPs", json!(ips)),
        &Slice::new("web", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1"),
        &node(1),
        &node(2),
    ])?;
    let (mut outside, mut inside) = (lab.outside.client()?, host.client()?);
    (outside.patience, inside.patience) = (Duration::from_secs(1), Duration::from_secs(1));
    let mut agent = lab.n1().agent()?;
    for (flags, is_refused) in [(&[][..], true), (&["--refuse-unknown-ports=false"], false)] {
        agent.kill()?;
        agent = lab.n1().agent_with(flags)?;
        for way in [Way::Tcp, Way::Udp] {
            for to in ["203.0.113.41:82", "203.0.113.42:82", "[2001:db8:203::42]:82"] {
                let said = outside.outcome(way, to)?;
                assert_eq!(said == "ECONNREFUSED", is_refused, "{flags:?} {way:?} {to}: {said}");
            }
            let said = inside.outcome(way, "10.96.0.41:82")?;
            assert_eq!(said == "ECONNREFUSED", is_refused, "V-4 {flags:?} {way:?} from the node: {said}");
        }
        for (to, name) in [
            ("203.0.113.41:80", "a"),
            ("192.0.2.11:80", "a"),
            ("203.0.113.43:81", "n1"),
            ("192.0.2.11:81", "n1"),
            ("192.0.2.12:81", "n2"),
        ] {
            assert_eq!(outside.outcome(Way::Tcp, to)?, name, "{flags:?} {to}");
        }
    }
    Ok(())
}

/// F54: ClusterIPs are served to whoever routes to them, as by kube-proxy; with the switch, to pods alone.
#[test]
fn cluster_ips_are_for_outsiders_unless_told_otherwise() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    lab.route("10.96.0.0/16", lab.n1())?;
    let (_server, pod) = (lab.n1().server(10, "a")?, lab.n1().pod(20)?);
    let service = Svc::new("web").ip("10.96.0.41").port("t", 80, "TCP").node_port(30_041);
    lab.apply(&[&service, &Slice::new("web", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1"), &node(1)])?;
    let (host, pod, mut outside) = (lab.n1().host.client()?, pod.place.client()?, lab.outside.client()?);
    outside.patience = Duration::from_secs(1);
    let mut agent = lab.n1().agent()?;
    let by_packet = ["--host-sockets-only", "--pod-packets=on"];
    for (flag, from_outside) in [("=true", "a"), ("=false", "TIMEOUT")] {
        let flag = format!("--cluster-ips-from-outside{flag}");
        agent.kill()?;
        agent = lab.n1().agent_with(&[&[flag.as_str()], &by_packet[..]].concat())?;
        for (from, client, to, outcome) in [
            ("outside", &outside, "10.96.0.41:80", from_outside),
            ("outside", &outside, "192.0.2.11:30041", "a"),
            ("a pod", &pod, "10.96.0.41:80", "a"),
            ("the node", &host, "10.96.0.41:80", "a"),
        ] {
            assert_eq!(client.outcome(Way::Tcp, to)?, outcome, "{flag}: {from} to {to}");
        }
    }
    assert!(agent.status()?.counters["packet_cluster_ip_from_outside"] > 0);
    Ok(())
}

/// V-5: an address of a service CIDR that no Service has is silent, and a neighbour of it is not.
#[test]
fn unknown_addresses_of_a_service_cidr_are_silent() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    lab.route("10.96.0.0/16", lab.n1())?;
    let server = lab.n1().server(10, "a")?;
    let slice = Slice::new("web", "web").port("t", 8080, "TCP").port("u", 8080, "UDP");
    let service = Svc::new("web").ip("10.96.0.41").port("t", 80, "TCP").port("u", 80, "UDP");
    lab.apply(&[&service, &slice.ready(&server.pod.v4.to_string(), "n1")])?;
    let agent = lab.n1().agent_with(&["--service-cidrs", "10.96.0.0/16"])?;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    for way in [Way::Tcp, Way::Udp] {
        for (to, outcome) in [("10.96.0.41:80", "a"), ("10.96.0.41:81", "ECONNREFUSED"), ("10.96.0.99:80", "TIMEOUT")] {
            assert_eq!(outside.outcome(way, to)?, outcome, "{way:?} {to}");
        }
    }
    assert!(agent.status()?.counters["packet_unknown_address"] > 0);
    Ok(())
}

/// DL-1 to DL-5: addresses or devices say who is a pod. A pod's connection to a ClusterIP is not masqueraded, others' are.
#[test]
fn addresses_or_devices_say_who_is_a_pod() -> Result<()> {
    const POD: &str = "10.244.1.20";
    const REMOTE: &str = "10.244.2.30";
    const HIDDEN: &str = "10.244.1.1";
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    lab.route("10.96.0.0/16", lab.n1())?;
    lab.n2().host.ip("route add 10.96.0.0/16 via 192.0.2.11")?; // its pods are served here, packet by packet
    let (server, inside, remote) = (lab.n1().server(10, "a")?, lab.n1().pod(20)?, lab.n2().pod(30)?);
    let service = Svc::new("web").ip("10.96.0.41").port("t", 80, "TCP");
    let slice = Slice::new("web", "web").port("t", 8080, "TCP");
    lab.apply(&[&service, &slice.ready(&server.pod.v4.to_string(), "n1")])?;
    let clients = [inside.place.client()?, remote.place.client()?, lab.outside.client()?];
    let by_packet = ["--host-sockets-only", "--pod-packets=on"];
    let by_device = |devices: &[(&str, usize)]| -> Result<()> {
        for (device, programs) in devices {
            eventually(&format!("{programs} programs on {device}"), SOON, || {
                let found = lab.n1().by_tcx(device)?;
                ensure!(found == *programs, "{found}");
                Ok(())
            })?;
        }
        Ok(())
    };
    let check = |flags: &[&str], devices: &[(&str, usize)], expected: [&str; 3]| -> Result<()> {
        let mut agent = lab.n1().agent_with(&[flags, &by_packet].concat())?;
        by_device(devices).with_context(|| format!("{flags:?}"))?;
        for (client, (from, seen)) in clients.iter().zip(["a pod", "a remote pod", "outside"].iter().zip(expected)) {
            let dialled = client.dial(Way::Tcp, "10.96.0.41:80").with_context(|| format!("{flags:?}, {from}"))?;
            assert_eq!(dialled.client.ip().to_string(), seen, "{flags:?}, {from}");
        }
        agent.kill()
    };
    for (flags, expected) in [
        (&["--detect-pods=cluster"][..], [POD, REMOTE, HIDDEN]),
        (&["--cluster-cidr=10.244.1.0/24,198.51.100.0/24"], [POD, HIDDEN, "198.51.100.10"]),
        (&["--detect-pods=node"], [POD, HIDDEN, HIDDEN]),
        (&["--detect-pods=prefix", "--pod-interface-name-prefix=pod"], [POD, HIDDEN, HIDDEN]),
        (&["--detect-pods=prefix", "--pod-interface-name-prefix=cali"], [HIDDEN, HIDDEN, HIDDEN]),
    ] {
        check(flags, &[("pod10", 2), ("pod20", 2)], expected)?;
    }
    // Their packets come by the bridge, whose ports need no programs.
    lab.n1().bridge(&[&server.pod, &inside])?;
    let devices = [("cni0", 2), ("pod10", 0), ("pod20", 0)];
    check(&["--detect-pods=bridge", "--pod-bridge-interface=cni0"], &devices, [POD, HIDDEN, HIDDEN])
}
