//! What sheave must not touch: Services that others serve, sockets that are none of its business.

use std::{fs, time::Duration};

use anyhow::Result;
use serde_json::json;
use sheave_tests::{
    client::{Client, Way},
    lab::Lab,
    objects::{Slice, Svc},
    place::Place,
};

const DNS: &str = "10.96.0.10:80";

fn client(place: &Place) -> Result<Client> {
    let mut client = place.client()?;
    client.patience = Duration::from_secs(1);
    Ok(client)
}

/// F52: the cache of NodeLocal DNS listens on the cluster IP itself.
#[test]
fn a_skipped_service_is_left_to_the_cache_on_the_node() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    lab.n1().host.ip("addr add 10.96.0.10/32 dev lo")?;
    let _cache = lab.n1().host.echo("the cache", &["80/TCP", "80/UDP"])?;
    let clients = [("host", client(&lab.n1().host)?), ("pod", client(&lab.n1().pod(20)?.place)?)];
    let check = |row: &str, expected: &str| -> Result<()> {
        for (from, client) in &clients {
            // TCP: over UDP the cache would have to answer from the address that was asked.
            assert_eq!(client.outcome(Way::Tcp, DNS)?, expected, "{row}: {from}");
            for way in [Way::Udp, Way::UdpSendto] {
                assert_eq!(client.outcome(way, DNS)? == "A", expected == "A", "{row}: {from}, {way:?}");
            }
        }
        Ok(())
    };
    let slice = Slice::web("dns").ready("10.244.1.10", "n1");
    let service = || Svc::web("dns", "10.96.0.10");
    for (row, service, expected) in [
        ("plain", service(), "A"),
        ("annotated", service().annotate("sheave.io/skip", "true"), "the cache"),
        ("annotated no", service().annotate("sheave.io/skip", "false"), "A"),
    ] {
        lab.apply(&[&service, &slice])?;
        lab.settle(&agent)?;
        check(row, expected)?;
    }
    drop(agent);
    for (row, flag, expected) in [
        ("flag", "--skip-services=t/dns,kube-system/other", "the cache"),
        ("another Service's flag", "--skip-services=kube-system/dns", "A"),
    ] {
        let _agent = lab.n1().agent_with(&[flag])?;
        check(row, expected)?;
    }
    Ok(())
}

/// F52 in its cheap form: DNS on every node, policy Local.
#[test]
fn internal_traffic_policy_local_keeps_dns_on_the_node() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "here")?, lab.n1().server(11, "elsewhere")?];
    let service = Svc::web("dns", "10.96.0.10").set("internalTrafficPolicy", json!("Local"));
    lab.apply(&[&service, &Slice::web("dns").ready("10.244.1.10", "n1").ready("10.244.1.11", "n2")])?;
    lab.settle(&agent)?;
    for place in [&lab.n1().host, &lab.n1().pod(20)?.place] {
        let client = client(place)?;
        for way in Way::ALL {
            assert!(client.dial_many(way, DNS, 20)?.keys().eq(["here"]), "{way:?}");
        }
    }
    Ok(())
}

/// F53: meshes and virtual machines want to see the Service's address.
#[test]
fn host_sockets_only_leaves_pods_alone() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    lab.apply(&[&Svc::web("web", "10.96.0.90"), &Slice::web("web").ready("10.244.1.10", "n1")])?;
    let (host, pod) = (client(&lab.n1().host)?, client(&lab.n1().pod(20)?.place)?);
    for (flags, reached) in [(&[][..], true), (&["--host-sockets-only"], false)] {
        let _agent = lab.n1().agent_with(flags)?;
        // By the address as it goes through the node: a packet path may serve it there.
        let tap = lab.n1().host.tap()?;
        for way in Way::ALL {
            assert_eq!(host.outcome(way, "10.96.0.90:80")?, "A", "{flags:?}: host, {way:?}");
        }
        assert_eq!(tap.to("10.96.0.90")?, 0, "{flags:?}: host");
        let outcome = pod.outcome(Way::Tcp, "10.96.0.90:80")?;
        assert_eq!(tap.to("10.96.0.90")? == 0, reached, "{flags:?}: pod, answered by {outcome}");
    }
    Ok(())
}

/// F31: entries for unknown ports must not refuse what has no ports.
#[test]
fn ping_sockets_go_where_they_are_sent() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let server = lab.n1().server(10, "A")?;
    let pod = lab.n1().pod(20)?;
    lab.apply(&[&Svc::web("web", "10.96.0.91"), &Slice::web("web").ready("10.244.1.10", "n1")])?;
    lab.settle(&agent)?;
    for (from, place) in [("host", &lab.n1().host), ("pod", &pod.place)] {
        place.enter(|| fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0"))??;
        let client = client(place)?;
        assert_eq!(client.outcome(Way::Ping, &server.pod.at(7).to_string())?, "8 bytes", "{from}: to a pod");
        let ping = client.connect(Way::Ping, "10.96.0.91:7")?;
        ping.send(None)?;
        assert_eq!(ping.peer()?.ip().to_string(), "10.96.0.91", "{from}: a ping of a cluster IP is not refused");
        assert_eq!(client.outcome(Way::Tcp, "10.96.0.91:81")?, "ECONNREFUSED", "{from}: V-4");
    }
    Ok(())
}
