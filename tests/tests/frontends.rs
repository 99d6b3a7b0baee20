//! Load-balancer and external addresses from the inside, who owns what several claim, and Services that change their
//! type or belong to somebody else.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use sheave_tests::{
    agent::Agent,
    client::{Client, LoadKind, Way},
    lab::Lab,
    objects::{Slice, Svc},
    place::Place,
    wait::{SOON, eventually},
};

fn client(place: &Place) -> Result<Client> {
    let mut client = place.client()?;
    client.patience = Duration::from_secs(1);
    Ok(client)
}

/// F04, FLOW-10: V-8.
#[test]
fn a_load_balancer_in_proxy_mode_wants_the_traffic_itself() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let clients = [("host", client(&lab.n1().host)?), ("pod", client(&lab.n1().pod(20)?.place)?)];
    let tap = lab.fabric.tap()?;
    let mut through = 0;
    for (row, service, is_ours) in [
        ("VIP", Svc::web("lb", "10.96.0.50").ingress("203.0.113.50", "VIP"), true),
        ("Proxy", Svc::web("lb", "10.96.0.50").ingress("203.0.113.50", "Proxy"), false),
        ("VIP again", Svc::web("lb", "10.96.0.50").ingress("203.0.113.50", "VIP"), true),
        ("no status", Svc::web("lb", "10.96.0.50").set("type", json!("LoadBalancer")), false),
    ] {
        lab.apply(&[&service, &Slice::web("lb").ready("10.244.1.10", "n1")])?;
        lab.settle(&agent)?;
        for (from, client) in &clients {
            for way in Way::ALL {
                let outcome = client.outcome(way, "203.0.113.50:80")?;
                assert_eq!(outcome == "A", is_ours, "{row}: {from}, {way:?} is answered by {outcome}");
                assert_eq!(client.outcome(way, "10.96.0.50:80")?, "A", "{row}: {from}, {way:?} to the cluster IP");
            }
        }
        let now = tap.to("203.0.113.50")?;
        assert_eq!(now > through, !is_ours, "{row}: on its way to the balancer");
        through = now;
    }
    Ok(())
}

/// F05: the answer to CVE-2020-8554 is the operator's.
#[test]
fn external_ips_obey_the_switch_and_the_list() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let service = Svc::web("ext", "10.96.0.51").set("externalIPs", json!(["203.0.113.51", "203.0.113.151"]));
    lab.apply(&[&service, &Slice::web("ext").ready("10.244.1.10", "n1")])?;
    let client = client(&lab.n1().pod(20)?.place)?;
    for (flags, first, second) in [
        (&[][..], true, true),
        (&["--external-ip-cidrs=203.0.113.0/25,198.18.0.0/15"], true, false),
        (&["--external-ip-cidrs=203.0.113.128/25"], false, true),
        (&["--allow-service-external-ips=false"], false, false),
        (&["--allow-service-external-ips=false", "--external-ip-cidrs=203.0.113.0/24"], false, false),
        (&["--allow-service-external-ips=true"], true, true),
    ] {
        let _agent = lab.n1().agent_with(flags)?;
        for (to, expected) in [("203.0.113.51:80", first), ("203.0.113.151:80", second), ("10.96.0.51:80", true)] {
            for way in [Way::Tcp, Way::UdpSendto] {
                let outcome = client.outcome(way, to)?;
                assert_eq!(outcome == "A", expected, "{flags:?}: {way:?} {to} is answered by {outcome}");
            }
        }
    }
    Ok(())
}

/// SK-1 to SK-7, SVC-29: gained = deleted, lost = added.
#[test]
fn services_of_another_proxy_and_headless_ones_are_left_alone_live() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let client = client(&lab.n1().pod(20)?.place)?;
    let web = Svc::web("web", "10.96.0.52");
    let slice = Slice::web("web").ready("10.244.1.10", "n1");
    let refused = "ECONNREFUSED";
    for (row, service, slice, expected) in [
        ("plain", web.clone(), &slice, "A"),
        (
            "SK-5: label gained",
            web.clone().label("service.kubernetes.io/service-proxy-name", "foo"),
            &slice,
            "left alone",
        ),
        (
            "SK-5: whatever its value",
            web.clone().label("service.kubernetes.io/service-proxy-name", ""),
            &slice,
            "left alone",
        ),
        ("SK-5: label lost", web.clone(), &slice, "A"),
        (
            "SK-7: a headless slice does not count",
            web.clone(),
            &slice.clone().label("service.kubernetes.io/headless", ""),
            refused,
        ),
        ("SK-7: label lost", web.clone(), &slice, "A"),
        ("SVC-18: headless label on the Service", web.clone().label("service.kubernetes.io/headless", ""), &slice, "A"),
        ("F52: annotation", web.clone().annotate("sheave.io/skip", "true"), &slice, "left alone"),
        ("F52: annotation lost", web.clone().annotate("sheave.io/skip", "false"), &slice, "A"),
        ("SK-2: no cluster IP", Svc::new("web").port("t", 80, "TCP"), &slice, "left alone"),
        ("back", web, &slice, "A"),
    ] {
        let tap = lab.fabric.tap()?;
        lab.apply(&[&service, slice])?;
        lab.settle(&agent)?;
        for way in Way::ALL {
            let outcome = client.outcome(way, "10.96.0.52:80")?;
            if expected == "left alone" {
                assert_ne!(outcome, "A", "{row}: {way:?}");
            } else {
                assert_eq!(outcome, expected, "{row}: {way:?}");
            }
        }
        assert_eq!(tap.to("10.96.0.52")? > 0, expected == "left alone", "{row}: it goes where routing sends it");
    }
    Ok(())
}

/// Case 07 and its neighbours: what a type no longer has is gone, what it keeps goes on.
#[test]
fn a_service_that_changes_its_type_keeps_exactly_what_the_new_one_has() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let client = client(&lab.n1().pod(20)?.place)?;
    let plain = || Svc::new("x").ip("10.96.0.53").port("t", 80, "TCP");
    let external_name = Svc::new("x").port("t", 80, "TCP").set("type", json!("ExternalName"));
    lab.apply(&[&Slice::web("x").ready("10.244.1.10", "n1")])?;
    let (cip, np, lb) = ("10.96.0.53:80", "192.0.2.11:30053", "203.0.113.53:80");
    for (row, service, served) in [
        ("ClusterIP", plain(), vec![cip]),
        ("NodePort", plain().node_port(30053), vec![cip, np]),
        ("LoadBalancer", plain().node_port(30053).ingress("203.0.113.53", "VIP"), vec![cip, np, lb]),
        ("LoadBalancer without node ports", plain().ingress("203.0.113.53", "VIP"), vec![cip, lb]),
        ("ExternalName", external_name.set("externalName", json!("a.example.org")), vec![]),
        ("NodePort again", plain().node_port(30053), vec![cip, np]),
        ("headless", Svc::new("x").ip("None").port("t", 80, "TCP"), vec![]),
        ("ClusterIP again", plain(), vec![cip]),
    ] {
        lab.apply(&[&service])?;
        let lines: Vec<_> = served.iter().map(|at| format!("{at}/TCP → 10.244.1.10:8080")).collect();
        agent.expect("x", &lines.iter().map(String::as_str).collect::<Vec<_>>())?;
        for to in [cip, np, lb] {
            let outcome = client.outcome(Way::Tcp, to)?;
            assert_eq!(outcome == "A", served.contains(&to), "{row}: {to} is answered by {outcome}");
        }
    }
    Ok(())
}

/// Case 12: an address shared by two Services with different ports, for a pod and from outside.
#[test]
fn case_12_deleting_one_service_leaves_the_others_ports_of_an_external_ip() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    lab.route("203.0.113.0/24", lab.n1())?;
    let clients = [client(&lab.n1().pod(20)?.place)?, client(&lab.outside)?];
    let service = |name: &str, ip: &str, port| {
        Svc::new(name).ip(ip).port("t", port, "TCP").set("externalIPs", json!(["203.0.113.20"]))
    };
    let (e1, e2) = (service("e1", "10.96.0.54", 80), service("e2", "10.96.0.55", 443));
    let (s1, s2) = (Slice::web("e1").ready("10.244.1.10", "n1"), Slice::web("e2").ready("10.244.1.11", "n1"));
    lab.apply(&[&e1, &s1, &e2, &s2])?;
    lab.settle(&agent)?;
    for client in &clients {
        assert_eq!(client.outcome(Way::Tcp, "203.0.113.20:80")?, "A");
    }
    let loads = clients.iter().map(|client| client.load(Way::Tcp, LoadKind::Dial, "203.0.113.20:443", Duration::ZERO));
    let loads = loads.collect::<Result<Vec<_>>>()?;
    for _ in 0..3 {
        lab.delete(&[&e1])?;
        lab.settle(&agent)?;
        lab.apply(&[&e1])?;
        lab.settle(&agent)?;
    }
    for load in loads {
        let report = load.stop()?;
        assert!(report.failed == 0 && report.names.keys().eq(["B"]), "{report:?}");
    }
    Ok(())
}

/// The Service that owns an address of those named; says which, and that the others are marked.
fn owner(agent: &Agent, frontend: (&str, u16), names: [&str; 2]) -> Result<String> {
    let services = agent.services()?;
    let mut owners = Vec::new();
    for service in services.iter().filter(|service| names.contains(&service.name.as_str())) {
        for f in service.frontends.iter().filter(|f| (f.address.as_str(), f.port) == frontend) {
            if f.programmed {
                owners.push(service.name.clone());
            } else {
                let message = f.message.as_deref().unwrap_or_default();
                ensure!(
                    message.starts_with("the address and port belong to the Service t/")
                        && message.ends_with("which is older"),
                    "{}: {message:?}",
                    service.name
                );
            }
        }
    }
    ensure!(owners.len() == 1, "{frontend:?} has the owners {owners:?}");
    Ok(owners.remove(0))
}

/// Cases 12 and 29: the older Service has it, on every node, after every restart; and no backend of another.
#[test]
fn a_contested_address_has_one_owner_everywhere() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "old")?, lab.n1().server(11, "new")?];
    let external = |name: &str, ip: &str, created| {
        let service = Svc::new(name).ip(ip).port("t", 8443, "TCP").created(created);
        service.set("externalIPs", json!(["203.0.113.21"]))
    };
    let node_port =
        |name: &str, ip: &str, created| Svc::new(name).ip(ip).port("t", 80, "TCP").created(created).node_port(30050);
    let (e_old, e_new) = (external("z-old", "10.96.0.56", 1), external("a-new", "10.96.0.57", 2));
    let (n_old, n_new) = (node_port("n-z-old", "10.96.0.58", 1), node_port("n-a-new", "10.96.0.59", 2));
    let slice = |service: &str, address: &str| Slice::web(service).ready(address, "n1");
    lab.apply(&[&slice("z-old", "10.244.1.10"), &slice("n-z-old", "10.244.1.10")])?;
    lab.apply(&[&slice("a-new", "10.244.1.11"), &slice("n-a-new", "10.244.1.11")])?;
    let mut agents = [lab.n1().agent()?, lab.n2().agent()?];
    let (clients, outside) = ([client(&lab.n1().host)?, client(&lab.n2().host)?], client(&lab.outside)?);
    let check = |agents: &[Agent; 2], row: &str, expected: &str| -> Result<()> {
        for (node, (agent, client)) in agents.iter().zip(&clients).enumerate() {
            let own = format!("192.0.2.1{}", node + 1);
            for (at, names) in [(("203.0.113.21", 8443), ["z-old", "a-new"]), ((&*own, 30050), ["n-z-old", "n-a-new"])]
            {
                eventually(&format!("{row}: node {node}"), SOON, || {
                    let owner = owner(agent, at, names)?;
                    ensure!(owner.ends_with(expected), "{at:?} belongs to {owner}");
                    Ok(())
                })?;
                let answered = client.dial_many(Way::Tcp, &format!("{}:{}", at.0, at.1), 20)?;
                assert!(answered.keys().eq([expected]), "{row}: {at:?} on node {node}: {answered:?}");
            }
            let answered = outside.dial_many(Way::Tcp, &format!("{own}:30050"), 20)?;
            assert!(answered.keys().eq([expected]), "{row}: node {node}, from outside: {answered:?}");
        }
        Ok(())
    };
    // Each agent is told in another order: the younger first, and while n2's agent is away the older comes.
    lab.apply(&[&e_new, &n_new])?;
    check(&agents, "alone", "new")?;
    agents[1].terminate()?;
    lab.apply(&[&e_old, &n_old])?;
    agents[1].restart()?;
    check(&agents, "both", "old")?;
    for agent in &mut agents {
        agent.kill()?;
        agent.restart()?;
    }
    check(&agents, "after a restart", "old")?;
    let status = agents[0].status()?;
    let claimed = "belong to another Service that also claims them";
    assert!(status.warnings.iter().any(|warning| warning.contains(claimed)), "{status:?}");
    assert_eq!(
        (status.health.as_str(), status.problems.len()),
        ("ok", 0),
        "a wish of somebody's, no fault of the node"
    );
    lab.delete(&[&e_old, &n_old])?; // (a)
    check(&agents, "(a) the older is gone", "new")?;
    lab.apply(&[&e_old, &n_old])?;
    check(&agents, "both again", "old")?;
    lab.delete(&[&e_new, &n_new])?; // (b)
    check(&agents, "(b) the younger is gone", "old")?;
    lab.apply(&[&e_new, &n_new])?; // (c) ADD new …
    check(&agents, "(c) added", "old")?;
    lab.delete(&[&e_old, &n_old])?; // … DELETE old
    check(&agents, "(c) the late delete takes nothing from the new one", "new")
}
