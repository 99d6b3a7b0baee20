//! A real API server, etcd and client: what is created there arrives here, whatever happens in between.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::json;
use sheave_agent::{
    model::Update,
    source::{
        convert::ConvertOptions,
        kube::{self, Access},
    },
};
use sheave_tests::{
    api_server::ApiServer,
    background::Background,
    client::{LoadKind, Way},
    lab::Lab,
    objects::{Object, Slice, Svc, node},
    told::Told,
    wait::{SOON, eventually},
};

/// A source that watches an API server, in the background.
fn watch(api: &ApiServer) -> Result<(Background, Told)> {
    let background = Background::start()?;
    let (sender, told) = Told::new();
    let access = Access { kubeconfig: Some(api.kubeconfig()), ..Access::default() };
    background.run(kube::start(access, &ConvertOptions::default(), sender))?;
    Ok((background, told))
}

fn service(name: &str, digits: u8, port: u16) -> Svc {
    Svc::new(name).ip(&format!("10.96.0.{digits}")).port("http", port, "TCP")
}

fn slice(service: &str, digits: &[u8]) -> Slice {
    let slice = Slice::new(&format!("{service}-1"), service).port("http", 8080, "TCP");
    digits.iter().fold(slice, |slice, digits| slice.ready(&format!("10.244.1.{digits}"), "n1"))
}

#[test]
fn what_a_client_does_is_told() -> Result<()> {
    let Some(api) = ApiServer::start(None)? else { return Ok(()) };
    let (_background, mut told) = watch(&api)?;
    told.until("synced", SOON, |told| told.state.is_synced() && told.source.problems.is_empty())?;

    type Step<'a> = (&'a str, &'a [&'a dyn Object], &'a [&'a dyn Object], &'a [&'a str]);
    let steps: [Step<'_>; 8] = [
        ("W-1", &[&service("s1", 20, 10)], &[], &["s1 10/TCP"]),
        ("W-2", &[&service("s2", 21, 30)], &[], &["s1 10/TCP", "s2 30/TCP"]),
        ("W-3", &[&service("s1", 20, 20)], &[], &["s1 20/TCP", "s2 30/TCP"]),
        ("W-4", &[], &[&service("s1", 20, 20)], &["s2 30/TCP"]),
        ("W-6", &[&slice("s2", &[1])], &[], &["s2 30/TCP 10.244.1.1:8080"]),
        ("W-6", &[&slice("s2", &[1, 2])], &[], &["s2 30/TCP 10.244.1.1:8080 10.244.1.2:8080"]),
        ("W-6", &[], &[&slice("s2", &[])], &["s2 30/TCP"]),
        ("W-5", &[], &[&service("s2", 21, 30)], &[]),
    ];
    for (id, apply, delete, expected) in steps {
        if !apply.is_empty() {
            api.apply(apply)?;
        }
        if !delete.is_empty() {
            api.delete(delete)?;
        }
        told.until_lines(id, SOON, expected)?;
    }

    api.apply(&[&node(1)])?;
    told.until("W-9", SOON, |told| told.state.node("n1").is_some_and(|node| node.zone.as_deref() == Some("zone-1")))?;
    api.delete(&[&node(1)])?;
    told.until("W-9, deleted", SOON, |told| told.state.node("n1").is_none())?;

    let label = "service.kubernetes.io/service-proxy-name";
    let in_namespace = ["-n", sheave_tests::objects::NAMESPACE];
    api.apply(&[&service("web", 22, 80), &slice("web", &[3])])?;
    told.until_lines("there", SOON, &["web 80/TCP 10.244.1.3:8080"])?;
    api.kubectl(&[&["label", "service", "web", &format!("{label}=other")], &in_namespace[..]].concat(), "")?;
    told.until_lines("SK-5: gaining the label is a deletion", SOON, &[])?;
    api.kubectl(&[&["label", "service", "web", &format!("{label}-")], &in_namespace[..]].concat(), "")?;
    told.until_lines("SK-5: losing it is an addition", SOON, &["web 80/TCP 10.244.1.3:8080"])?;
    let names = Slice::new("web-2", "web").address_type("FQDN").port("http", 8080, "TCP");
    api.apply(&[&names.ready("backend.example.org", "n1"), &Svc::new("none").ip("None").port("http", 81, "TCP")])?;
    told.until_lines("05: names are ignored", SOON, &["none headless", "web 80/TCP 10.244.1.3:8080"])?;
    ensure!(told.problems_told == 0, "{:?}", told.problems);

    // W-8: whoever comes later gets everything too, W-7: as complete lists.
    let (_background, mut later) = watch(&api)?;
    later.until("synced", SOON, |told| told.state.is_synced() && told.state.service_cidrs().is_some())?;
    ensure!(later.lines() == told.lines(), "{:?}", later.lines());
    ensure!(later.updates.len() == 4, "four lists: {:?}", later.updates);
    Ok(())
}

#[test]
fn an_api_server_comes_and_goes() -> Result<()> {
    let Some(mut api) = ApiServer::start(None)? else { return Ok(()) };
    api.apply(&[&service("web", 20, 80), &slice("web", &[1])])?;
    api.stop();

    // Started while the API server is away.
    let (_background, mut told) = watch(&api)?;
    let is_missed = |told: &Told| told.source.problems.iter().all(|problem| problem.contains("Connection refused"));
    told.until("missed", SOON, |told| told.source.problems.len() == 4 && is_missed(told))?;
    ensure!(!told.state.is_synced());
    api.resume()?;
    told.until_lines("found", SOON, &["web 80/TCP 10.244.1.1:8080"])?;
    told.until("in step", SOON, |told| told.state.is_synced() && told.source.problems.is_empty())?;

    // Restarted; refusals and 403s until it is itself again. Nothing is lost, and a change is seen within seconds.
    let known = told.updates.len();
    api.stop();
    told.until("missed again", SOON, |told| !told.source.problems.is_empty())?;
    api.resume()?;
    api.apply(&[&service("more", 21, 81)])?;
    let lines = ["more 81/TCP", "web 80/TCP 10.244.1.1:8080"];
    told.until_lines("the change", SOON, &lines)?;
    told.until("in step again", SOON, |told| told.source.problems.is_empty())?;
    let took_away = |update: &Update| matches!(update, Update::ServiceGone(_) | Update::SliceGone(_));
    ensure!(!told.updates[known..].iter().any(took_away), "{:?}", &told.updates[known..]);

    // 38: while it is away another server of the cluster changes so much that our version is too old to go on from.
    let mut other = api.second()?;
    api.stop();
    told.until("missed a third time", SOON, |told| !told.source.problems.is_empty())?;
    other.delete(&[&service("more", 21, 81)])?;
    other.apply(&[&service("last", 22, 82), &slice("web", &[2])])?;
    other.stop();
    api.resume()?;
    told.until_lines(
        "what went on meanwhile",
        Duration::from_secs(15),
        &["last 82/TCP", "web 80/TCP 10.244.1.2:8080"],
    )?;
    told.until("in step in the end", SOON, |told| told.source.problems.is_empty())?;
    let lists = told.updates.iter().filter(|update| matches!(update, Update::Services(_))).count();
    ensure!(lists > 1, "our version was too old to go on from, so there is another list: {:?}", told.updates);
    ensure!(told.problems_told == 0, "{:?}", told.problems);
    Ok(())
}

#[test]
fn case_39_traffic_follows_the_api_and_outlives_it() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node1 = lab.n1();
    let Some(mut api) = ApiServer::start(Some(&node1.host))? else { return Ok(()) };
    api.apply(&[&node(1), &service("web", 20, 80), &slice("web", &[10])])?;
    let (a, b, c) = (node1.pod(10)?, node1.pod(11)?, node1.pod(20)?);
    let _servers = [a.place.echo("a", &["8080/TCP"])?, b.place.echo("b", &["8080/TCP"])?];
    let client = c.place.client()?;

    let mut agent = node1.agent_of(&api.kubeconfig())?;
    agent.expect("web", &["10.96.0.20:80/TCP → 10.244.1.10:8080"])?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.20:80")?, "a");
    api.apply(&[&slice("web", &[10, 11]), &service("more", 21, 81)])?;
    agent.expect("web", &["10.96.0.20:80/TCP → 10.244.1.10:8080 10.244.1.11:8080"])?;
    agent.expect("more", &["10.96.0.21:81/TCP → refused"])?;
    assert_eq!(client.outcome(Way::Tcp, "10.96.0.21:81")?, "ECONNREFUSED");

    // 39 b: the API goes, then the agent, which comes back alone: it waits, keeps what is pinned, and says so.
    let load = client.load(Way::Tcp, LoadKind::Dial, "10.96.0.20:80", Duration::from_millis(1))?;
    api.stop();
    agent.kill()?;
    agent.launch()?;
    let status = eventually("the agent says what it waits for", SOON, || {
        let status = agent.status()?;
        ensure!(status.source_problems.iter().any(|problem| problem.contains("Connection refused")), "{status:?}");
        Ok(status)
    })?;
    ensure!(!status.synced, "{status:?}");
    let before = load.report()?.answered;
    eventually("the load goes on", SOON, || {
        ensure!(load.report()?.answered >= before + 100);
        Ok(())
    })?;
    api.resume()?;
    agent.ready()?;
    api.delete(&[&service("more", 21, 81)])?;
    agent.expect("more", &[])?;
    api.apply(&[&slice("web", &[11])])?;
    agent.expect("web", &["10.96.0.20:80/TCP → 10.244.1.11:8080"])?;
    let report = load.stop()?;
    ensure!(report.failed == 0, "{report:?}");
    Ok(())
}

/// What kube-proxy tells on a Node and on a Service is told, under its reasons.
#[test]
fn events_are_posted_where_kube_proxy_posts_them() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node1 = lab.n1();
    let Some(api) = ApiServer::start(Some(&node1.host))? else { return Ok(()) };
    let _taken = node1.host.echo("taken", &["10256/TCP", "10249/TCP", "32100/TCP"])?;
    let web = service("web", 20, 80).set("type", json!("LoadBalancer")).set("externalTrafficPolicy", json!("Local"));
    api.apply(&[&node(1), &web.set("healthCheckNodePort", json!(32_100))])?;
    let _agent = node1.agent_of(&api.kubeconfig())?;
    for (kind, name, kube_proxys) in [
        ("Node", "n1", ["Normal Starting", "Warning FailedToStartProxierHealthcheck"].as_slice()),
        ("Node", "n1", &["Warning FailedToStartMetricServer"]),
        ("Service", "web", &["Warning FailedToStartServiceHealthcheck"]),
    ] {
        eventually(kube_proxys[0], SOON, || {
            let columns = "custom-columns=A:.regarding.kind,B:.regarding.name,C:.type,D:.reason";
            let events = api.kubectl(&["get", "events.v1.events.k8s.io", "-A", "--no-headers", "-o", columns], "")?;
            let told: Vec<_> =
                events.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
            for reason in kube_proxys {
                ensure!(told.contains(&format!("{kind} {name} {reason}")), "{told:#?}");
            }
            Ok(())
        })?;
    }
    Ok(())
}
