//! FLOW rows beyond the first, and the settings of the packet path, with packets from outside.

use std::{io::Read as _, net::SocketAddr, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::Way,
    lab::Lab,
    node::Server,
    objects::{Slice, Svc},
    packet::{ACK, Draft, ETH, FIN, RST, SYN, TCP},
    pair::{N1, N1_6, N1_6_UPLINK, N1_UPLINK, OUTSIDE, Pair, WAYS, reaches},
    place::Place,
    wait::{SOON, eventually},
};
use socket2::{Domain, Protocol, Socket, Type};

const POD: &str = "10.244.1.30";

/// FLOW-1, the rows of pods and of the node as they are by default: their sockets go straight to the endpoint. So it sees
/// a pod at a node port, a balancer's and an external address too, where kube-proxy masquerades unless the policy is Local.
#[test]
fn flow_1_sockets_go_straight_to_the_endpoint_which_sees_whose_they_are() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let inside = pair.lab.n1().pod(30)?;
    let from_outside = |n: u8, s: Svc| {
        let external = [format!("203.0.113.1{n}"), format!("2001:db8:203::1{n}")];
        let s = s.ingress(&format!("203.0.113.{n}"), "VIP").ingress(&format!("2001:db8:203::{n}"), "VIP");
        s.set("externalIPs", json!(external))
    };
    let both = [&pair.a, &pair.b];
    pair.service("svc1", 41, &both, |s| from_outside(41, s))?;
    pair.service("svc2", 42, &both, |s| from_outside(42, s).set("externalTrafficPolicy", json!("Local")))?;
    pair.service("svc3", 43, &both, |s| from_outside(43, s).set("internalTrafficPolicy", json!("Local")))?;
    let agent = pair.lab.n1().agent()?;
    pair.lab.settle(&agent)?;
    for (client, seen, seen6) in
        [(inside.place.client()?, POD, "2001:db8:1::30"), (pair.lab.n1().host.client()?, N1_UPLINK, N1_6_UPLINK)]
    {
        let (v4, v6) = ([("a", seen), ("b", seen)], [("a", seen6), ("b", seen6)]);
        for way in Way::ALL {
            for n in [41, 42, 43] {
                for (ip, node, [balancer, external], servers) in [
                    (
                        format!("10.96.0.{n}:80"),
                        "192.0.2.11",
                        [format!("203.0.113.{n}:80"), format!("203.0.113.1{n}:80")],
                        &v4,
                    ),
                    (
                        format!("[2001:db8:96::{n}]:80"),
                        "[2001:db8::11]",
                        [format!("[2001:db8:203::{n}]:80"), format!("[2001:db8:203::1{n}]:80")],
                        &v6,
                    ),
                ] {
                    let near = if n == 43 { &servers[..1] } else { &servers[..] };
                    reaches(&client, way, &ip, near)?;
                    reaches(&client, way, &format!("{node}:300{n}"), servers)?;
                    reaches(&client, way, &balancer, servers)?;
                    reaches(&client, way, &external, servers)?;
                }
            }
        }
    }
    Ok(())
}

/// FLOW-1, the settings: who is hidden from whom. Pods dial packet by packet, so that they can be.
#[test]
fn flow_1_settings_decide_who_is_hidden() -> Result<()> {
    type Row = (&'static str, &'static str, &'static [(&'static str, &'static str)]);
    let settings: [(&[&str], &[Row]); 4] = [
        (
            &["--masquerade-all"],
            &[
                ("pod", "10.96.0.41:80", &[("a", N1), ("b", N1_UPLINK)]),
                ("outside", "10.96.0.41:80", &[("a", N1), ("b", N1_UPLINK)]),
                ("pod", "192.0.2.11:30042", &[("a", POD), ("b", POD)]),
            ],
        ),
        (
            &["--detect-pods=none"],
            &[
                // Of a Service with both, the far one would answer past this node.
                ("outside", "10.96.0.44:80", &[("a", OUTSIDE)]),
                ("pod", "10.96.0.41:80", &[("a", POD), ("b", POD)]),
                ("pod", "192.0.2.11:30042", &[("a", POD)]),
                ("pod", "203.0.113.42:80", &[("a", POD)]),
            ],
        ),
        (
            &["--masquerade-all", "--detect-pods=none"],
            &[
                ("pod", "10.96.0.41:80", &[("a", N1), ("b", N1_UPLINK)]),
                ("pod", "192.0.2.11:30042", &[("a", POD)]),
                ("outside", "10.96.0.41:80", &[("a", N1), ("b", N1_UPLINK)]),
            ],
        ),
        (
            &["--preserve-client-ip-for-local-backends"],
            &[
                ("outside", "192.0.2.11:30041", &[("a", OUTSIDE), ("b", N1_UPLINK)]),
                ("outside", "203.0.113.41:80", &[("a", OUTSIDE), ("b", N1_UPLINK)]),
            ],
        ),
    ];
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let client = pair.lab.n1().pod(30)?;
    let (pod, outside) = (client.place.client()?, pair.lab.outside.client()?);
    let address = |n: u8| move |service: Svc| service.ingress(&format!("203.0.113.{n}"), "VIP");
    pair.service("svc1", 41, &[&pair.a, &pair.b], address(41))?;
    pair.service("svc2", 42, &[&pair.a, &pair.b], |s| address(42)(s).set("externalTrafficPolicy", json!("Local")))?;
    pair.service("near", 44, &[&pair.a], |s| s)?;
    for (flags, rows) in settings {
        let flags = [&["--host-sockets-only", "--pod-packets"], flags].concat();
        let mut agent = pair.lab.n1().agent_with(&flags)?;
        for (from, to, servers) in rows {
            let client = if *from == "pod" { &pod } else { &outside };
            for way in WAYS {
                reaches(client, way, to, servers).with_context(|| format!("{flags:?}: {from}"))?;
            }
        }
        agent.terminate()?;
    }
    Ok(())
}

/// `--mark-bit`: between ingress and egress the kernel sees that bit on what is masqueraded, and the next one on replies;
/// no other rule of the host may take them for its own.
#[test]
fn the_bits_of_the_mark_are_those_that_are_asked_for() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("web", 41, &[&pair.b], |s| s)?;
    let node = pair.lab.n1();
    let mut outside = pair.lab.outside.client()?;
    outside.patience = Duration::from_secs(1);
    for (flags, ours) in [(&[][..], [11, 12]), (&["--mark-bit=20"], [20, 21])] {
        let mut agent = node.agent_with(flags)?;
        for bit in [11, 12, 20, 21] {
            let rule = format!("fwmark {0:#x}/{0:#x} pref 10 blackhole", 1_u32 << bit);
            node.host.ip(&format!("rule add {rule}"))?;
            for way in WAYS {
                let expected = if ours.contains(&bit) { "TIMEOUT" } else { "b" };
                let said = outside.outcome(way, "192.0.2.11:30041")?;
                assert_eq!(said, expected, "{flags:?}: {way:?}, what has bit {bit} is dropped by a rule");
            }
            node.host.ip(&format!("rule del {rule}"))?;
        }
        agent.terminate()?;
    }
    Ok(())
}

/// FLOW-5: a node port is on the primary address, unless networks are named. Both endpoints are reached there, by
/// clients that are masqueraded; the ClusterIP does not care.
#[test]
fn flow_5_node_ports_are_on_the_addresses_that_are_asked_for() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let (node, inside) = (pair.lab.n1(), pair.lab.n1().pod(30)?);
    // As a balancer's that moves between nodes: they do not hide anybody.
    node.host.ip("addr add 192.0.2.111/24 dev eth0\naddr add 2001:db8::111/64 dev eth0 preferred_lft 0")?;
    pair.service("web", 41, &[&pair.a, &pair.b], |s| s)?;
    let (outside, host, pod) = (pair.lab.outside.client()?, node.host.client()?, inside.place.client()?);
    let (hidden, hidden6) = ([("a", N1), ("b", N1_UPLINK)], [("a", N1_6), ("b", N1_6_UPLINK)]);
    let (v4, v6) = (("192.0.2.11", "192.0.2.111"), ("[2001:db8::11]", "[2001:db8::111]"));
    for (networks, is_on_others, is_on_others6) in [
        (None, false, false),
        (Some("192.0.2.0/24,2001:db8::11/128"), true, false),
        (Some("192.0.2.0/24,2001:db8::/64"), true, true),
    ] {
        let flags: Vec<String> = networks.iter().map(|list| format!("--nodeport-addresses={list}")).collect();
        let mut agent = node.agent_with(&flags.iter().map(String::as_str).collect::<Vec<_>>())?;
        for way in WAYS {
            for ((primary, other), is_on_other, servers) in [(v4, is_on_others, &hidden), (v6, is_on_others6, &hidden6)]
            {
                let (primary, other) = (format!("{primary}:30041"), format!("{other}:30041"));
                let row = || format!("FLOW-5 {networks:?}");
                reaches(&outside, way, &primary, servers).with_context(row)?;
                if is_on_other {
                    reaches(&outside, way, &other, servers).with_context(row)?;
                } else {
                    // Left to the kernel, which limits how often it tells a sender of datagrams that nobody listens.
                    let said = outside.outcome(way, &other)?;
                    let is_left = said == "ECONNREFUSED" || way == Way::Udp && said == "TIMEOUT";
                    assert!(is_left, "FLOW-5 {networks:?} {way:?} {other}: {said}");
                }
                let as_itself = servers.map(|(name, _)| (name, servers[1].1));
                reaches(&host, way, &primary, &as_itself).with_context(row)?;
            }
            reaches(&pod, way, "10.96.0.41:80", &[("a", POD), ("b", POD)]).context("FLOW-5")?;
        }
        agent.terminate()?;
    }
    Ok(())
}

/// FLOW-6, FLOW-7: external addresses follow the policy as the others do. FLOW-10: a balancer that is a proxy keeps its
/// address. FLOW-12 svc4: type NodePort with an external address and no number.
#[test]
fn flow_6_7_10_12_external_addresses_and_balancers() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    let both = [&pair.a, &pair.b];
    let external = |n: u8, s: Svc| s.set("externalIPs", json!([format!("203.0.113.{n}")]));
    pair.service("flow6", 41, &both, |s| {
        external(1, s).ingress("203.0.113.101", "VIP").set("externalTrafficPolicy", json!("Local"))
    })?;
    pair.service("flow7", 42, &both, |s| external(2, s).ingress("203.0.113.102", "VIP"))?;
    pair.service("flow10", 43, &both, |s| s.ingress("203.0.113.103", "Proxy"))?;
    let svc4 = Svc::web("svc4", "10.96.0.44").set("type", json!("NodePort")).set("externalIPs", json!(["203.0.113.4"]));
    let slice = Slice::web("svc4").ready("10.244.1.10", "n1").ready("10.244.2.20", "n2");
    pair.lab.apply(&[&svc4, &slice])?;
    // FLOW-12 svc2: its one endpoint is on another node.
    pair.service("svc2", 45, &[&pair.b], |s| {
        external(5, s).ingress("203.0.113.105", "VIP").set("externalTrafficPolicy", json!("Local"))
    })?;
    let agent = pair.lab.n1().agent()?;
    for name in ["flow6", "flow7", "flow10", "svc4", "svc2"] {
        agent.until_programmed(name)?;
    }
    let (mut outside, inside) = (pair.lab.outside.client()?, pair.lab.n1().host.client()?);
    outside.patience = Duration::from_secs(1);
    let hidden = [("a", N1), ("b", N1_UPLINK)];
    for way in WAYS {
        for to in ["203.0.113.1:80", "203.0.113.101:80", "192.0.2.11:30041"] {
            reaches(&outside, way, to, &[("a", OUTSIDE)]).context("FLOW-6")?;
        }
        for to in ["203.0.113.2:80", "203.0.113.102:80", "192.0.2.11:30042"] {
            reaches(&outside, way, to, &hidden).context("FLOW-7")?;
        }
        let proxied = outside.outcome(way, "203.0.113.103:80")?;
        assert!(!["a", "b", "ECONNREFUSED"].contains(&proxied.as_str()), "FLOW-10 {way:?}: {proxied}");
        reaches(&outside, way, "192.0.2.11:30043", &hidden).context("FLOW-10")?;
        reaches(&outside, way, "203.0.113.4:80", &hidden).context("FLOW-12 svc4")?;
        for to in ["203.0.113.5:80", "203.0.113.105:80", "192.0.2.11:30045"] {
            assert_eq!(outside.outcome(way, to)?, "TIMEOUT", "FLOW-12 svc2 {way:?} {to}");
            assert_eq!(inside.outcome(way, to)?, "b", "FLOW-12 svc2 {way:?} {to}, from the node");
        }
    }
    Ok(())
}

/// FLOW-9: who answers while endpoints end, to a pod at the ClusterIP and to the outside at the balancer's address, and
/// whom they see.
#[test]
fn flow_9_terminating_endpoints() -> Result<()> {
    /// Pods by their last digits, the last one on the other node; a state of "L" is of an endpoint that counts as local.
    type Row = (&'static str, &'static str, &'static [(u8, &'static str)], &'static [u8], &'static [u8]);
    const ROWS: [Row; 8] = [
        ("a", "Local", &[(11, "R L"), (12, "R L"), (13, "ST L"), (14, "T L"), (15, "R")], &[11, 12, 15], &[11, 12]),
        ("a", "Cluster", &[(11, "R L"), (12, "R L"), (13, "ST"), (14, "T"), (15, "R")], &[11, 12, 15], &[11, 12, 15]),
        ("b", "Local", &[(12, "ST L"), (13, "ST L"), (14, "T L"), (15, "R")], &[15], &[12, 13]),
        ("b", "Cluster", &[(12, "ST L"), (13, "ST L"), (14, "T"), (15, "ST")], &[12, 13, 15], &[12, 13, 15]),
        ("c", "Local", &[(15, "ST")], &[15], &[]),
        ("c", "Cluster", &[(15, "ST")], &[15], &[15]),
        ("d", "Local", &[(15, "T L"), (15, "T")], &[], &[]),
        ("d", "Cluster", &[(15, "T L"), (15, "T")], &[], &[]),
    ];
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let node = |number: u8| if number < 15 { lab.n1() } else { lab.n2() };
    let servers: Vec<Server> =
        (11..=15).map(|number| node(number).server(number, &number.to_string())).collect::<Result<_>>()?;
    lab.route("203.0.113.0/24", lab.n1())?;
    let agent = lab.n1().agent()?;
    let (pod, mut outside) = (lab.n1().pod(30)?.place.client()?, lab.outside.client()?);
    outside.patience = Duration::from_millis(500);
    for (id, policy, endpoints, inside_reaches, outside_reaches) in ROWS {
        let service = Svc::web("web", "10.96.0.20").ingress("203.0.113.20", "VIP");
        let slice = endpoints.iter().fold(Slice::web("web"), |slice, (number, state)| {
            let (state, node) = state.strip_suffix(" L").map_or((*state, "n2"), |state| (state, "n1"));
            let conditions = json!({"ready": state == "R", "serving": state != "T", "terminating": state != "R"});
            slice.endpoint(&servers[usize::from(number - 11)].pod.v4.to_string(), node, &conditions)
        });
        lab.apply(&[&service.set("externalTrafficPolicy", json!(policy)), &slice])?;
        lab.settle(&agent)?;
        let hidden = |number: u8| match policy {
            "Local" => OUTSIDE,
            _ if number < 15 => N1,
            _ => N1_UPLINK,
        };
        let name = |number: &u8| number.to_string();
        for (from, client, to, expected, seen) in [
            ("a pod", &pod, "10.96.0.20:80", inside_reaches, &(|_| POD) as &dyn Fn(u8) -> &'static str),
            ("outside", &outside, "203.0.113.20:80", outside_reaches, &hidden),
        ] {
            for way in WAYS {
                let what = format!("FLOW-9{id} {policy}, {from} to {to}");
                if expected.is_empty() {
                    // With endpoints elsewhere a Local policy is silent.
                    let (said, refusal) = match id {
                        "c" => (client.outcome(way, to), "TIMEOUT"),
                        _ => (client.refusal(way, to), "ECONNREFUSED"),
                    };
                    assert_eq!(said?, refusal, "{what}, {way:?}");
                    continue;
                }
                let names: Vec<String> = expected.iter().map(name).collect();
                let servers: Vec<_> =
                    names.iter().zip(expected).map(|(name, number)| (name.as_str(), seen(*number))).collect();
                reaches(client, way, to, &servers).context(what)?;
            }
        }
    }
    lab.delete(&[&Slice::web("web")])?;
    lab.settle(&agent)?;
    for (client, to) in [(&pod, "10.96.0.20:80"), (&outside, "203.0.113.20:80")] {
        for way in WAYS {
            assert_eq!(client.refusal(way, to)?, "ECONNREFUSED", "FLOW-9, after the slice is deleted, {way:?} {to}");
        }
    }
    Ok(())
}

/// FLOW-14: a segment that no TCP would expect (kubernetes#74839) comes from whom the client dialled or not at all, while
/// the connection is open, after one side has reset it, and when both have closed it.
#[test]
fn flow_14_segments_outside_the_window_never_show_the_backend() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("hidden", 41, &[&pair.a], |s| s)?;
    pair.service("seen", 42, &[&pair.a], |s| s.set("externalTrafficPolicy", json!("Local")))?;
    let _agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let raw = |place: &Place, protocol: i32| {
        let open = move || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(protocol)));
        place.enter(open)?.context("cannot open a raw socket")
    };
    let mut ear = raw(&pair.lab.outside, libc::IPPROTO_TCP)?;
    ear.set_read_timeout(Some(SOON))?;
    let mouth = raw(&pair.a.place, libc::IPPROTO_RAW)?;
    for to in ["192.0.2.11:30041", "192.0.2.11:30042"] {
        let connection = outside.connect(Way::Tcp, to)?;
        let (client, seen) = (connection.local()?, connection.ask()?.answer.client);
        let mut connection = Some(connection);
        for (what, flags) in [("open", ACK), ("open", ACK | RST), ("reset", ACK), ("closed", ACK)] {
            if what == "closed" {
                connection.take();
            }
            // The sequence number is another one than that of any real stream here, but for one chance in 2^16.
            let marker = format!("{to} {what} {flags}");
            let draft = Draft::new(TCP, pair.a.at(8080), seen);
            let segment = Draft { tcp: flags, payload: marker.clone().into_bytes(), ..draft }.bytes();
            mouth.send_to(&segment[ETH..], &seen.into())?;
            let ends = until_heard(&mut ear, marker.as_bytes()).context(marker)?;
            assert_eq!(ends, (to.parse()?, client), "{what}");
        }
    }
    Ok(())
}

/// A RST that its receiver does not heed, stale or forged, does not shorten the life of the flow: it goes on as open.
#[test]
fn a_reset_that_nobody_heeds_ends_no_flow() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("hidden", 41, &[&pair.a], |s| s)?;
    pair.service("seen", 42, &[&pair.a], |s| s.set("externalTrafficPolicy", json!("Local")))?;
    let agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let raw = || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)));
    let (client_mouth, backend_mouth) = (pair.lab.outside.enter(raw)??, pair.a.place.enter(raw)??);
    for to in ["192.0.2.11:30041", "192.0.2.11:30042"] {
        let connection = outside.connect(Way::Tcp, to)?;
        let (client, seen) = (connection.local()?, connection.ask()?.answer.client);
        let until = |state: &str| {
            eventually(&format!("{to} is {state}"), SOON, || {
                let list: Value = serde_json::from_str(&agent.sheave(&["lb", "list", "--conntrack", "-o", "json"])?)?;
                let items = list["items"].as_array().context("no items")?;
                let flow = items.iter().find(|item| item["client"] == client.to_string()).context("no such flow")?;
                ensure!(flow["state"] == state, "{flow}");
                Ok(())
            })
        };
        until("open")?;
        for (mouth, from, at) in [(&client_mouth, client, to.parse()?), (&backend_mouth, pair.a.at(8080), seen)] {
            // Of another sequence number than the stream's, but for one chance in 2^16.
            let segment = Draft { tcp: RST, payload: Vec::new(), ..Draft::new(TCP, from, at) }.bytes();
            mouth.send_to(&segment[ETH..], &at.into())?;
            until("closed")?;
            assert_eq!(connection.ask()?.answer.name, "a", "{to}, after a RST from {from}");
            until("open")?;
        }
    }
    Ok(())
}

/// Whoever knows a connection's two ends cannot lead it elsewhere: a forged end and a forged SYN are not enough (F51).
#[test]
fn forged_segments_lead_no_connection_elsewhere() -> Result<()> {
    let Some(pair) = Pair::new()? else { return Ok(()) };
    pair.service("web", 41, &[&pair.a, &pair.b], |s| s)?;
    let _agent = pair.lab.n1().agent()?;
    let outside = pair.lab.outside.client()?;
    let to: SocketAddr = "192.0.2.11:30041".parse()?;
    let raw = || Socket::new(Domain::IPV4, Type::RAW, Some(Protocol::from(libc::IPPROTO_RAW)));
    let mouth = pair.lab.outside.enter(raw)??;
    for (what, end) in [("RST", RST), ("FIN", FIN | ACK)] {
        let connection = outside.connect(Way::Tcp, &to.to_string())?;
        let (client, name) = (connection.local()?, connection.ask()?.answer.name);
        for turn in 0..8 {
            for tcp in [end, SYN] {
                let segment = Draft { tcp, payload: Vec::new(), ..Draft::new(TCP, client, to) }.bytes();
                mouth.send_to(&segment[ETH..], &to.into())?;
            }
            assert_eq!(connection.ask()?.answer.name, name, "{what} and SYN, {turn}");
        }
    }
    Ok(())
}

/// The ends of the segment with such a payload, source first.
fn until_heard(ear: &mut Socket, payload: &[u8]) -> Result<(SocketAddr, SocketAddr)> {
    let mut packet = [0; 2048];
    loop {
        let length = ear.read(&mut packet).context("it never came")?;
        let Some(segment) = packet[..length].strip_suffix(payload) else { continue };
        let end = |ip: usize, port: usize| -> Result<SocketAddr> {
            let ip: [u8; 4] = segment[ip..ip + 4].try_into()?;
            Ok(SocketAddr::from((ip, u16::from_be_bytes([segment[port], segment[port + 1]]))))
        };
        return Ok((end(12, 20)?, end(16, 22)?));
    }
}
