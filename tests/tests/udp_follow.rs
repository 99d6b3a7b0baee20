//! Datagrams follow the endpoints, whatever a program does with its socket.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    client::{Client, LoadKind, Running, Socket, Way},
    lab::Lab,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

const TO: &str = "10.96.0.35:80";
const A: &str = "10.244.1.10";
const B: &str = "10.244.1.11";

fn service() -> Svc {
    Svc::web("stats", "10.96.0.35")
}

fn ready(addresses: &[&str]) -> Slice {
    addresses.iter().fold(Slice::web("stats"), |slice, address| slice.ready(address, "n1"))
}

fn address_of(name: &str) -> &'static str {
    if name == "A" { A } else { B }
}

fn other_than(name: &str) -> &'static str {
    if name == "A" { "B" } else { "A" }
}

/// Waits until a load has been answered by somebody.
fn answered_by(load: &Running<'_>, name: &str) -> Result<()> {
    let before = load.report()?.names.get(name).copied().unwrap_or_default();
    eventually(&format!("{name} answers"), SOON, || {
        let report = load.report()?;
        ensure!(report.names.get(name).is_some_and(|times| *times > before), "{report:?}");
        Ok(())
    })
}

/// Connected UDP sockets, one on each of two backends.
fn one_on_each(client: &Client) -> Result<[(String, Socket<'_>); 2]> {
    let mut found: Vec<(String, Socket<'_>)> = Vec::new();
    eventually("both backends are chosen", SOON, || {
        let socket = client.connect(Way::Udp, TO)?;
        let name = socket.ask()?.answer.name;
        if found.iter().all(|(known, _)| *known != name) {
            found.push((name, socket));
        }
        ensure!(found.len() == 2, "only {found:?}");
        Ok(())
    })?;
    found.try_into().ok().context("two sockets")
}

/// F50: the *serving* endpoints keep their flows; ready and terminating do not matter.
#[test]
fn an_unconnected_socket_stays_with_a_backend_that_serves_and_leaves_one_that_does_not() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    lab.apply(&[&service(), &ready(&[A, B])])?;
    lab.settle(&agent)?;
    let pod = lab.n1().pod(20)?;
    for (from, place) in [("pod", &pod.place), ("host", &lab.n1().host)] {
        let client = place.client()?;
        let socket = client.open(Way::UdpSendto, TO.parse()?, None)?;
        let ask = |times: usize| -> Result<String> {
            let mut name = String::new();
            for turn in 0..times {
                let received = socket.ask_at(TO.parse()?)?;
                ensure!(received.source == TO.parse()?, "the answer comes from {}", received.source);
                ensure!(turn == 0 || received.answer.name == name, "{} after {name}", received.answer.name);
                name = received.answer.name;
            }
            Ok(name)
        };
        let first = ask(30)?;
        let (one, other) = (address_of(&first), address_of(other_than(&first)));
        let beside = |slice: Slice| slice.ready(other, "n1");
        let serving = serde_json::json!({"ready": false, "serving": true, "terminating": false});
        for (row, slice, expected) in [
            ("not ready, serving", beside(Slice::web("stats").endpoint(one, "n1", &serving)), "first"),
            ("terminating, serving", beside(Slice::web("stats").terminating(one, "n1")), "first"),
            ("not serving", beside(Slice::web("stats").not_ready(one, "n1")), "other"),
            ("serves again", ready(&[one, other]), "other"),
            ("the other is removed", ready(&[one]), "first"),
            ("both again", ready(&[one, other]), "first"),
            ("removed", ready(&[other]), "other"),
        ] {
            lab.apply(&[&slice])?;
            lab.settle(&agent)?;
            let expected = if expected == "first" { first.as_str() } else { other_than(&first) };
            assert_eq!(ask(10).context(row)?, expected, "{row}, from {from}");
        }
        lab.apply(&[&ready(&[])])?; // K02
        lab.settle(&agent)?;
        assert_eq!(
            format!("{:#}", ask(1).unwrap_err()).split(' ').next(),
            Some("ECONNREFUSED"),
            "{from}: scaled to zero"
        );
        lab.apply(&[&ready(&[A, B])])?;
        lab.settle(&agent)?;
        ask(10).context("scaled up again")?;
    }
    Ok(())
}

/// F50: a flow is a socket and a frontend, as in kube-proxy's conntrack; a resolver that asks two servers in turn
/// stays with one backend of each.
#[test]
fn a_socket_that_alternates_between_services_keeps_a_backend_of_each() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    let services = [("dns", "10.96.0.10"), ("dns2", "10.96.0.11"), ("dns3", "10.96.0.12")];
    let slice = |name: &str, addresses: &[&str]| {
        addresses.iter().fold(Slice::web(name), |slice, address| slice.ready(address, "n1"))
    };
    for (name, ip) in services {
        lab.apply(&[&Svc::web(name, ip), &slice(name, &[A, B])])?;
    }
    lab.settle(&agent)?;
    let pod = lab.n1().pod(20)?;
    for (from, place) in [("pod", &pod.place), ("host", &lab.n1().host)] {
        let client = place.client()?;
        let at = services.map(|(_, ip)| format!("{ip}:80"));
        // One way in thirty-two that chance does the same; ten sockets leave no doubt.
        for _ in 0..10 {
            let socket = client.open(Way::UdpSendto, at[0].parse()?, None)?;
            let ask = |to: &String| -> Result<String> {
                let received = socket.ask_at(to.parse()?)?;
                ensure!(received.source == to.parse()?, "the answer of {to} comes from {}", received.source);
                Ok(received.answer.name)
            };
            let first = at.iter().map(ask).collect::<Result<Vec<_>>>()?;
            for turn in 0..5 {
                let again = at.iter().map(ask).collect::<Result<Vec<_>>>()?;
                assert_eq!(again, first, "{from}, turn {turn}");
            }
            // Its backend of the second leaves: that flow goes to the other one, and the rest stay.
            let (gone, stays) = (address_of(&first[1]), other_than(&first[1]));
            lab.apply(&[&slice("dns2", &[address_of(stays)])])?;
            lab.settle(&agent)?;
            for turn in 0..3 {
                let again = at.iter().map(ask).collect::<Result<Vec<_>>>()?;
                assert_eq!(again, [&first[0], stays, &first[2]], "{from}, {gone} left, turn {turn}");
            }
            lab.apply(&[&slice("dns2", &[A, B])])?;
            lab.settle(&agent)?;
            assert_eq!(ask(&at[1])?, stays, "{from}: both again");
        }
    }
    Ok(())
}

/// Case 21.
#[test]
fn case_21_a_connected_socket_is_told_when_its_backend_is_removed_and_only_then() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?, lab.n1().server(12, "C")?];
    let twin = Svc::web("twin", "10.96.0.37");
    let twin_slice = Slice::web("twin").ready(A, "n1").ready(B, "n1");
    lab.apply(&[&service(), &ready(&[A, B]), &twin, &twin_slice])?;
    lab.settle(&agent)?;
    let pod = lab.n1().pod(20)?;
    for (from, place, restart) in
        [("pod", &pod.place, false), ("host", &lab.n1().host, false), ("pod, over a restart", &pod.place, true)]
    {
        let client = place.client()?;
        let [(gone, on_gone), (stays, on_stays)] = one_on_each(&client)?;
        let by_twin = client.connect(Way::Udp, "10.96.0.37:80")?; // the same pods by another Service
        let twin_name = by_twin.ask()?.answer.name;
        let direct = client.connect(Way::Udp, &format!("{}:8080", address_of(&gone)))?;
        assert_eq!(direct.ask()?.answer.name, gone);
        let tcp = client.connect(Way::Tcp, TO)?;
        let tcp_name = tcp.ask()?.answer.name;
        let resolver = client.load(Way::Udp, LoadKind::Ask, TO, Duration::from_millis(5))?;
        if restart {
            agent.kill()?;
        }
        lab.apply(&[&ready(&[address_of(&stays)])])?;
        if restart {
            agent.restart()?; // removed while nobody was at home
        }
        eventually(&format!("{from}: the socket on the removed backend fails"), SOON, || {
            ensure!(on_gone.ask().is_err(), "it is still answered");
            Ok(())
        })?;
        for _ in 0..3 {
            assert_eq!(on_stays.ask()?.answer.name, stays, "{from}: the other socket is left alone");
            assert_eq!(by_twin.ask()?.answer.name, twin_name, "{from}: so is that of another Service");
            assert_eq!(direct.ask()?.answer.name, gone, "{from}: and one that dialled the pod itself");
            assert_eq!(tcp.ask()?.answer.name, tcp_name, "{from}: and TCP (K06)");
        }
        answered_by(&resolver, &stays).context("a resolver that opens its socket again")?;
        lab.apply(&[&Slice::web("stats").ready("10.244.1.12", "n1")])?; // the other goes, a third comes
        answered_by(&resolver, "C")?;
        let report = resolver.stop()?;
        assert!(report.longest_gap < Duration::from_secs(5), "{from}: {report:?}");
        lab.apply(&[&ready(&[A, B])])?;
        lab.settle(&agent)?;
    }
    Ok(())
}

/// F50: an endpoint that stops serving loses its flows as if it were removed.
#[test]
fn a_connected_socket_leaves_an_endpoint_that_stops_serving() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let _servers = [lab.n1().server(10, "A")?, lab.n1().server(11, "B")?];
    lab.apply(&[&service(), &ready(&[A, B])])?;
    lab.settle(&agent)?;
    let client = lab.n1().pod(20)?.place.client()?;
    let [(one, on_one), (other, on_other)] = one_on_each(&client)?;
    lab.apply(&[&ready(&[address_of(&other)]).terminating(address_of(&one), "n1")])?;
    lab.settle(&agent)?;
    assert_eq!(on_one.ask()?.answer.name, one, "terminating, but it serves");
    lab.apply(&[&ready(&[address_of(&other)]).not_ready(address_of(&one), "n1")])?;
    eventually("the socket fails", SOON, || {
        ensure!(on_one.ask().is_err(), "it is still answered");
        Ok(())
    })?;
    assert_eq!(on_other.ask()?.answer.name, other);
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    ScaledToZero,
    Deleted,
}

/// Case 22: senders that never read.
#[test]
fn case_22_nothing_reaches_the_old_address_after_a_scale_down() -> Result<()> {
    one_way_senders(Change::ScaledToZero)
}

#[test]
fn case_22_nothing_reaches_the_old_address_after_the_service_is_deleted() -> Result<()> {
    one_way_senders(Change::Deleted)
}

fn one_way_senders(change: Change) -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let mut old = lab.n1().server(10, "old")?;
    let service = Svc::new("stats").ip("10.96.0.35").port("u", 80, "UDP").node_port(30035);
    lab.apply(&[&service, &ready(&[A])])?;
    lab.settle(&agent)?;
    let pod = lab.n1().pod(20)?;
    let clients = [pod.place.client()?, lab.n1().host.client()?];
    let mut senders = Vec::new();
    for client in &clients {
        for (way, to) in
            [(Way::Udp, TO), (Way::UdpSendto, TO), (Way::Udp, "192.0.2.11:30035"), (Way::UdpSendto, "192.0.2.11:30035")]
        {
            senders.push(client.load(way, LoadKind::Send, to, Duration::from_millis(5))?);
        }
    }
    old.echo.reached("the backend gets datagrams")?;

    match change {
        Change::ScaledToZero => lab.apply(&[&ready(&[])])?,
        Change::Deleted => lab.delete(&[&service])?,
    }
    eventually("nothing reaches the old address", Duration::from_secs(5), || old.echo.unreached())?;

    // An unrelated pod gets the address.
    drop(old.echo);
    lab.n1().remove(old.pod)?;
    let mut unrelated = lab.n1().server(10, "unrelated")?;
    unrelated.echo.unreached()?;

    let mut new = lab.n1().server(12, "new")?;
    // The slice first: the deleted Service's still names the old address.
    lab.apply(&[&ready(&["10.244.1.12"]), &service])?;
    lab.settle(&agent)?;
    for (number, sender) in senders.into_iter().enumerate() {
        let before = new.echo.seen()?;
        new.echo.reached("the new backend gets datagrams")?;
        drop(sender); // one less each time: so each of them is among those that reach it
        ensure!(new.echo.seen()? > before, "sender {number}");
    }
    assert_eq!(unrelated.echo.seen()?, 0);
    Ok(())
}

/// K07: whoever dialled too early, into the wilderness or into silence, gets there once there is somebody.
#[test]
fn k07_a_sender_that_came_too_early_reaches_the_first_endpoint() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let mut server = lab.n1().server(10, "A")?;
    let pod = lab.n1().pod(20)?;
    let clients = [pod.place.client()?, lab.n1().host.client()?];
    let local = service().set("internalTrafficPolicy", serde_json::json!("Local"));
    let elsewhere = Slice::web("stats").ready(A, "n2");
    for (row, flags, before) in [
        ("no Service", &[][..], None),
        ("no Service, V-5", &["--service-cidrs=10.96.0.0/16,2001:db8:f::/112"], None),
        ("no endpoint here, V-2", &[], Some((&local, &elsewhere))),
    ] {
        let agent = lab.n1().agent_with(flags)?;
        if let Some((service, slice)) = before {
            lab.apply(&[service, slice])?;
        }
        lab.settle(&agent)?;
        let senders = clients
            .iter()
            .map(|client| client.load(Way::Udp, LoadKind::Send, TO, Duration::from_millis(5)))
            .collect::<Result<Vec<_>>>()?;
        for sender in &senders {
            eventually("it sends", SOON, || {
                ensure!(sender.report()?.answered > 5, "{row}: not yet");
                Ok(())
            })?;
        }
        lab.apply(&[&local, &ready(&[A])])?;
        for sender in senders {
            server.echo.reached(&format!("{row}: the endpoint gets datagrams"))?;
            drop(sender);
        }
        lab.delete(&[&local, &ready(&[])])?;
        lab.settle(&agent)?;
    }
    Ok(())
}
