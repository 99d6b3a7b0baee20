//! How packets are refused: in the host's stead, once, and nobody else's.

use std::{
    net::{IpAddr, UdpSocket},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    agent::Agent,
    client::Client,
    lab::Lab,
    objects::{Slice, Svc},
    pair::WAYS,
    skip,
    wait::{SOON, eventually},
};

/// Nothing answers: long enough to be sure.
const SILENCE: Duration = Duration::from_secs(1);

/// A Service without endpoints, number 7, and one whose only endpoint is on another node, Local, number 8; both at a
/// NodePort and at external addresses that lead to n1. n1's agent, and a client outside.
fn refusing(lab: &Lab) -> Result<(Agent, Client)> {
    for (name, number) in [("none", 7), ("far", 8)] {
        let service = Svc::new(name).ip(&format!("10.96.0.{number}")).ip(&format!("2001:db8:96::{number}"));
        let service = service.port("t", 80, "TCP").node_port(30_000 + number).port("u", 80, "UDP");
        let addresses = json!([format!("203.0.113.{number}"), format!("2001:db8:203::{number}")]);
        let service = service.node_port(30_000 + number).set("externalIPs", addresses);
        lab.apply(&[&service.set("externalTrafficPolicy", json!(if name == "far" { "Local" } else { "Cluster" }))])?;
    }
    for (family, address) in [("v4", "10.244.2.10"), ("v6", "2001:db8:2::10")] {
        let slice = Slice::new(&format!("far-{family}"), "far").port("t", 8080, "TCP").port("u", 8080, "UDP");
        lab.apply(&[&slice.ready(address, "n2")])?;
    }
    for prefix in ["203.0.113.0/24", "2001:db8:203::/64"] {
        lab.route(prefix, lab.n1())?;
    }
    let agent = lab.n1().agent()?;
    lab.settle(&agent)?;
    let mut outside = lab.outside.client()?;
    outside.patience = SILENCE;
    Ok((agent, outside))
}

/// V-1, V-4, F31: a refusal does not ask the host's firewall, as kube-proxy's rules do not.
#[test]
fn a_firewall_of_the_host_does_not_swallow_refusals() -> Result<()> {
    if Command::new("nft").arg("--version").output().is_err() {
        skip("the program nft is missing (package nftables)");
        return Ok(());
    }
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (_agent, outside) = refusing(&lab)?;
    let chain = "add chain inet fw in { type filter hook input priority 0; policy drop; }";
    let needed = "add rule inet fw in meta l4proto { icmp, ipv6-icmp } accept";
    lab.n1().host.run("nft", &[&format!("add table inet fw; {chain}; {needed}")])?;
    for way in WAYS {
        for (row, to) in [
            ("V-1", "192.0.2.11:30007"),
            ("V-1", "203.0.113.7:80"),
            ("V-1", "[2001:db8::11]:30007"),
            ("V-1", "[2001:db8:203::7]:80"),
            ("F31", "203.0.113.7:81"),
            ("F31", "[2001:db8:203::7]:81"),
        ] {
            assert_eq!(outside.refusal(way, to)?, "ECONNREFUSED", "{row}, {way:?} {to}");
        }
    }
    Ok(())
}

/// Frames that a switch floods, or that came to many, are no business of this node's.
#[test]
fn what_the_link_brings_for_others_is_left_alone() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (agent, outside) = refusing(&lab)?;
    let link = lab.n1().host.run("ip", &["-o", "link", "show", "dev", "eth0"])?;
    let mac = link.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).context("eth0 has no address")?;
    let refused = || -> Result<u64> { Ok(agent.status()?.counters.get("packet_reject").copied().unwrap_or_default()) };
    for (ip, prefix) in [("203.0.113.7", 32), ("2001:db8:203::7", 128)] {
        let to = if prefix == 32 { format!("{ip}:80") } else { format!("[{ip}]:80") };
        lab.fabric.ip(&format!("route replace {ip}/{prefix} dev br0"))?;
        for (whose, mac, outcome) in [
            ("another host's", "02:00:00:00:00:99", "TIMEOUT"),
            ("everybody's", "ff:ff:ff:ff:ff:ff", "TIMEOUT"),
            ("a group's", "01:00:5e:00:00:01", "TIMEOUT"),
            ("this node's", mac, "ECONNREFUSED"),
        ] {
            lab.fabric.ip(&format!("neigh replace {ip} lladdr {mac} nud permanent dev br0"))?;
            for way in WAYS {
                let before = refused()?;
                assert_eq!(outside.outcome(way, &to)?, outcome, "{way:?} {to}, {whose} link address");
                let is_counted = refused()? > before;
                assert_eq!(is_counted, outcome == "ECONNREFUSED", "{way:?} {to}, {whose} link address");
            }
        }
    }
    Ok(())
}

/// F31: of a datagram that is refused or dropped no fragment is routed on, back into the network that led it here. F34: its
/// first fragment is enough for an answer.
#[test]
fn fragments_of_what_is_stopped_are_stopped() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (_agent, _outside) = refusing(&lab)?;
    let tap = lab.n1().host.tap()?;
    for (row, ip, bind, is_refused) in [
        ("V-1", "203.0.113.7", "198.51.100.10", true),
        ("V-1", "2001:db8:203::7", "2001:db8:100::10", true),
        ("V-3", "203.0.113.8", "198.51.100.10", false),
        ("V-3", "2001:db8:203::8", "2001:db8:100::10", false),
    ] {
        const FRAGMENTS: u64 = 3; // of 4,000 bytes in packets of 1,500
        let answer = lab.outside.enter(|| -> Result<Option<i32>> {
            let socket = UdpSocket::bind((bind.parse::<IpAddr>()?, 0))?;
            socket.connect((ip.parse::<IpAddr>()?, 80))?;
            socket.set_read_timeout(Some(SILENCE))?;
            socket.send(&[0x55; 4000])?;
            Ok(socket.recv(&mut [0; 1]).err().context("somebody answers")?.raw_os_error())
        })??;
        let expected = if is_refused { libc::ECONNREFUSED } else { libc::EAGAIN };
        assert_eq!(answer, Some(expected), "{row}, {ip}");
        eventually("they have arrived", SOON, || {
            let seen = tap.to(ip)?;
            ensure!(seen >= FRAGMENTS, "{seen} of {FRAGMENTS}");
            Ok(())
        })?;
        assert_eq!(tap.to(ip)?, FRAGMENTS, "{row}, {ip}: what came was sent on");
    }
    Ok(())
}
