//! Where a running kube-proxy was seen to be wrong. Contested addresses are in `frontends.rs`,
//! UDP flows of emptied and deleted Services in `udp_follow.rs`, API servers that come late in `watch.rs`.

use std::time::Duration;

use anyhow::Result;
use serde_json::json;
use sheave_tests::{
    client::Way,
    lab::Lab,
    objects::{Slice, Svc, node_with},
};

#[test]
fn one_address_in_two_slices_is_as_good_as_its_best_condition_in_every_order() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let client = lab.n1().pod(20)?.place.client()?;
    let slice = |name: &str| Slice::new(name, "two").port("t", 8080, "TCP");
    lab.apply(&[&Svc::new("two").ip("10.96.0.80").port("t", 80, "TCP")])?;
    let conditions = [
        ("ready", json!({"ready": true, "serving": true, "terminating": false})),
        ("serving and terminating", json!({"ready": false, "serving": true, "terminating": true})),
        ("neither", json!({"ready": false, "serving": false, "terminating": false})),
    ];
    let a = "10.244.1.10";
    for (first, one) in &conditions {
        for (second, two) in &conditions {
            let best = if [first, second].contains(&&"neither") && first == second { "ECONNREFUSED" } else { "A" };
            let slices = [slice("two-1").endpoint(a, "n1", one), slice("two-2").endpoint(a, "n1", two)];
            for order in [[0, 1], [1, 0]] {
                for i in order {
                    lab.apply(&[&slices[i]])?;
                    lab.settle(&agent)?;
                }
                assert_eq!(client.outcome(Way::Tcp, "10.96.0.80:80")?, best, "{first}, {second}, in order {order:?}");
                lab.delete(&[&slices[0], &slices[1]])?;
            }
        }
    }
    // Ready somewhere beats serving and terminating elsewhere: B is not needed. And a restart changes nothing.
    let slices = [slice("two-1").terminating(a, "n1").terminating("10.244.1.11", "n1"), slice("two-2").ready(a, "n1")];
    lab.apply(&[&slices[0], &slices[1]])?;
    lab.settle(&agent)?;
    for turn in 0..3 {
        assert!(client.dial_many(Way::Tcp, "10.96.0.80:80", 20)?.keys().eq(["A"]), "after {turn} restarts");
        agent.kill()?;
        agent.restart()?;
    }
    Ok(())
}

/// NC-2.
#[test]
fn a_changed_internal_ip_of_the_node_is_taken_up_live() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let service = Svc::new("np").ip("10.96.0.81").ingress("203.0.113.81", "VIP").port("t", 80, "TCP").node_port(30081);
    let service = service.set("loadBalancerSourceRanges", json!(["192.0.2.111/32"]));
    lab.apply(&[&service, &Slice::web("np").ready("10.244.1.10", "n1")])?;
    lab.n1().host.ip("addr add 192.0.2.111/24 dev eth0")?;
    lab.settle(&agent)?;
    let mut client = lab.n1().host.client()?;
    client.patience = Duration::from_secs(1);
    let (old, new, vip) = ("192.0.2.11:30081", "192.0.2.111:30081", "203.0.113.81:80");
    let steps = [
        ("before", &["192.0.2.11"][..], [("A", old), ("ECONNREFUSED", new), ("TIMEOUT", vip)]),
        ("changed", &["192.0.2.111"], [("ECONNREFUSED", old), ("A", new), ("A", vip)]),
        ("both; the first is primary", &["192.0.2.111", "192.0.2.11"], [("ECONNREFUSED", old), ("A", new), ("A", vip)]),
        ("changed back", &["192.0.2.11"], [("A", old), ("ECONNREFUSED", new), ("TIMEOUT", vip)]),
    ];
    for (step, ips, outcomes) in steps {
        lab.apply(&[&node_with(1, "zone-1", ips)])?;
        lab.settle(&agent)?;
        for (expected, to) in outcomes {
            assert_eq!(client.outcome(Way::Tcp, to)?, expected, "{step}: {to}");
        }
    }
    // NC-3: the Node object goes, the datapath stays.
    lab.delete(&[&node_with(1, "", &[])])?;
    lab.settle(&agent)?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.81:80")?, "A", "NC-3");
    Ok(())
}

#[test]
fn leading_zeros_and_blanks_in_addresses_are_accepted_on_reading() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let service = Svc::new("old").ip("010.096.000.082").port("t", 80, "TCP");
    let service = service.set("externalIPs", json!([" 203.0.113.082 "]));
    lab.apply(&[&service, &Slice::web("old").ready("010.244.001.010", "n1")])?;
    agent.expect("old", &["10.96.0.82:80/TCP → 10.244.1.10:8080", "203.0.113.82:80/TCP → 10.244.1.10:8080"])?;
    let client = lab.n1().pod(20)?.place.client()?;
    for to in ["10.96.0.82:80", "203.0.113.82:80"] {
        assert_eq!(client.outcome(Way::Tcp, to)?, "A", "{to}");
    }
    Ok(())
}
