//! The packet path on networks as they are: small links, fragments, a full turn of the flow table.

use std::{fs, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::Way,
    lab::Lab,
    transfer::{in_both_families, near_far_seen, reached, reached_behind_extensions, serve},
    wait::{SOON, eventually},
};

/// F33: links in the middle that are smaller than both ends believe. Nothing gets through unless "too big" finds its way
/// back through both translations, to the client and to the backend. F34: and datagrams in fragments, both ways.
#[test]
fn path_mtu_is_found_through_a_node_port_in_both_directions() -> Result<()> {
    in_both_families(|lab| {
        lab.n1().host.ip("link set pod10 mtu 1320")?;
        lab.n2().host.ip("link set pod20 mtu 1320")?;
        // So near that fragments for one pass the other: a veth swallows what is longer than its other end takes by
        // more than four bytes, and tells nobody.
        lab.fabric.ip("link set outside mtu 1316")
    })
}

/// F34: datagrams of several fragments, both ways, to hidden and visible clients.
#[test]
fn fragments_follow_their_first_one() -> Result<()> {
    in_both_families(|_| Ok(()))
}

/// Extension headers of IPv6 stand between the addresses and the ports, and with fragments before and behind what tells
/// those apart. A server answers with the same.
#[test]
fn ports_are_found_behind_extension_headers() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = near_far_seen(&lab)?;
    let _agent = lab.n1().agent()?;
    reached_behind_extensions(&lab, &a, &b)
}

/// Pitfall of veth pairs: partial checksums are never verified between them. Here nobody leaves one to a device.
#[test]
fn checksums_are_right_where_devices_do_not_make_them() -> Result<()> {
    in_both_families(|lab| {
        let pods = ["10", "20"].map(|n| format!("{}-{}-{n}", lab.name, if n == "10" { "n1" } else { "n2" }));
        for netns in pods {
            let output = Command::new("ip")
                .args(["netns", "exec", &netns, "ethtool", "-K", "eth0", "tx", "off", "rx", "off"])
                .output()
                .context("cannot start ethtool")?;
            ensure!(output.status.success(), "ethtool: {}", String::from_utf8_lossy(&output.stderr));
        }
        for place in [&lab.outside, &lab.n1().host, &lab.n2().host] {
            place.run("ethtool", &["-K", "eth0", "tx", "off", "rx", "off"])?;
        }
        Ok(())
    })
}

/// Pods on a bridge, as many CNIs have them.
#[test]
fn pods_on_a_bridge() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = near_far_seen(&lab)?;
    lab.n1().bridge(&[&a])?;
    lab.n2().bridge(&[&b])?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    reached(&lab, &a, &b)
}

/// The other node's pods behind an overlay with a smaller MTU, both families in a tunnel of IPv4: hidden clients get the
/// overlay device's address.
#[test]
fn backends_behind_an_overlay() -> Result<()> {
    in_both_families(|lab| {
        for (node, other) in [(lab.n1(), lab.n2()), (lab.n2(), lab.n1())] {
            let (here, there, remote) = (node.number, other.number, other.v4);
            node.host.ip(&format!(
                "link add vx0 type vxlan id 7 dstport 8472 local {} remote {remote} dev eth0
                 addr add 10.245.{here}.0/32 dev vx0
                 addr add 2001:db8:245::{here}/128 dev vx0 nodad
                 link set vx0 up
                 route add 10.245.{there}.0/32 dev vx0
                 route add 2001:db8:245::{there}/128 dev vx0
                 route replace 10.244.{there}.0/24 via 10.245.{there}.0 dev vx0 onlink
                 route replace 2001:db8:{there}::/64 via 2001:db8:245::{there} dev vx0 onlink",
                node.v4
            ))?;
        }
        Ok(())
    })
}

/// A CNI's rules in the way: connection tracking on, what it calls invalid dropped, forwarding closed but for pods, and
/// whoever is no pod masqueraded towards pods.
#[test]
fn netfilter_rules_in_the_way() -> Result<()> {
    const RULES: &str = "
        table inet cni {
          chain forward {
            type filter hook forward priority 0; policy drop;
            ct state invalid drop
            ct state established,related accept
            ip daddr 10.244.0.0/16 accept
            ip saddr 10.244.0.0/16 accept
            ip6 daddr 2001:db8::/32 accept
          }
          chain postrouting {
            type nat hook postrouting priority 100;
            ip saddr 10.244.0.0/16 ip daddr != 10.244.0.0/16 ip daddr != 198.51.100.0/24 masquerade
            ip saddr != 10.244.0.0/16 ip daddr 10.244.0.0/16 oifname eth0 masquerade
          }
        }";
    if Command::new("nft").arg("--version").output().is_err() {
        sheave_tests::skip("the program nft is missing (package nftables)");
        return Ok(());
    }
    in_both_families(|lab| {
        let file = lab.manifests.with_file_name("rules.nft");
        fs::write(&file, RULES)?;
        for node in &lab.nodes {
            node.host.run("nft", &["-f", &file.to_string_lossy()])?;
        }
        Ok(())
    })
}

/// A closed port of a backend is told to the client by whoever it dialled, at once.
#[test]
fn a_backends_refusal_reaches_the_client() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let _pods = near_far_seen(&lab)?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    let outside = lab.outside.client()?;
    for way in [Way::Tcp, Way::Udp] {
        for to in [
            "192.0.2.11:30001",
            "192.0.2.11:30002",
            "192.0.2.11:30003",
            "[2001:db8::11]:30001",
            "[2001:db8::11]:30002",
            "[2001:db8::11]:30003",
        ] {
            assert_eq!(outside.refusal(way, to)?, "ECONNREFUSED", "{way:?} {to}");
        }
    }
    Ok(())
}

/// Flows are listed by name while they live and forgotten when they are closed.
#[test]
fn flows_are_listed_and_forgotten() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let a = lab.n1().pod(10)?;
    let _server = a.place.echo("a", &["7000/TCP", "7000/UDP"])?;
    serve(&lab, "near", 1, &a, "Cluster")?;
    let agent = lab.n1().agent()?;
    let outside = lab.outside.client()?;
    let flows = |filter: &[&str]| -> Result<Vec<Value>> {
        let text = agent.sheave(&[&["lb", "list", "--conntrack", "-o", "json"], filter].concat())?;
        let list: Value = serde_json::from_str(&text)?;
        Ok(list["items"].as_array().context("no items")?.clone())
    };
    assert_eq!(flows(&[])?, Vec::<Value>::new());

    let socket = outside.connect(Way::Tcp, "192.0.2.11:30001")?;
    let seen_as = socket.ask()?.answer.client.to_string();
    let listed = flows(&[])?;
    assert_eq!(listed.len(), 1, "{listed:?}");
    for (field, value) in [
        ("protocol", json!("TCP")),
        ("client", json!(socket.local()?.to_string())),
        ("frontend", json!("192.0.2.11:30001")),
        ("backend", json!("10.244.1.10:7000")),
        ("masqueradedAs", json!(seen_as)),
        ("service", json!("t/near")),
        ("state", json!("open")),
    ] {
        assert_eq!(listed[0][field], value, "{field}");
    }
    assert_eq!(flows(&["--client", "198.51.100.0/24"])?.len(), 1);
    assert_eq!(flows(&["--client", "203.0.113.0/24"])?.len(), 0);
    assert_eq!(flows(&["-n", "other"])?.len(), 0);

    drop(socket);
    eventually("both sides have closed", SOON, || {
        let state = flows(&[])?[0]["state"].clone();
        ensure!(state == "closed", "it is {state}");
        Ok(())
    })?;
    eventually("it is forgotten", Duration::from_secs(40), || {
        let left = flows(&[])?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
}
