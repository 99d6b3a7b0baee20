//! More than the maps hold. What fits works whole, what does not is said.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    client::Way,
    lab::Lab,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

const SERVICES: u8 = 200;
const BACKENDS: u8 = 20;

/// Case 34.
#[test]
fn case_34_a_service_works_whole_or_is_marked_as_left_out() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let addresses: Vec<_> = (1..=BACKENDS).map(|number| format!("10.244.9.{number}")).collect();
    let lines: Vec<_> = addresses.iter().map(|address| format!("addr add {address}/32 dev eth0")).collect();
    pod.place.ip(&lines.join("\n"))?;
    lab.n1().host.ip("route add 10.244.9.0/24 via 10.244.1.10 dev pod10 onlink")?;
    let agent = lab.n1().agent_with(&["--max-backends=1000"])?;

    let name = |number: u8| format!("s{number:03}");
    let ip = |number: u8| format!("10.96.2.{number}");
    let service = |number| Svc::new(&name(number)).ip(&ip(number)).port("http", 80, "TCP");
    let slice = |number| {
        let slice = Slice::new(&name(number), &name(number)).port("http", 8080, "TCP");
        addresses.iter().fold(slice, |slice, address| slice.ready(address, "n1"))
    };
    for number in 1..=SERVICES {
        lab.apply(&[&slice(number), &service(number)])?;
    }
    eventually("all are known, not all fit", SOON, || {
        let status = agent.status()?;
        ensure!(status.services == usize::from(SERVICES), "{} services", status.services);
        ensure!(status.frontends_programmed < status.frontends && status.health == "degraded", "{status:#?}");
        ensure!(status.problems.iter().any(|problem| problem.contains("--max-backends")), "{:?}", status.problems);
        Ok(())
    })?;
    let client = lab.n1().host.client()?;
    let check = || -> Result<usize> {
        let (services, kernel) = (agent.services()?, agent.kernel()?);
        let mut works = 0;
        for service in &services {
            let frontend = service.frontends.first().context("no frontend")?;
            let rows: Vec<_> = kernel.iter().filter(|row| row.service == Some(format!("t/{}", service.name))).collect();
            if frontend.programmed {
                ensure!(rows.len() == 1 && rows[0].backends.len() == usize::from(BACKENDS), "{rows:?}");
                ensure!(client.outcome(Way::Tcp, &format!("{}:80", frontend.address))? == "A", "{frontend:?}");
                works += 1;
            } else {
                ensure!(frontend.message.is_some(), "left out, and no word why: {frontend:?}");
                ensure!(rows.iter().all(|row| row.backends.is_empty()), "half programmed: {rows:?}");
            }
        }
        Ok(works)
    };
    let works = eventually("each works or is marked", SOON, check)?;
    assert!((30..=50).contains(&works), "{works} fit into 1000 backends");

    for number in 51..=SERVICES {
        lab.delete(&[&service(number), &slice(number)])?;
    }
    eventually("those that were left out are in", 3 * SOON, || {
        let status = agent.status()?;
        ensure!(status.services == 50 && status.frontends_programmed == status.frontends, "{status:#?}");
        ensure!(status.health == "ok", "{:?}", status.problems);
        Ok(())
    })?;
    assert_eq!(check()?, 50);
    Ok(())
}

/// `--max-source-ranges`: a Service whose ranges do not fit admits nobody at its load balancer's address, and says why;
/// all else of it, and the others, work. With fewer ranges it works without a restart.
#[test]
fn a_service_whose_source_ranges_do_not_fit_is_marked() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    lab.route("203.0.113.0/24", lab.n1())?;
    let agent = lab.n1().agent_with(&["--max-source-ranges=8"])?;
    let service = |name: &str, number: u8, ranges: u8| {
        let ranges: Vec<_> = (0..ranges).map(|n| format!("198.51.{}.0/24", 100 + n)).collect();
        let service = Svc::web(name, &format!("10.96.0.{number}")).ingress(&format!("203.0.113.{number}"), "VIP");
        service.set("loadBalancerSourceRanges", json!(ranges))
    };
    let slices = ["few", "many"].map(|name| Slice::web(name).ready("10.244.1.10", "n1"));
    // Each is there for TCP and for UDP.
    lab.apply(&[&slices[0], &slices[1], &service("few", 21, 2)])?;
    agent.until_programmed("few")?;
    lab.apply(&[&service("many", 22, 5)])?;
    eventually("what does not fit is said", SOON, || {
        let status = agent.status()?;
        ensure!(status.health == "degraded", "{status:?}");
        ensure!(status.problems.iter().any(|problem| problem.contains("--max-source-ranges")), "{:?}", status.problems);
        Ok(())
    })?;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    for (to, is_served) in [("203.0.113.21:80", true), ("203.0.113.22:80", false)] {
        let said = outside.outcome(Way::Tcp, to)?;
        assert_eq!(said == "A", is_served, "{to}: {said}");
    }
    lab.apply(&[&service("many", 22, 2)])?;
    eventually("fewer ranges fit", SOON, || {
        let status = agent.status()?;
        ensure!(status.health == "ok", "{:?}", status.problems);
        ensure!(outside.outcome(Way::Tcp, "203.0.113.22:80")? == "A", "not yet");
        Ok(())
    })
}

/// Sockets that are closed are not remembered: a node's many short questions leave no room taken.
#[test]
fn closed_sockets_are_forgotten() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let mut agent = lab.n1().agent()?;
    lab.apply(&[&Svc::web("web", "10.96.0.21"), &Slice::web("web").ready("10.244.1.10", "n1")])?;
    lab.settle(&agent)?;
    let (client, to) = (lab.n1().host.client()?, "10.96.0.21:80".parse()?);
    let long_lived = client.open(Way::UdpSendto, to, None)?;
    assert_eq!(long_lived.ask_at(to)?.source, to);
    for way in [Way::UdpSendto, Way::Udp] {
        for _ in 0..20 {
            let socket = client.open(way, to, None)?;
            assert_eq!(socket.ask_at(to)?.source, to, "{way:?}");
        }
    }
    // It counts at its start.
    agent.kill()?;
    agent.launch()?;
    eventually("the one that is open is remembered", SOON, || {
        let status = agent.status()?;
        let peers = status.maps.iter().find(|map| map.flag == "--max-peers").context("no such map")?;
        ensure!(peers.used == 1, "{peers:?}");
        Ok(())
    })
}

/// `--max-peers`: of more sockets than it remembers those that spoke last are still answered from the Service's address,
/// and the status says how full the map is.
#[test]
fn with_more_peers_than_fit_those_that_spoke_last_are_remembered() -> Result<()> {
    const PEERS: usize = 128;
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let mut agent = lab.n1().agent_with(&[&format!("--max-peers={PEERS}")])?;
    lab.apply(&[&Svc::web("web", "10.96.0.21"), &Slice::web("web").ready("10.244.1.10", "n1")])?;
    lab.settle(&agent)?;
    let (client, to) = (lab.n1().host.client()?, "10.96.0.21:80".parse()?);
    let mut sockets = Vec::new();
    for _ in 0..3 * PEERS {
        let socket = client.open(Way::UdpSendto, to, None)?;
        assert_eq!(socket.ask_at(to)?.source, to, "number {}", sockets.len());
        sockets.push(socket);
    }
    for socket in &sockets {
        assert_eq!(socket.ask_at(to)?.source, to, "one that was forgotten is remembered when it speaks");
    }
    // It counts at its start, and every now and then.
    agent.kill()?;
    agent.launch()?;
    eventually("the status says how full it is", SOON, || {
        let status = agent.status()?;
        let peers = status.maps.iter().find(|map| map.flag == "--max-peers").context("no such map")?;
        ensure!(peers.capacity == PEERS as u64 && peers.used > PEERS as u64 / 4, "{peers:?}");
        Ok(())
    })
}
