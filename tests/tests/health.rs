//! What load balancers, kubelets and scrapers ask a node.

use anyhow::{Result, ensure};
use sheave_tests::{
    http::get,
    lab::Lab,
    objects,
    place::Place,
    wait::{SOON, eventually},
};

/// Waits until a path of 10256 has that code on both families.
fn expect(asker: &Place, path: &str, code: u16) -> Result<()> {
    eventually(&format!("{path} is {code}"), SOON, || {
        for server in ["192.0.2.11:10256", "[2001:db8::11]:10256"] {
            let reply = get(asker, server, path)?;
            ensure!(reply.code == code, "{server} says {reply:?}");
            ensure!(reply.headers["x-content-type-options"] == "nosniff", "{reply:?}");
        }
        Ok(())
    })
}

#[test]
fn a_node_is_healthy_from_outside_on_both_families_until_it_is_to_be_drained() -> Result<()> {
    let Some((lab, _agent)) = Lab::with_agent()? else { return Ok(()) };
    for path in ["/healthz", "/livez", "/readyz"] {
        expect(&lab.outside, path, 200)?;
    }
    let reply = get(&lab.outside, "192.0.2.11:10256", "/healthz")?;
    ensure!(reply.headers["content-type"] == "application/json", "{reply:?}");
    for part in [r#"{"lastUpdated":""#, r#""nodeEligible":true,"healthy":true,"status":{"IPv4":{"#, r#""IPv6":{"#] {
        ensure!(reply.body.contains(part), "{reply:?} lacks {part}");
    }
    assert_eq!(get(&lab.outside, "192.0.2.11:10256", "/metrics")?.code, 404);

    lab.apply(&[&objects::tainted_node(1, "ToBeDeletedByClusterAutoscaler")])?; // NE-3
    expect(&lab.outside, "/healthz", 503)?;
    expect(&lab.outside, "/livez", 200)?;
    lab.apply(&[&objects::tainted_node(1, "example.com/other")])?; // NE-2
    expect(&lab.outside, "/healthz", 200)
}

#[test]
fn a_taken_port_is_waited_for() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let other = lab.n1().host.echo("other", &["10256/TCP"])?;
    let agent = lab.n1().agent()?;
    eventually("the agent complains once", SOON, || {
        let log = agent.log();
        ensure!(log.matches("cannot serve /healthz yet").count() == 1, "{log}");
        Ok(())
    })?;
    drop(other);
    expect(&lab.outside, "/healthz", 200)
}
