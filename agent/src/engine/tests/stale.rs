//! What the agent decides about old flows: which connected sockets are told that their peer is gone, and when clients
//! with session affinity are forgotten.

use std::{collections::BTreeSet, net::IpAddr};

use sheave_ebpf::proto;

use super::{Engine, Fake, Fault, Svc, Update, empty_tables, engine, gone, put, rows, settle, slice, svc};
use crate::datapath::Stale;

/// UDP and TCP port 80 of one Service.
fn dns() -> Svc {
    svc("t/dns", "10.96.0.10").port("u 80/UDP").port("t 80/TCP")
}

fn endpoints(endpoints: &str) -> Update {
    slice("t/dns-1", "dns", "u 8080/UDP,t 8080/TCP", endpoints)
}

/// What is told to close, as `UDP 10.0.0.1:8080` for a backend and `10.96.0.10:80` for a frontend.
fn told(engine: &mut Engine<Fake>) -> BTreeSet<String> {
    let text = |addr, port: u16| format!("{}:{}", IpAddr::from(addr), u16::from_be(port));
    let stale = engine.take_stale().into_iter();
    stale
        .map(|stale| match stale {
            Stale::Backend { service: _, addr, port, proto: proto::UDP } => format!("UDP {}", text(addr, port)),
            Stale::Backend { service: _, addr, port, proto: proto::SCTP } => format!("SCTP {}", text(addr, port)),
            Stale::Backend { service: _, addr, port, proto: _ } => format!("TCP {}", text(addr, port)),
            Stale::Frontend { service: _, was_silent: _, addr, port, proto: proto::UDP } => text(addr, port),
            Stale::Frontend { service: _, was_silent: _, addr, port, proto: _ } => format!("TCP {}", text(addr, port)),
        })
        .collect()
}

fn step(engine: &mut Engine<Fake>, updates: Vec<Update>) -> BTreeSet<String> {
    updates.into_iter().for_each(|update| engine.update(update));
    settle(engine);
    told(engine)
}

fn set(texts: &[&str]) -> BTreeSet<String> {
    texts.iter().map(ToString::to_string).collect()
}

fn start(updates: Vec<Update>) -> Engine<Fake> {
    let mut engine = engine(empty_tables());
    let mut lists = vec![Update::Nodes(vec![]), Update::Services(vec![]), Update::Slices(vec![])];
    lists.extend(updates);
    step(&mut engine, lists);
    engine
}

#[test]
fn sockets_follow_the_serving_endpoints() {
    let gone_1 = &["UDP 10.0.0.1:8080", "TCP 10.0.0.1:8080"][..];
    let udp_1 = &["UDP 10.0.0.1:8080"][..];
    for (name, update, expected) in [
        ("nothing changes", endpoints(".1 R;.2 R"), &[][..]),
        ("one more", endpoints(".1 R;.2 R;.3 R"), &[]),
        ("removed", endpoints(".2 R"), gone_1), // TCP is closed only where the operator wants it
        ("not ready, serving", endpoints(".1 S;.2 R"), &[]),
        ("terminating, serving", endpoints(".1 ST;.2 R"), &[]),
        ("not serving: UDP only (K06)", endpoints(".1 U;.2 R"), udp_1),
        ("terminating, not serving", endpoints(".1 T;.2 R"), udp_1),
        ("only terminating ones are left", endpoints(".1 ST;.2 ST"), &[]),
        (
            "its target port is another",
            slice("t/dns-1", "dns", "u 8080/UDP,t 9090/TCP", ".1 R;.2 R"),
            &["TCP 10.0.0.1:8080", "TCP 10.0.0.2:8080"],
        ),
        (
            "K02: scaled to zero",
            endpoints(""),
            &["UDP 10.0.0.1:8080", "UDP 10.0.0.2:8080", "TCP 10.0.0.1:8080", "TCP 10.0.0.2:8080"],
        ),
        (
            "K05: the Service is deleted",
            gone("t/dns"),
            &["UDP 10.0.0.1:8080", "UDP 10.0.0.2:8080", "TCP 10.0.0.1:8080", "TCP 10.0.0.2:8080"],
        ),
        (
            "K05: its UDP port is",
            put(&svc("t/dns", "10.96.0.10").port("t 80/TCP")),
            &["UDP 10.0.0.1:8080", "UDP 10.0.0.2:8080"],
        ),
    ] {
        let mut engine = start(vec![put(&dns()), endpoints(".1 R;.2 R")]);
        assert_eq!(step(&mut engine, vec![update]), set(expected), "{name}");
        while engine.reclaim() {}
        engine.resync();
        assert_eq!(step(&mut engine, vec![]), set(&[]), "{name}: told once");
    }
}

/// K01: whatever there is, only flows of the Service that changed end, and of what goes on being served none. That of TCP
/// and SCTP only what is in no slice any more is named: sockets of the one are closed where the operator wants it, those
/// of the other not at all.
#[test]
fn k01_flows_end_by_protocol_target_and_state_of_the_endpoint() {
    const STATES: [(&str, &str); 3] = [(".4 R", "10.0.0.4"), (".5 U", "10.0.0.5"), ("", "10.0.0.6")];
    let ports = |target: u16| format!("t {target}/TCP,u {target}/UDP,s {target}/SCTP");
    let slices = |name: &str, target, endpoints: &str| slice(&format!("t/{name}-1"), name, &ports(target), endpoints);
    let ready = ".4 R;.5 R;.6 R";
    let k01 = svc("t/k01", "172.30.1.1").port("t 8000/TCP").port("u 8000/UDP np 32000").port("s 8000/SCTP np 32000");
    let k01 = k01.kind("LoadBalancer").external(&["192.168.99.100"]).ingress("1.2.3.4", None);
    let foreign = svc("t/foreign", "172.30.1.2").port("t 3000/TCP").port("u 3000/UDP").port("s 3000/SCTP");
    let others = [put(&foreign), slices("foreign", 9090, ready)];
    let mut engine = start([&[put(&k01), slices("k01", 8080, ready)][..], &others].concat());

    let moved = step(&mut engine, vec![slices("k01", 9090, ready)]);
    let all = |target: u16| {
        let of = move |(_, ip): (&str, &str)| ["UDP", "TCP", "SCTP"].map(|proto| format!("{proto} {ip}:{target}"));
        STATES.into_iter().flat_map(of).collect::<BTreeSet<_>>()
    };
    assert_eq!(moved, all(8080), "the old target port is nobody's any more");

    let states: Vec<_> = STATES.iter().map(|(state, _)| *state).filter(|state| !state.is_empty()).collect();
    let told = step(&mut engine, vec![slices("k01", 9090, &states.join(";"))]);
    for (ip, state, expected) in [
        ("10.0.0.4", "serving", &[][..]),
        ("10.0.0.5", "not serving", &["UDP"]),
        ("10.0.0.6", "deleted", &["SCTP", "TCP", "UDP"]),
    ] {
        let of_it = told.iter().filter_map(|told| told.strip_suffix(&format!(" {ip}:9090"))).collect::<Vec<_>>();
        assert_eq!(of_it, expected, "{state}");
    }
    assert_eq!(told.len(), 4, "{told:?}");
}

/// K07.
#[test]
fn sockets_that_dialled_too_early_are_told_when_there_is_somebody() {
    let local = || put(&dns().internal_local());
    let mut engine = start(vec![]);
    for (name, updates, expected) in [
        ("a new Service without endpoints", vec![put(&dns())], &["10.96.0.10:80", "TCP 10.96.0.10:80"][..]), // raw sockets: now refused
        ("its first endpoint: there are no sockets", vec![endpoints(".1 R")], &[]),
        (
            "an external address",
            vec![put(&dns().external(&["203.0.113.1"]))],
            &["203.0.113.1:80", "TCP 203.0.113.1:80"],
        ),
        ("gone again", vec![put(&dns())], &[]),
        ("Local, nothing here: silence (V-2)", vec![local()], &[]),
        ("Local, somebody here", vec![endpoints(".1 R;.2 R L")], &["10.96.0.10:80", "TCP 10.96.0.10:80"]),
        ("Local, gone again", vec![endpoints(".1 R")], &["TCP 10.0.0.2:8080", "UDP 10.0.0.2:8080"]),
        ("Cluster", vec![put(&dns())], &["10.96.0.10:80", "TCP 10.96.0.10:80"]),
    ] {
        assert_eq!(step(&mut engine, updates), set(expected), "{name}");
    }
}

#[test]
fn an_address_that_changes_hands_takes_its_sockets_with_it() {
    let contested = |name: &str, ip: &str, created| {
        put(&svc(name, ip).port("u 53/UDP").external(&["203.0.113.9"]).created(created))
    };
    let mut engine = start(vec![contested("t/young", "10.96.0.11", 2)]);
    let older = step(&mut engine, vec![contested("t/old", "10.96.0.12", 1)]);
    assert_eq!(older, set(&["203.0.113.9:53", "10.96.0.12:53"]), "the older Service comes");
    assert_eq!(step(&mut engine, vec![gone("t/old")]), set(&["203.0.113.9:53"]), "and goes");
}

/// Case 21: whatever happened while nobody was at home.
#[test]
fn a_successor_tells_what_was_removed_before_it_came() {
    let kept = || vec![put(&dns()), endpoints(".1 R;.2 R"), put(&svc("t/other", "10.96.0.11").port("u 80/UDP"))];
    let before = start([kept(), vec![slice("t/other-1", "other", "u 8080/UDP", ".7 R")]].concat());
    let mut second = engine(before.into_datapath());
    let lists = vec![Update::Nodes(vec![]), Update::Services(vec![dns().build()]), Update::Slices(vec![])];
    let removed = step(&mut second, [lists, vec![endpoints(".2 R")]].concat());
    assert_eq!(removed, set(&["UDP 10.0.0.1:8080", "TCP 10.0.0.1:8080", "UDP 10.0.0.7:8080"]));
}

/// F24: switched on again it starts empty, also when the kernel refused to forget at first.
#[test]
fn clients_are_forgotten_when_affinity_ends() {
    let sticky = |seconds| put(&svc("t/a", "10.96.0.20").port("t 80/TCP").affinity(seconds));
    let plain = || put(&svc("t/a", "10.96.0.20").port("t 80/TCP"));
    for (name, update, is_forgotten) in [
        ("the timeout changes", sticky(Some(20)), false),
        ("switched off", plain(), true),
        ("deleted", gone("t/a"), true),
    ] {
        for fault in [Fault::None, Fault::OneIn(2)] {
            let mut engine = start(vec![sticky(Some(10))]);
            assert_eq!(rows(engine.datapath()).len(), 2, "its frontend, and the entry for unknown ports");
            let fake = engine.reconciler_mut().datapath_mut();
            fake.remember_client(0);
            fake.remember_client(7); // somebody else's
            fake.fault = fault;
            engine.update(update.clone());
            settle(&mut engine);
            engine.reconciler_mut().datapath_mut().fault = Fault::None;
            engine.resync();
            settle(&mut engine);
            assert_eq!(engine.datapath().remembers_clients(0), !is_forgotten, "{name}, {fault:?}");
            assert!(engine.datapath().remembers_clients(7), "{name}, {fault:?}");
        }
    }
}
