//! What no controller would write and no operator would do, but somebody will: endpoints, Services and namespaces that
//! change under the feet of clients.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    agent::Agent,
    client::{Client, LoadKind, Socket, Way},
    lab::Lab,
    objects::{NAMESPACE, Slice, Svc, Text},
    wait::{SOON, eventually},
};

const TO: &str = "10.96.0.90:80";
const A: &str = "10.244.1.10";
const B: &str = "10.244.1.11";

/// A slice as no builder makes it.
fn slice(name: &str, annotations: &Value, ports: &Value, endpoints: &Value) -> Text {
    let labels = json!({"kubernetes.io/service-name": "odd"});
    let text = json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels, "annotations": annotations},
        "addressType": "IPv4",
        "ports": ports,
        "endpoints": endpoints,
    });
    Text { file: format!("slice-{name}.yaml"), text: text.to_string() }
}

fn names(client: &Client, way: Way) -> Result<String> {
    let mut names = BTreeSet::new();
    for _ in 0..24 {
        names.insert(client.outcome(way, TO)?);
    }
    Ok(names.into_iter().collect::<Vec<_>>().join(" "))
}

#[test]
fn slices_of_every_odd_kind_mean_what_is_left_of_them() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let client = lab.n1().pod(20)?.place.client()?;
    let plain = json!({});
    let ports = json!([{"name": "t", "port": 8080, "protocol": "TCP"}, {"name": "u", "port": 8080, "protocol": "UDP"}]);
    let at = |address: &str| json!([{"addresses": [address], "nodeName": "n1"}]);
    let with = |conditions: Value| json!([{"addresses": [A], "nodeName": "n1", "conditions": conditions}]);
    let weight = |weight: &str| json!({"sheave.io/weight": weight});
    let hint = |zone: &str| json!([{"addresses": [A], "hints": {"forZones": [{"name": zone}]}}]);
    let refused = "ECONNREFUSED";
    lab.apply(&[&Svc::web("odd", "10.96.0.90")])?;
    for (row, one, two, expected) in [
        ("ports null", slice("one", &plain, &Value::Null, &at(A)), None, refused),
        ("ports empty", slice("one", &plain, &json!([]), &at(A)), None, refused),
        ("a port without number", slice("one", &plain, &json!([{"name": "t"}]), &at(A)), None, refused),
        (
            "a port without name (I08), another of that number",
            slice("one", &plain, &json!([{"port": 8080}, {"name": "x", "port": 8080}]), &at(A)),
            None,
            refused,
        ),
        (
            "numbers that are none, beside a good one",
            slice(
                "one",
                &plain,
                &json!([{"name": "t", "port": 65536}, {"name": "t", "port": -1}, {"name": "t", "port": 8080},
                    {"name": "u", "port": 8080, "protocol": "UDP"}]),
                &at(A),
            ),
            None,
            "A",
        ),
        ("endpoints null", slice("one", &plain, &ports, &Value::Null), None, refused),
        ("an endpoint without addresses", slice("one", &plain, &ports, &json!([{"addresses": []}])), None, refused),
        (
            "addresses that are none, and the first of several",
            slice(
                "one",
                &plain,
                &ports,
                &json!([{"addresses": ["10.244.1.999"]}, {"addresses": ["2001:db8:1::10"]}, {"addresses": ["0.0.0.0"]},
                    {"addresses": ["224.0.0.1"]}, {"addresses": [A, B]}]),
            ),
            None,
            "A",
        ),
        ("no conditions", slice("one", &plain, &ports, &at(A)), None, "A"),
        ("conditions null", slice("one", &plain, &ports, &with(Value::Null)), None, "A"),
        ("conditions of null", slice("one", &plain, &ports, &with(json!({"ready": null, "serving": null}))), None, "A"),
        (
            "one address in two slices, worst first (14.5)",
            slice("one", &plain, &ports, &with(json!({"ready": false, "serving": false, "terminating": true}))),
            Some(slice("two", &plain, &ports, &with(json!({"ready": true})))),
            "A",
        ),
        (
            "one address in two slices on two ports (I09)",
            slice("one", &plain, &json!([{"name": "t", "port": 9, "protocol": "TCP"}]), &at(A)),
            Some(slice("two", &plain, &json!([{"name": "u", "port": 8080, "protocol": "UDP"}]), &at(A))),
            "split",
        ),
        ("a hint for a zone that is not there", slice("one", &plain, &ports, &hint("nowhere")), None, "A"),
        ("a hint without name", slice("one", &plain, &ports, &hint("")), None, "A"),
        (
            "hints elsewhere, and none",
            slice("one", &plain, &ports, &hint("nowhere")),
            Some(slice("two", &plain, &ports, &at(B))),
            "A B",
        ),
        (
            "a negative weight is none",
            slice("one", &weight("-5"), &ports, &at(A)),
            Some(slice("two", &plain, &ports, &at(B))),
            "A B",
        ),
        (
            "an absurd weight is none",
            slice("one", &weight("99999999999999999999"), &ports, &at(A)),
            Some(slice("two", &weight("NaN"), &ports, &at(B))),
            "A B",
        ),
        (
            "nobody has weight: all are alike",
            slice("one", &weight("0"), &ports, &at(A)),
            Some(slice("two", &weight("0"), &ports, &at(B))),
            "A B",
        ),
        (
            "no JSON of ours",
            slice("one", &plain, &json!("t"), &json!(7)),
            Some(slice("two", &plain, &ports, &at(B))),
            "B",
        ),
    ] {
        let two = two.unwrap_or_else(|| slice("two", &plain, &ports, &json!([])));
        lab.apply(&[&one, &two])?;
        lab.settle(&agent)?;
        let expected = if expected == "split" { [refused, "A"] } else { [expected, expected] };
        // 9/TCP of the pod is closed: what is refused there is so by the pod.
        assert_eq!([names(&client, Way::Tcp)?, names(&client, Way::UdpSendto)?], expected, "{row}");
    }
    Ok(())
}

/// The address of a Service as an endpoint, its own too: nothing is translated twice, and nothing goes in circles.
#[test]
fn an_endpoint_that_is_a_virtual_address_is_no_way_round() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _server = lab.n1().server(10, "A")?;
    let mut client = lab.n1().pod(20)?.place.client()?;
    client.patience = Duration::from_secs(1);
    lab.apply(&[&Svc::web("good", "10.96.0.91"), &Slice::web("good").ready(A, "n1"), &Svc::web("odd", "10.96.0.90")])?;
    for address in ["10.96.0.90", "10.96.0.91"] {
        let ports = json!([{"name": "t", "port": 80, "protocol": "TCP"}, {"name": "u", "port": 80, "protocol": "UDP"}]);
        lab.apply(&[&slice("one", &json!({}), &ports, &json!([{"addresses": [address]}]))])?;
        lab.settle(&agent)?;
        for way in Way::ALL {
            assert_ne!(client.outcome(way, TO)?, "A", "{address}, {way:?}");
            assert_eq!(client.outcome(way, "10.96.0.91:80")?, "A", "{way:?}: the good one is not disturbed");
        }
    }
    Ok(())
}

/// Live connections of a Service's backends, all ports together.
fn connections(agent: &Agent, service: &str) -> Result<u64> {
    let rows = agent.kernel()?;
    let of_service = rows.iter().filter(|row| row.service.as_deref() == Some(service));
    Ok(of_service.flat_map(|row| &row.backends).map(|backend| backend.connections).sum())
}

#[test]
fn a_service_that_flaps_under_load_ends_as_it_was_told_last() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let pod = lab.n1().pod(20)?;
    let clients = [pod.place.client()?, lab.n1().host.client()?];
    let service = Svc::new("flap").ip("10.96.0.90").port("t", 80, "TCP").node_port(30090).port("u", 80, "UDP");
    let service = service.node_port(30090);
    let headless = Svc::web("flap", "None");
    let ready = |addresses: &[&str]| addresses.iter().fold(Slice::web("flap"), |slice, a| slice.ready(a, "n1"));
    lab.apply(&[&service, &ready(&[A])])?;
    lab.settle(&agent)?;
    let mut loads = Vec::new();
    for client in &clients {
        for to in [TO, "192.0.2.11:30090"] {
            for (way, kind) in [(Way::Tcp, LoadKind::Dial), (Way::Udp, LoadKind::Ask), (Way::UdpSendto, LoadKind::Ask)]
            {
                loads.push((way, to, client.load(way, kind, to, Duration::from_millis(2))?));
            }
        }
    }
    let open = clients.iter().map(|client| client.connect(Way::Tcp, TO)).collect::<Result<Vec<_>>>()?;
    let local = service.clone().set("internalTrafficPolicy", json!("Local"));
    for turn in 0..12 {
        lab.apply(&[&ready(&[A, B]), &ready(&[B]), &ready(&[]), &headless, &ready(&[A]), &service])?;
        lab.apply(&[&local, &Slice::web("flap").ready(A, "n2"), &service.clone().affinity(10), &ready(&[B, A])])?;
        if turn % 3 == 0 {
            lab.delete(&[&service, &ready(&[])])?;
        }
        if turn % 4 == 0 {
            lab.settle(&agent)?;
        }
    }
    lab.apply(&[&service, &ready(&[B])])?;
    lab.settle(&agent)?;
    for socket in &open {
        assert_eq!(socket.ask()?.answer.name, "A", "K06: an open connection goes on");
    }
    drop(open);
    for (way, to, load) in &loads {
        let before = load.report()?.names.get("B").copied().unwrap_or_default();
        eventually(&format!("{way:?} to {to} gets to B"), SOON, || {
            let report = load.report()?;
            ensure!(report.names.get("B").is_some_and(|times| *times > before), "{report:?}");
            Ok(())
        })?;
    }
    for (way, to, load) in loads {
        let report = load.stop()?;
        // A UDP socket that was closed has no peer any more.
        let known = ["ECONNREFUSED", "ECONNABORTED", "EDESTADDRREQ", "TIMEOUT", "ENETUNREACH", "EHOSTUNREACH"];
        assert!(report.failures.iter().all(|why| known.contains(&why.as_str())), "{way:?} to {to}: {report:?}");
    }
    drop(clients);
    eventually("every connection is counted down", SOON, || {
        let connections = connections(&agent, "t/flap")?;
        ensure!(connections == 0, "{connections}");
        Ok(())
    })?;
    let status = agent.status()?;
    ensure!(status.health == "ok" && status.warnings.is_empty(), "{status:?}");
    Ok(())
}

/// K03, case 21: among a thousand sockets in four namespaces, exactly those of the backend that left; while one of the
/// namespaces dies under the agent's hands.
#[test]
fn k03_of_a_thousand_sockets_exactly_those_of_the_removed_backend_are_closed() -> Result<()> {
    const EACH: usize = 250;
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    lab.apply(&[&Svc::web("many", "10.96.0.90"), &Slice::web("many").ready(A, "n1").ready(B, "n1")])?;
    lab.settle(&agent)?;
    let pods = (20..24).map(|number| lab.n1().pod(number)).collect::<Result<Vec<_>>>()?;
    let mut dying = (30..40).map(|number| lab.n1().pod(number)).collect::<Result<Vec<_>>>()?;
    let clients = pods.iter().map(|pod| pod.place.client()).collect::<Result<Vec<_>>>()?;
    let mut sockets = Vec::new();
    for client in &clients {
        for _ in 0..EACH {
            let socket = client.connect(Way::Udp, TO)?;
            sockets.push((socket.ask()?.answer.name, socket));
        }
    }
    let of = |name: &str| sockets.iter().filter(|(of, _)| of == name).count();
    ensure!(of("A") > EACH && of("B") > EACH, "{} and {}", of("A"), of("B"));
    eventually("all are counted", SOON, || {
        let connections = connections(&agent, "t/many")?;
        ensure!(connections == 4 * EACH as u64, "{connections}");
        Ok(())
    })?;
    lab.apply(&[&Slice::web("many").ready(B, "n1")])?;
    while let Some(pod) = dying.pop() {
        lab.n1().remove(pod)?; // meanwhile
    }
    let closed = |socket: &Socket<'_>| socket.ask().is_err();
    let (_, last) = sockets.iter().rev().find(|(of, _)| of == "A").context("one of A")?;
    eventually("the last socket of A is closed", SOON, || {
        ensure!(closed(last), "it is still answered");
        Ok(())
    })?;
    for (name, socket) in &sockets {
        assert_eq!(closed(socket), name == "A", "a socket of {name}");
    }
    eventually("those of B are still counted", SOON, || {
        let connections = connections(&agent, "t/many")?;
        ensure!(connections == of("B") as u64, "{connections}");
        Ok(())
    })?;
    Ok(())
}
