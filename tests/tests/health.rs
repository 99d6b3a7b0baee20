//! What load balancers, kubelets and scrapers ask a node.

use std::{fs, os::unix::fs::PermissionsExt as _, process::Command, time::Duration};

use anyhow::{Result, ensure};
use sheave_agent::observe::health::NOT_READY;
use sheave_tests::{
    agent::Paths,
    background::Background,
    client::Way,
    fake_api::{FakeApi, Fault},
    http::get,
    lab::Lab,
    objects::{self, Object as _, Slice, Svc},
    place::{Place, program},
    skip,
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

/// 39: what the chart's probe asks, and `/readyz` in the same words.
#[test]
fn a_node_is_not_ready_before_it_has_read_the_cluster() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let background = Background::start()?;
    let (api, kubeconfig) = FakeApi::on(&background, node)?;
    let mut agent = node.agent_of(&kubeconfig)?;
    let probe = || {
        let mut command = node.host.command(program("sheave")?)?;
        command.args(["status", "--ready", "--output=name", "--run-dir"]).arg(&node.paths().run);
        anyhow::Ok(command.output()?)
    };
    ensure!(probe()?.status.code() == Some(0), "{:?}", probe()?);

    agent.kill()?;
    ensure!(probe()?.status.code() == Some(1), "nobody there: {:?}", probe()?);
    api.faults(|_| Some(Fault::Status(503, "ServiceUnavailable")));
    agent.launch()?;
    eventually("it says why it is not ready", SOON * 3, || {
        let output = probe()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1) && said.contains(NOT_READY) && said.contains("503"), "{output:?}");
        Ok(())
    })?;
    expect(&lab.outside, "/readyz", 503)?;
    assert_eq!(get(&lab.outside, "192.0.2.11:10256", "/readyz")?.body, NOT_READY);

    api.faults(|_| None);
    eventually("it is ready", SOON * 3, || {
        let output = probe()?;
        ensure!(output.status.success() && output.stdout == b"n1\n", "{output:?}");
        Ok(())
    })?;
    expect(&lab.outside, "/readyz", 200)
}

/// 39 c: the name of the API server cannot be resolved yet. The agent waits, what is pinned serves, and no restart is
/// needed.
#[test]
fn case_39_a_name_that_does_not_resolve_yet_is_waited_for() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let _server = node.server(10, "A")?;
    let background = Background::start()?;
    let (api, kubeconfig) = FakeApi::on(&background, node)?;
    api.put(&Svc::web("web", "10.96.0.20").text());
    api.put(&Slice::web("web").ready("10.244.1.10", "n1").text());
    let (hosts, wrapper) = (node.paths().run.join("hosts"), node.paths().run.join("wrapper"));
    let text = fs::read_to_string(&kubeconfig)?.replace("127.0.0.1", "api.sheave.test");
    ensure!(text.contains("//api.sheave.test:"), "{text}");
    fs::write(&kubeconfig, text)?;
    let run = r#"mount --bind "$0" /etc/hosts && exec "$@""#;
    let (own_hosts, sheave) = (hosts.display(), program("sheave")?);
    fs::write(
        &wrapper,
        format!("#!/bin/sh\nexec unshare --mount sh -c '{run}' {own_hosts} {} \"$@\"\n", sheave.display()),
    )?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755))?;
    let paths = Paths { program: Some(wrapper), kubeconfig: Some(kubeconfig), ..node.paths().clone() };
    let resolves = "127.0.0.1 api.sheave.test\n";
    fs::write(&hosts, resolves)?;
    let mut agent = node.agent_at(&paths)?;
    let client = node.host.client()?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.20:80")?, "A");

    agent.kill()?;
    fs::write(&hosts, "")?;
    agent.launch()?;
    eventually("it says what it waits for", SOON * 3, || {
        let status = agent.status()?;
        let is_about_it = |problem: &String| problem.contains("api.sheave.test");
        ensure!(!status.synced && status.source_problems.iter().any(is_about_it), "{status:?}");
        Ok(())
    })?;
    expect(&lab.outside, "/readyz", 503)?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.20:80")?, "A", "what is pinned serves");
    fs::write(&hosts, resolves)?;
    agent.ready()?;
    expect(&lab.outside, "/readyz", 200)
}

/// An account that may not write events is complained about once, and events are all that is missing.
#[test]
fn refused_events_are_said_once() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let background = Background::start()?;
    let (api, kubeconfig) = FakeApi::on(&background, node)?;
    api.faults(|asked| (asked.kind == "events").then_some(Fault::Status(403, "Forbidden")));
    let _taken = node.host.echo("taken", &["10256/TCP", "10249/TCP"])?;
    let agent = node.agent_of(&kubeconfig)?;
    eventually("all three are refused", SOON, || {
        ensure!(api.asked("events").len() == 3, "{:?}", api.asked("events"));
        ensure!(agent.log().contains("does not take every event"), "{}", agent.log());
        Ok(())
    })?;
    ensure!(agent.log().matches("does not take every event").count() == 1, "{}", agent.log());
    ensure!(agent.status()?.health == "ok", "{:?}", agent.status()?);
    Ok(())
}

#[test]
fn metrics_tell_what_the_node_does() -> Result<()> {
    let Some((lab, _agent)) = Lab::with_agent()? else { return Ok(()) };
    let host = &lab.n1().host;
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let changed = "2026-09-01T10:00:00.5Z"; // long before the agent started
    let slice = Slice::new("m-1", "m").port("http", 8080, "TCP").ready("10.244.1.10", "n1");
    let slice = slice.annotate("endpoints.kubernetes.io/last-change-trigger-time", changed);
    lab.apply(&[&Svc::new("m").ip("10.96.0.70").port("http", 80, "TCP"), &slice])?;
    let client = host.client()?;
    eventually("the service answers", SOON, || {
        ensure!(client.outcome(Way::Tcp, "10.96.0.70:80")? == "A");
        Ok(())
    })?;
    let _kept = client.connect(Way::Tcp, "10.96.0.70:80")?;

    eventually("the metrics tell", SOON, || {
        let page = get(host, "127.0.0.1:10249", "/metrics")?;
        ensure!(page.headers["content-type"].starts_with("text/plain; version=0.0.4"), "{page:?}");
        for line in [
            r#"sheave_service_connections{namespace="t",service="m",port="http",protocol="TCP"} 1"#,
            r#"sheave_datapath_events_total{event="socket_connect"} "#,
            r#"kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv6"} "#,
            "kubeproxy_sync_proxy_rules_endpoint_changes_total 1",
            "sheave_ready 1",
            "sheave_map_capacity{map=\"BACKENDS\"} 262144",
        ] {
            ensure!(page.body.contains(line), "{line} is missing in {}", page.body);
        }
        ensure!(!page.body.contains("network_programming_duration"), "what is older than the agent is not measured");
        Ok(())
    })?;
    for (path, body) in [("/healthz", "ok"), ("/proxyMode", "sheave")] {
        let reply = get(host, "127.0.0.1:10249", path)?;
        assert_eq!((reply.code, reply.body.as_str()), (200, body), "{path}");
    }
    let slis = get(host, "127.0.0.1:10249", "/metrics/slis")?.body;
    for line in [
        r#"kubernetes_healthcheck{name="ping",type="healthz"} 1"#,
        r#"kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 1"#,
    ] {
        ensure!(slis.contains(line), "{line} is missing in {slis}");
    }
    let configuration = get(host, "127.0.0.1:10249", "/configz")?;
    let name = r#""nodeName":{"origin":"--node-name","value":"n1"}"#;
    ensure!(configuration.body.contains(name), "{configuration:?}");
    ensure!(get(&lab.outside, "192.0.2.11:10249", "/metrics").is_err(), "metrics are for this host only");
    Ok(())
}

/// `--max-metrics-series`: the busiest have series of their own, all count in the total.
#[test]
fn no_more_series_than_are_asked_for() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let host = &lab.n1().host;
    let _server = lab.n1().server(10, "A")?;
    let agent = lab.n1().agent_with(&["--max-metrics-series=1"])?;
    for (name, ip) in [("busy", "10.96.0.70"), ("idle", "10.96.0.71")] {
        lab.apply(&[&Svc::web(name, ip), &Slice::web(name).ready("10.244.1.10", "n1")])?;
    }
    lab.settle(&agent)?;
    let client = host.client()?;
    let _kept = ["10.96.0.70:80", "10.96.0.70:80", "10.96.0.71:80"].map(|to| client.connect(Way::Tcp, to));
    eventually("the metrics tell", SOON, || {
        let page = get(host, "127.0.0.1:10249", "/metrics")?.body;
        let series = |name: &str| page.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>();
        for name in ["sheave_service_connections{", "sheave_backend_connections{"] {
            let series = series(name);
            ensure!(series.len() == 1 && series[0].contains(r#"service="busy""#), "{series:?}");
        }
        ensure!(series("sheave_connections ") == ["sheave_connections 3.0"], "{:?}", series("sheave_connections "));
        Ok(())
    })
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

#[test]
fn a_load_balancer_learns_where_the_endpoints_are() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let service = Svc::new("hc").ip("10.96.0.71").port("http", 80, "TCP").ingress("203.0.113.71", "VIP");
    let service = service.set("externalTrafficPolicy", "Local".into()).set("healthCheckNodePort", 32_000.into());
    let slice = || Slice::new("hc-1", "hc").port("http", 8080, "TCP");
    let expect = |code: u16, count: usize| {
        eventually(&format!("the answer is {code}, {count}"), SOON, || {
            for server in ["192.0.2.11:32000", "[2001:db8::11]:32000"] {
                let reply = get(&lab.outside, server, "/whatever")?;
                let weight = &reply.headers["x-load-balancing-endpoint-weight"];
                ensure!(reply.code == code && *weight == count.to_string(), "{server} says {reply:?}");
                ensure!(reply.headers["content-type"] == "application/json", "{reply:?}");
                ensure!(reply.body.contains(&format!("\n\t\"localEndpoints\": {count},\n")), "{reply:?}");
            }
            Ok(())
        })
    };
    let other = lab.n1().host.echo("other", &["32000/TCP"])?;
    lab.apply(&[&service, &slice()])?;
    eventually("the agent complains", SOON, || {
        ensure!(agent.log().contains("cannot listen on the healthCheckNodePort"), "{}", agent.log());
        Ok(())
    })?;
    drop(other); // HC-16
    expect(503, 0)?;
    lab.apply(&[&slice().ready("10.244.1.10", "n1").ready("10.244.1.11", "n1").ready("10.244.2.10", "n2")])?;
    expect(200, 2)?;
    lab.apply(&[&slice().terminating("10.244.1.10", "n1").ready("10.244.2.10", "n2")])?;
    expect(503, 0)?;
    lab.delete(&[&service])?;
    eventually("the port is closed", SOON, || {
        ensure!(get(&lab.outside, "192.0.2.11:32000", "/").is_err());
        Ok(())
    })
}

/// FLOW-13: sheave makes no rule of its own. A node whose firewall drops has to let the port in, and that is all it takes.
#[test]
fn flow_13_a_firewall_has_to_let_the_health_check_port_in() -> Result<()> {
    if Command::new("nft").arg("--version").output().is_err() {
        skip("the program nft is missing (package nftables)");
        return Ok(());
    }
    let Some((lab, _agent)) = Lab::with_agent()? else { return Ok(()) };
    let host = &lab.n1().host;
    let chain = "add chain inet fw in { type filter hook input priority 0; policy drop; }";
    let needed = "add rule inet fw in meta l4proto { icmp, ipv6-icmp } accept; add rule inet fw in iif lo accept";
    host.run("nft", &[&format!("add table inet fw; {chain}; {needed}")])?;
    let service = Svc::new("hc").ip("10.96.0.71").port("http", 80, "TCP").ingress("203.0.113.71", "VIP");
    let service = service.set("externalTrafficPolicy", "Local".into()).set("healthCheckNodePort", 32_000.into());
    lab.apply(&[&service, &Slice::new("hc-1", "hc").port("http", 8080, "TCP").ready("10.244.1.10", "n1")])?;
    let asked = |place: &Place, code: u16| {
        eventually("the port answers", SOON, || {
            let reply = get(place, "192.0.2.11:32000", "/")?;
            ensure!(reply.code == code, "{reply:?}");
            Ok(())
        })
    };
    asked(host, 200)?;
    let mut outside = lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    assert_eq!(outside.outcome(Way::Tcp, "192.0.2.11:32000")?, "TIMEOUT", "the firewall drops it");
    host.run("nft", &["add rule inet fw in tcp dport 32000 accept"])?;
    let rules = host.run("nft", &["list", "ruleset"])?;
    asked(&lab.outside, 200)?;
    lab.delete(&[&service])?;
    eventually("the port is closed", SOON, || {
        ensure!(get(&lab.outside, "192.0.2.11:32000", "/").is_err());
        Ok(())
    })?;
    ensure!(host.run("nft", &["list", "ruleset"])? == rules, "no rule comes or goes with the Service");
    Ok(())
}
