//! What `svc list` says of Services that do not get what they ask for, and what very large ones cost.

use std::time::{Duration, Instant};

use super::{Engine, Fake, Fault, Limits, Svc, Update, engine, put, slice, slice_of, svc};
use crate::engine::StatusInput;

fn synced(limits: Limits) -> Engine<Fake> {
    let mut engine = engine(Fake::new(limits, 1, Fault::None));
    for list in [Update::Services(vec![]), Update::Slices(vec![]), Update::Nodes(vec![])] {
        engine.update(list);
    }
    engine
}

/// What is said of a frontend that a Service does not have.
fn message(engine: &Engine<Fake>, name: &str) -> Option<String> {
    let services = engine.services().items;
    let service = services.iter().find(|service| service.name == name).expect("it is listed");
    service.frontends.iter().find_map(|frontend| frontend.message.clone())
}

#[test]
fn whoever_has_a_contested_address_is_named_with_the_reason() {
    let at = |name: &str, ip: &str| svc(&format!("t/{name}"), ip).port("http 80/TCP").external(&["203.0.113.9"]);
    let belongs = "the address and port belong to";
    let cases: [(&str, [Svc; 2], &str, String); 4] = [
        (
            "the other is older",
            [at("a", "10.96.0.1").created(2), at("b", "10.96.0.2").created(1)],
            "a",
            format!("{belongs} the Service t/b, which is older"),
        ),
        (
            "only the name decides",
            [at("a", "10.96.0.1").created(1), at("b", "10.96.0.2").created(1)],
            "b",
            format!("{belongs} the Service t/a, which is as old but first by name"),
        ),
        (
            "nobody knows how old they are",
            [at("a", "10.96.0.1"), at("b", "10.96.0.2")],
            "b",
            format!("{belongs} the Service t/a, which is as old but first by name"),
        ),
        (
            "two ports of one Service",
            [at("a", "10.96.0.1"), svc("t/b", "10.96.0.2").port("x 80/TCP").port("y 80/TCP")],
            "b",
            format!("{belongs} another port of this Service, \"x\""),
        ),
    ];
    for (id, services, loser, expected) in cases {
        let mut engine = synced(Limits::default());
        services.iter().for_each(|service| engine.update(put(service)));
        assert!(engine.flush(), "{id}");
        assert_eq!(message(&engine, loser), Some(expected), "{id}");
    }
}

/// What API servers answer on is nobody's, from wherever it is known; it is given when they leave.
#[test]
fn an_api_servers_address_is_kept_and_said_to_be() {
    let says = "an API server answers at this address and port, so no Service gets it";
    let mut engine = synced(Limits::default());
    engine.update(put(&svc("t/evil", "10.96.0.1").port("https 6443/TCP").external(&["203.0.113.9", "203.0.113.10"])));
    assert!(engine.flush());
    let served = |engine: &Engine<Fake>| {
        let frontends = engine.services().items.into_iter().find(|s| s.name == "evil").expect("it is listed").frontends;
        let external = frontends.into_iter().filter(|frontend| frontend.kind == "ExternalIP");
        external.map(|frontend| (frontend.programmed, frontend.message)).collect::<Vec<_>>()
    };
    let (given, kept) = ((true, None), (false, Some(says.to_owned())));
    assert_eq!(served(&engine), [given.clone(), given.clone()]);

    engine.set_api_servers(["203.0.113.9:6443".parse().unwrap()].into());
    engine.update(
        slice_of("default/kubernetes", "kubernetes").ports("https 6443/TCP").endpoints("203.0.113", ".10 R").update(),
    );
    assert!(engine.flush());
    assert_eq!(served(&engine), [kept.clone(), kept.clone()], "the source's and the published one");
    let status = engine.status(StatusInput::default());
    assert_eq!((status.frontends_kept, status.health.as_str()), (2, "ok"), "{:?}", status.warnings);

    engine.update(slice_of("default/kubernetes", "kubernetes").gone());
    assert!(engine.flush());
    assert_eq!(served(&engine), [given, kept].into_iter().rev().collect::<Vec<_>>());
}

/// A Service of that many ports appears, is listed, loses an endpoint and goes; the least of several times.
fn time_of(ports: u16) -> Duration {
    let mut service = svc("t/wide", "10.96.0.1");
    for port in 1..=ports {
        service = service.port(&format!("p{port} {port}/TCP"));
    }
    let names: Vec<String> = (1..=ports).map(|port| format!("p{port} {port}/TCP")).collect();
    let offers = |endpoints: &str| slice("t/wide-1", "wide", &names.join(","), endpoints);
    let (service, two, one) = (put(&service), offers(".1 R;.2 R"), offers(".1 R"));
    let once = || {
        let mut engine = synced(Limits::default());
        let begin = Instant::now();
        for update in [service.clone(), two.clone(), one.clone()] {
            engine.update(update);
            assert!(engine.flush());
            assert_eq!(engine.services().items[0].frontends.len(), usize::from(ports));
        }
        engine.update(super::gone("t/wide"));
        assert!(engine.flush());
        begin.elapsed()
    };
    (0..5).map(|_| once()).min().unwrap_or_default()
}

/// A ratio, so that no machine is too slow: eight times the ports cost ten times as much when all is well, and fifty
/// times when each port looks at all the others.
#[test]
fn a_service_costs_what_its_ports_cost() {
    let (few, many) = (time_of(500), time_of(4000));
    assert!(many < few * 24, "500 ports take {few:?}, 4,000 take {many:?}");
}
