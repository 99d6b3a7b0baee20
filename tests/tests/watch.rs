//! The watch of a cluster against an API server with faults (cases 05, 31 and 38 of docs/testing.md).

use std::{
    fs,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use sheave_agent::{
    model::Update,
    source::{
        convert::ConvertOptions,
        kube::{self, Access},
    },
};
use sheave_tests::{
    agent::Agent,
    background::Background,
    client::{LoadKind, Way},
    fake_api::{Asked, FakeApi, Fault, bookmark, expired},
    lab::Lab,
    objects::{Object, Slice, Svc, Text, node},
    told::Told,
    wait::{SOON, eventually, throughout},
};

/// Limit of case 38.
const SETTLED: Duration = Duration::from_secs(15);
/// Limit of what a server answers while it is not itself yet.
const SERVED: Duration = Duration::from_secs(5);

/// A fake API server and a source that watches it.
struct Scene {
    api: FakeApi,
    told: Told,
    kubeconfig: PathBuf,
    background: Background,
}

impl Scene {
    /// With the Services `kept` and `s1`, each with a slice, and a Node. `prepare` may order faults.
    fn new(streams: bool, prepare: impl FnOnce(&FakeApi)) -> Result<Self> {
        let background = Background::start()?;
        let api = FakeApi::start(&background, None, streams)?;
        for object in [service("kept"), slice("kept", 10), service("s1"), slice("s1", 11), node(1).text()] {
            api.put(&object);
        }
        prepare(&api);
        let kubeconfig = std::env::temp_dir().join(format!("sheave-kubeconfig-{}", api.address.port()));
        api.kubeconfig(&kubeconfig)?;
        let (sender, told) = Told::new();
        let access = Access { kubeconfig: Some(kubeconfig.clone()), ..Access::default() };
        background.run(kube::start(access, &ConvertOptions::default(), sender))?;
        Ok(Self { api, told, kubeconfig, background })
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.kubeconfig);
    }
}

fn service(name: &str) -> String {
    Svc::new(name).ip("10.96.0.20").port("http", 80, "TCP").text()
}

fn slice(service: &str, digits: u8) -> String {
    let slice = Slice::new(&format!("{service}-1"), service).port("http", 8080, "TCP");
    slice.ready(&format!("10.244.1.{digits}"), "n1").text()
}

const BEFORE: [&str; 2] = ["kept 80/TCP 10.244.1.10:8080", "s1 80/TCP 10.244.1.11:8080"];
const AFTER: [&str; 2] = ["kept 80/TCP 10.244.1.10:8080", "s2 80/TCP 10.244.1.12:8080"];

/// A fault of one server, by the how-manieth request to follow Services it is; `None` = it answers honestly.
type Case = (&'static str, fn(u32, &Asked) -> Option<Fault>);

fn bytes(text: impl Into<String>) -> Option<Fault> {
    Some(Fault::Bytes(text.into(), Duration::ZERO))
}

const CASES: [Case; 12] = [
    ("38 a: the watch is answered 410", |n, _| (n == 1).then_some(Fault::Status(410, "Expired"))),
    ("38 b: the watch is told 410", |n, _| if n == 1 { bytes(format!("{}\n", expired())) } else { None }),
    ("38 c: watches close every three seconds", |n, _| {
        (n <= 2).then(|| Fault::Bytes(String::new(), Duration::from_secs(3)))
    }),
    ("38 d: bookmarks are honoured", |n, asked| match n {
        1 => bytes(format!("{}\n{}\n", bookmark(3000, false), bookmark(5000, false))),
        _ => (asked.version() < 4000).then_some(Fault::Status(410, "Expired")),
    }),
    ("38 e: an event breaks off", |n, _| if n == 1 { bytes("{\"type\": \"MODIFIED\", \"obj") } else { None }),
    ("an event is no JSON", |n, _| if n == 1 { bytes("<html>busy</html>\n") } else { None }),
    ("watches close at once", |n, _| if n <= 4 { bytes("") } else { None }),
    ("restarted: 403", |n, _| (n <= 2).then_some(Fault::Status(403, "Forbidden"))),
    ("restarted: 401", |n, _| (n == 1).then_some(Fault::Status(401, "Unauthorized"))),
    ("restarted: 500", |n, _| (n <= 2).then_some(Fault::Status(500, "InternalError"))),
    ("too many requests", |n, _| (n == 1).then_some(Fault::Status(429, "TooManyRequests"))),
    ("an event of a kind to come", |n, _| if n == 1 { bytes("{\"type\": \"NEWS\", \"object\": {}}\n") } else { None }),
];

#[test]
fn case_38_a_watch_survives_what_servers_do() {
    thread::scope(|scope| {
        for case in CASES {
            for streams in [true, false] {
                let name = format!("{}{}", case.0, if streams { "" } else { ", lists by pages" });
                let run = move || survives(case, streams).with_context(|| name.clone()).unwrap();
                scope.spawn(run);
            }
        }
    });
}

fn survives((name, fault): Case, streams: bool) -> Result<()> {
    let mut scene = Scene::new(streams, |_| {})?;
    scene.told.until_lines("the first list", SETTLED, &BEFORE)?;
    let mut count = 0;
    scene.api.faults(move |asked| {
        let concerned = asked.kind == "services" && asked.follows();
        count += u32::from(concerned);
        if concerned { fault(count, asked) } else { None }
    });
    let start = Instant::now();
    scene.api.skip_to(5000);
    scene.api.hang_up();
    scene.api.delete(&service("s1"));
    scene.api.delete(&slice("s1", 11));
    scene.api.put(&service("s2"));
    scene.api.put(&slice("s2", 12));
    let limit = if name.starts_with("restarted") { SERVED } else { SETTLED };
    scene.told.until_lines("settled", limit, &AFTER)?;
    scene.told.until("well again", SETTLED, |told| told.source.problems.is_empty())?;
    ensure!(kept_stayed(&scene.told), "what did not change was taken away: {:?}", scene.told.updates);
    ensure!(scene.told.problems_told == 0, "no object had a problem: {:?}", scene.told.problems);
    let asked = scene.api.asked("services");
    let (follows, lists): (Vec<_>, Vec<_>) = asked.iter().filter(|asked| asked.at > start).partition(|a| a.follows());
    let seconds = start.elapsed().as_secs_f64();
    ensure!(follows.len() as f64 <= seconds + 2.0, "{} requests in {seconds} s", follows.len());
    ensure!(lists.is_empty() || !name.contains("bookmarks"), "resumed from the bookmark, without a list: {lists:?}");
    Ok(())
}

/// No update ever took away what did not change.
fn kept_stayed(told: &Told) -> bool {
    told.updates.iter().all(|update| match update {
        Update::Services(services) => services.iter().any(|service| &*service.name.name == "kept"),
        Update::Slices(slices) => slices.iter().any(|slice| &*slice.service.name == "kept"),
        Update::ServiceGone(name) => &*name.name != "kept",
        Update::SliceGone(name) => &*name.name != "kept-1",
        _ => true,
    })
}

#[test]
fn a_server_that_fails_is_asked_at_most_once_a_second_and_at_least_every_five() -> Result<()> {
    let mut scene = Scene::new(true, |api| api.faults(|_| Some(Fault::Status(503, "ServiceUnavailable"))))?;
    scene.told.until("four tries", Duration::from_secs(30), |_| scene.api.asked("nodes").len() >= 4)?;
    let asked = scene.api.asked("nodes");
    for gap in asked.windows(2).map(|two| (two[1].at - two[0].at).as_secs_f64()) {
        ensure!((0.99..5.5).contains(&gap), "{gap} s between two tries");
    }
    scene.told.take();
    let problems = scene.told.source.problems.join(" ");
    ensure!(problems.contains("Nodes are not being watched: the API server http://127.0.0.1:"), "{problems}");
    ensure!(problems.contains("answered 503 ServiceUnavailable"), "{problems}");
    ensure!(!scene.told.state.is_synced(), "there was no list");
    scene.api.faults(|_| None);
    scene.told.until_lines("well again", Duration::from_secs(6), &BEFORE)?;
    Ok(())
}

#[test]
fn a_list_that_breaks_off_is_no_list() -> Result<()> {
    for streams in [true, false] {
        let mut count = 0;
        let mut scene = Scene::new(streams, |api| {
            api.faults(move |asked| {
                let is_list = asked.kind == "services" && !asked.follows();
                // One page, or a few events, and then nothing more.
                let breaks =
                    is_list && (asked.field("sendInitialEvents") == "true" || !asked.field("continue").is_empty());
                count += u32::from(breaks);
                match (breaks && count <= 2, streams) {
                    (false, _) => None,
                    (true, true) => bytes(format!("{{\"type\": \"ADDED\", \"object\": {}}}\n", service("kept"))),
                    (true, false) => Some(Fault::Status(500, "InternalError")),
                }
            });
        })?;
        scene.api.put(&service("s3"));
        let three = [BEFORE[0], BEFORE[1], "s3 80/TCP"];
        scene.told.until_lines("the whole list", SETTLED, &three)?;
        let lists = scene.told.updates.iter().filter_map(|update| match update {
            Update::Services(services) => Some(services.len()),
            _ => None,
        });
        ensure!(lists.eq([3]), "one list, the whole one: {:?}", scene.told.updates);
    }
    Ok(())
}

#[test]
fn an_object_deleted_while_it_is_listed_is_not_in_the_list() -> Result<()> {
    let event = |what: &str, text: String| format!("{{\"type\": \"{what}\", \"object\": {text}}}\n");
    let mut scene = Scene::new(true, |api| {
        let mut count = 0;
        api.faults(move |asked| {
            count += u32::from(asked.kind == "services");
            let kept = event("ADDED", service("kept")) + &event("MODIFIED", service("kept"));
            let gone = event("ADDED", service("gone")) + &event("DELETED", service("gone"));
            let first = asked.kind == "services" && count == 1;
            first.then(|| Fault::Bytes(format!("{kept}{gone}{}\n", bookmark(2000, true)), Duration::from_secs(60)))
        });
    })?;
    scene.told.until("listed", SETTLED, |told| told.state.is_synced())?;
    ensure!(scene.told.lines() == [BEFORE[0]], "{:?}", scene.told.updates);
    // Nothing waits for the ServiceCIDRs.
    let updates = scene.told.updates.iter().filter(|update| !matches!(update, Update::ServiceCidrs(_)));
    ensure!(updates.count() == 3, "three lists and nothing else: {:?}", scene.told.updates);
    Ok(())
}

#[test]
fn case_31_nothing_is_synced_before_every_kind_is_listed() {
    thread::scope(|scope| {
        for late in ["endpointslices", "services", "nodes"] {
            scope.spawn(move || waits_for(late).context(late).unwrap());
        }
    });
}

fn waits_for(late: &'static str) -> Result<()> {
    let mut scene = Scene::new(true, |api| api.faults(move |asked| (asked.kind == late).then_some(Fault::Silence)))?;
    let is_list = |u: &&Update| matches!(u, Update::Services(_) | Update::Slices(_) | Update::Nodes(_));
    scene.told.until("two lists", SETTLED, |told| told.updates.iter().filter(is_list).count() == 2)?;
    throughout(Duration::from_secs(1), || {
        scene.told.take();
        ensure!(!scene.told.state.is_synced(), "{late} are not listed yet");
        ensure!(!scene.told.source.problems.is_empty(), "the source says what is missing");
        Ok(())
    })?;
    scene.api.faults(|_| None);
    scene.told.until("synced", Duration::from_secs(25), |told| told.state.is_synced())?;
    scene.told.until_lines("complete", SOON, &BEFORE)?;
    Ok(())
}

#[test]
fn case_05_objects_that_are_not_ours_stop_nothing() -> Result<()> {
    let mut scene = Scene::new(true, |_| {})?;
    scene.told.until_lines("the first list", SETTLED, &BEFORE)?;
    // A slice of DNS names, added, changed and deleted.
    let names = |address: &str| {
        Slice::new("kept-2", "kept").address_type("FQDN").port("http", 8080, "TCP").ready(address, "n1")
    };
    scene.api.put(&names("backend.example.org").text());
    scene.api.put(&names("other.example.org").text());
    scene.api.delete(&names("other.example.org").text());
    scene.api.put(&service("then"));
    scene.told.until_lines("the DNS names are ignored", SETTLED, &[BEFORE[0], BEFORE[1], "then 80/TCP"])?;
    ensure!(scene.told.problems_told == 0, "{:?}", scene.told.problems);

    // A slice that turns into one of DNS names leaves nothing behind.
    scene.api.put(&Slice::new("kept-1", "kept").address_type("FQDN").ready("backend.example.org", "n1").text());
    scene.told.until_lines("turned", SETTLED, &["kept 80/TCP", BEFORE[1], "then 80/TCP"])?;

    // Malformed objects: named, once for each version, and skipped.
    let broken = |port: &str| {
        let metadata = "{\"name\": \"broken\", \"namespace\": \"t\"}";
        let spec = format!("{{\"clusterIP\": \"10.96.0.30\", \"ports\": [{{\"port\": {port}}}]}}");
        Text {
            file: String::new(),
            text: format!(
                "{{\"apiVersion\": \"v1\", \"kind\": \"Service\", \"metadata\": {metadata}, \"spec\": {spec}}}"
            ),
        }
    };
    scene.api.put(&broken("\"http\"").text());
    scene.api.put(&service("after"));
    scene.told.until("named", SETTLED, |told| told.problems.contains_key("Service t/broken"))?;
    scene.told.until("what follows works", SETTLED, |told| told.lines().contains(&"after 80/TCP".to_owned()))?;
    ensure!(scene.told.lines()[1].starts_with("broken invalid: "), "{:?}", scene.told.lines());
    ensure!(scene.told.problems_told == 1, "once: {:?}", scene.told.problems);
    scene.api.put(&broken("80").text());
    scene.told.until("mended", SETTLED, |told| told.problems.is_empty())?;
    ensure!(scene.told.lines()[1] == "broken 80/TCP", "{:?}", scene.told.lines());
    Ok(())
}

/// Invariant 7.
#[test]
fn what_is_no_object_at_all_ends_neither_a_list_nor_a_watch() -> Result<()> {
    const GARBAGE: [&str; 6] = ["[]", "[1]", "\"text\"", "7", "null", "{\"metadata\": []}"];
    for streams in [true, false] {
        let events = GARBAGE.map(|object| format!("{{\"type\": \"ADDED\", \"object\": {object}}}\n")).concat();
        let list = if streams {
            format!("{events}{}\n", bookmark(1000, true))
        } else {
            format!("{{\"metadata\": {{\"resourceVersion\": \"1000\"}}, \"items\": [{}]}}", GARBAGE.join(","))
        };
        let (mut list, mut events) = (Some(list), Some(events));
        let mut scene = Scene::new(streams, move |api| {
            api.faults(move |asked| match asked.kind.as_str() {
                "services" if asked.follows() => events.take().and_then(bytes),
                "services" if streams || asked.field("watch") != "true" => list.take().and_then(bytes),
                _ => None,
            });
        })?;
        scene.told.until_lines("all events since the list", SETTLED, &BEFORE)?;
        ensure!(scene.told.problems_told > 0, "streams {streams}: somebody is told");
    }
    Ok(())
}

#[test]
fn the_next_server_is_asked_when_one_is_away() -> Result<()> {
    let mut scene = Scene::new(true, |_| {})?;
    scene.told.until_lines("the first list", SETTLED, &BEFORE)?;
    let (sender, mut told) = Told::new();
    // Nobody listens on the discard port here.
    let servers = ["http://127.0.0.1:9".to_owned(), format!("http://{}", scene.api.address)];
    let servers = servers.iter().map(|url| url.parse()).collect::<Result<_, _>>()?;
    let access = Access { kubeconfig: Some(scene.kubeconfig.clone()), servers, ..Access::default() };
    scene.background.run(kube::start(access, &ConvertOptions::default(), sender))?;
    told.until_lines("from the second server", SETTLED, &BEFORE)?;
    let source = format!("kubernetes http://{}", scene.api.address);
    told.until("in step", SETTLED, |told| told.source.source == source && told.source.problems.is_empty())?;
    Ok(())
}

/// The kubelet renews a pod's token in its file; the old one is refused one day.
#[test]
fn a_token_that_was_renewed_is_read_again() -> Result<()> {
    let mut scene = Scene::new(true, |_| {})?;
    scene.told.until_lines("the first list", SETTLED, &BEFORE)?;
    let (token, kubeconfig) = (scene.kubeconfig.with_extension("token"), scene.kubeconfig.with_extension("file"));
    let text = fs::read_to_string(&scene.kubeconfig)?.replace("token: t", &format!("tokenFile: {}", token.display()));
    fs::write(&kubeconfig, text)?;
    fs::write(&token, "old")?;
    let (sender, mut told) = Told::new();
    let access = Access { kubeconfig: Some(kubeconfig.clone()), ..Access::default() };
    scene.background.run(kube::start(access, &ConvertOptions::default(), sender))?;
    told.until_lines("with the old token", SETTLED, &BEFORE)?;

    fs::write(&token, "new")?;
    scene.api.faults(|asked| (asked.token != "new").then_some(Fault::Status(401, "Unauthorized")));
    scene.api.hang_up();
    scene.api.put(&service("s3"));
    told.until_lines("with the new one", SETTLED, &[BEFORE[0], BEFORE[1], "s3 80/TCP"])?;
    ensure!(scene.api.asked("services").iter().any(|asked| asked.token == "old"), "the old one was used before");
    ensure!(kept_stayed(&told), "nothing was taken away in between: {:?}", told.updates);
    fs::remove_file(&token)?;
    Ok(fs::remove_file(&kubeconfig)?)
}

/// A new CA, certificate or address in the kubeconfig: to who has the old one, the server looks as if it were away.
#[test]
fn a_kubeconfig_that_was_renewed_is_read_again() -> Result<()> {
    let scene = Scene::new(true, |_| {})?;
    let (sender, mut told) = Told::new();
    let kubeconfig = scene.kubeconfig.with_extension("renewed");
    // Nobody listens on the discard port here.
    let text = fs::read_to_string(&scene.kubeconfig)?;
    fs::write(&kubeconfig, text.replace(&scene.api.address.to_string(), "127.0.0.1:9"))?;
    let access = Access { kubeconfig: Some(kubeconfig.clone()), ..Access::default() };
    scene.background.run(kube::start(access, &ConvertOptions::default(), sender))?;
    told.until("unreachable", SETTLED, |told| told.source.problems.iter().any(|p| p.contains("cannot use")))?;
    scene.api.kubeconfig(&kubeconfig)?;
    told.until_lines("by the new one", SETTLED, &BEFORE)?;
    Ok(fs::remove_file(&kubeconfig)?)
}

#[test]
fn only_what_concerns_a_proxy_is_asked_for() -> Result<()> {
    for streams in [true, false] {
        asks_for_what_it_needs(streams)?;
    }
    Ok(())
}

fn asks_for_what_it_needs(streams: bool) -> Result<()> {
    let mut scene = Scene::new(streams, |_| {})?;
    scene.told.until_lines("the first list", SETTLED, &BEFORE)?;
    for (id, kind, labels) in [
        ("SK-5", "services", "!service.kubernetes.io/service-proxy-name"),
        ("SK-7", "endpointslices", "!service.kubernetes.io/headless"),
        ("ND-1", "nodes", ""),
    ] {
        let asked = scene.api.asked(kind);
        ensure!(asked[0].field("labelSelector") == labels, "{id}: {asked:?}");
        // Without a version the answer is of a quorum: no server that lags behind can take back what is known.
        let lists = asked.iter().filter(|asked| !asked.follows());
        ensure!(lists.clone().count() > 0 && lists.clone().all(|list| list.field("resourceVersion").is_empty()));
    }
    Ok(())
}

#[test]
fn case_31_a_restart_beside_a_slow_api_server_loses_no_backend() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node1 = lab.n1();
    let background = Background::start()?;
    let (api, kubeconfig) = FakeApi::on(&background, node1)?;
    let (pod, client) = (node1.pod(2)?, node1.pod(250)?);
    // Every backend is an address of one pod, so that each of them answers.
    let addresses: Vec<String> = (2..=101).map(|digits| format!("10.244.1.{digits}")).collect();
    for address in &addresses[1..] {
        pod.place.ip(&format!("addr add {address}/32 dev lo"))?;
        node1.host.ip(&format!("route add {address}/32 dev pod2"))?;
    }
    let _server = pod.place.echo("big", &["8080/TCP"])?;
    let slice = |number: usize, addresses: &[String]| {
        let slice = Slice::new(&format!("big-{number}"), "big").port("http", 8080, "TCP");
        addresses.iter().fold(slice, |slice, address| slice.ready(address, "n1")).text()
    };
    let big = Svc::new("big").ip("10.96.0.39").port("http", 80, "TCP").node_port(30_039);
    api.put(&big.annotate("sheave.io/lb-algorithm", "round-robin").text());
    addresses.chunks(20).enumerate().for_each(|(number, addresses)| api.put(&slice(number, addresses)));

    let mut agent = node1.agent_of(&kubeconfig)?;
    eventually("all are there", SOON, || has(&agent, 100))?;
    let (client, outside) = (client.place.client()?, lab.outside.client()?);
    eventually("the packet path works", SOON, || outside.dial(Way::Tcp, "192.0.2.11:30039"))?;
    let open = (0..100).map(|_| outside.connect(Way::Tcp, "192.0.2.11:30039")).collect::<Result<Vec<_>>>()?;
    let load = client.load(Way::Tcp, LoadKind::Dial, "10.96.0.39:80", Duration::from_millis(1))?;
    for late in ["endpointslices", "services"] {
        agent.kill()?;
        api.faults(move |asked| (asked.kind == late).then_some(Fault::Status(503, "ServiceUnavailable")));
        agent.launch()?;
        let asked = api.asked(late).len();
        eventually("the agent asks twice", SETTLED, || {
            ensure!(api.asked(late).len() > asked + 1);
            Ok(())
        })?;
        has(&agent, 100).with_context(|| format!("{late} are not listed"))?;
        // Then they come one at a time.
        api.faults(move |asked| {
            (asked.kind == late && !asked.follows()).then_some(Fault::Slowly(Duration::from_secs(1)))
        });
        eventually("everything is listed", SETTLED * 2, || {
            if let Err(lost) = has(&agent, 100) {
                return Ok(Err(lost)); // at no time
            }
            ensure!(agent.status()?.synced);
            Ok(Ok(()))
        })??;
        agent.ready()?;
        has(&agent, 100)?;
    }
    api.faults(|_| None);
    for socket in &open {
        socket.ask().context("a connection from before")?;
    }
    // What was removed while the agent was away goes once everything is listed.
    agent.kill()?;
    api.put(&slice(0, &addresses[1..20]));
    agent.restart()?;
    eventually("one less", SOON, || has(&agent, 99))?;
    let report = load.stop()?;
    ensure!(report.failed == 0, "{report:?}");
    Ok(())
}

/// Whether that many backends are behind every frontend of the Service `big` in the kernel.
fn has(agent: &Agent, expected: usize) -> Result<()> {
    let kernel = agent.kernel()?;
    let rows = kernel.iter().filter(|row| row.service.as_deref() == Some("t/big") && row.kind != "UnknownPort");
    let found: Vec<usize> = rows.map(|row| row.backends.len()).collect();
    ensure!(!found.is_empty() && found.iter().all(|found| *found == expected), "{found:?} backends, not {expected}");
    Ok(())
}
