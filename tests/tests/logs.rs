//! What the agent logs: for machines on request, and only what somebody may want to act on.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::Way,
    lab::Lab,
    objects::{Object, Slice, Svc},
    wait::{SOON, eventually},
};

#[test]
fn json_lines_parse_and_their_number_depends_on_neither_objects_nor_packets() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let agent = lab.n1().agent_with(&["--log-format", "json"])?;
    let _server = lab.n1().server(10, "A")?;
    let client = lab.n1().host.client()?;
    lab.settle(&agent)?;
    let before = agent.log().lines().count();

    let services: Vec<_> =
        (0..200_u8).map(|i| Svc::new(&format!("s{i}")).ip(&format!("10.96.1.{i}")).port("t", 80, "TCP")).collect();
    let slice =
        |i: usize| Slice::new(&format!("s{i}-1"), &format!("s{i}")).port("t", 8080, "TCP").ready("10.244.1.10", "n1");
    let slices: Vec<_> = (0..services.len()).map(slice).collect();
    let objects =
        || services.iter().map(|svc| svc as &dyn Object).chain(slices.iter().map(|slice| slice as &dyn Object));
    lab.apply(&objects().collect::<Vec<_>>())?;
    lab.settle(&agent)?;
    for i in 0..200 {
        client.dial(Way::Tcp, &format!("10.96.1.{i}:80"))?;
    }
    lab.delete(&objects().collect::<Vec<_>>())?;
    lab.settle(&agent)?;
    let more = agent.log().lines().count() - before;
    ensure!(more < 20, "{more} lines for 400 objects and 200 connections:\n{}", agent.log());

    // A complaint is a line, once for as long as it stays the same.
    let broken = Svc::new("broken").ip("10.96.0.300").set("ports", json!("none"));
    lab.apply(&[&broken])?;
    let complaints = || agent.log().lines().filter(|line| line.contains("broken")).count();
    eventually("it is told", SOON, || {
        ensure!(complaints() > 0);
        Ok(())
    })?;
    for _ in 0..5 {
        lab.settle(&agent)?;
    }
    ensure!(complaints() == 1, "{}", agent.log());
    for line in agent.log().lines() {
        let entry: Value = serde_json::from_str(line).with_context(|| line.to_owned())?;
        for field in ["timestamp", "level", "message"] {
            ensure!(entry[field].is_string(), "{line} has no {field}");
        }
    }
    Ok(())
}
