//! Who owns what: cases 12 and 29 of docs/testing.md, and that an update tells exactly what changed.

use std::{collections::BTreeMap, net::IpAddr};

use sheave_ebpf::frontend::FrontendKey;

use super::{Tables, Touched};
use crate::{
    model::ServiceName,
    plan::{
        group::{GroupKey, GroupPlan, NodeContext, PlanOptions, plan},
        kind::Kind,
    },
    source::convert::fixtures::{Svc, service_name, slice_of, svc},
};

fn plans(svc: &Svc) -> Vec<GroupPlan> {
    let node = NodeContext {
        name: "n1".into(),
        addresses: vec!["192.0.2.11".parse().unwrap()],
        node_port_addresses: vec!["192.0.2.11".parse().unwrap()],
        ..NodeContext::default()
    };
    let options = PlanOptions { loopback_node_ports: false, ..PlanOptions::default() };
    plan(&svc.build(), std::iter::empty(), &node, &options)
}

fn put(tables: &mut Tables, svc: &Svc) -> Touched {
    tables.update(&name_of(svc), plans(svc))
}

fn name_of(svc: &Svc) -> ServiceName {
    svc.build().name
}

fn key(address: &str, port: u16) -> FrontendKey {
    let addr = address.parse::<IpAddr>().unwrap().into();
    FrontendKey { addr, port: port.to_be(), proto: if port == 0 { 0 } else { 6 }, zero: 0 }
}

fn label(key: &GroupKey) -> String {
    format!("{}:{}", key.service.name, key.port_name)
}

fn touched(touched: &Touched) -> String {
    touched.groups.iter().map(|key| label(key)).collect::<Vec<_>>().join(" ")
}

fn owner(tables: &Tables, address: &str, port: u16) -> String {
    tables.owner(&key(address, port)).map(label).unwrap_or_default()
}

fn external(name: &str, ip: &str, port: &str, created: i64) -> Svc {
    svc(name, ip).port(port).external(&["203.0.113.20"]).created(created)
}

#[test]
fn services_that_share_an_address_do_not_disturb_each_other() {
    let mut tables = Tables::default();
    let (e1, e2) = (external("ns/e1", "10.96.0.1", "a 80/TCP", 1), external("ns/e2", "10.96.0.2", "b 443/TCP", 2));
    put(&mut tables, &e1);
    put(&mut tables, &e2);
    assert_eq!(tables.contested(), 0);
    assert_eq!(touched(&tables.update(&name_of(&e1), vec![])), "e1:a", "case 12");
    assert_eq!(owner(&tables, "203.0.113.20", 443), "e2:b", "case 12");
    assert_eq!(owner(&tables, "203.0.113.20", 80), "");
}

#[test]
fn the_older_service_owns_a_contested_address_whatever_came_first() {
    let old = || external("ns/z-old", "10.96.0.1", "a 8443/TCP", 1);
    let young = || external("ns/a-young", "10.96.0.2", "b 8443/TCP", 2);
    let same_age = || external("ns/b", "10.96.0.3", "b 8443/TCP", 1);
    let ageless = || {
        let mut svc = external("ns/c", "10.96.0.4", "b 8443/TCP", 1);
        svc.0.metadata.creation_timestamp = None;
        svc
    };
    for (case, first, second, expected) in [
        ("case 12, old first", old(), young(), "z-old:a"),
        ("case 12, young first", young(), old(), "z-old:a"),
        ("same age: by name", old(), same_age(), "b:b"),
        ("same age: by name, other order", same_age(), old(), "b:b"),
        ("without age: youngest", ageless(), young(), "a-young:b"),
    ] {
        let mut tables = Tables::default();
        put(&mut tables, &first);
        put(&mut tables, &second);
        assert_eq!(owner(&tables, "203.0.113.20", 8443), expected, "{case}");
        assert_eq!(tables.contested(), 1, "{case}");
        // Deleting the winner hands over; nothing is left of the dispute.
        let (winner, loser) =
            if expected.starts_with(&*name_of(&first).name) { (first, second) } else { (second, first) };
        let gone = tables.update(&name_of(&winner), vec![]);
        assert_eq!(gone.groups.len(), 2, "{case}: the loser gained a frontend: {gone:?}");
        let now = owner(&tables, "203.0.113.20", 8443);
        assert!(now.starts_with(&*name_of(&loser).name), "{case}: {now}");
        assert_eq!(tables.contested(), 0, "{case}");
    }
}

#[test]
fn a_cluster_ip_belongs_to_its_service_whoever_wished_for_it_before() {
    for (case, created) in [("CVE-2020-8554, an older Service", 1), ("a younger one", 9)] {
        let thief = svc("ns/thief", "10.96.0.66").port("t 80/TCP").external(&["10.96.0.1"]).created(created);
        let owner_of_it = svc("ns/web", "10.96.0.1").port("t 80/TCP").created(5);
        for order in [[&thief, &owner_of_it], [&owner_of_it, &thief]] {
            let mut tables = Tables::default();
            for svc in order {
                put(&mut tables, svc);
            }
            assert_eq!(owner(&tables, "10.96.0.1", 80), "web:t", "{case}");
        }
    }
}

#[test]
fn a_node_port_may_change_hands_in_any_order_of_events() {
    let with = |name, ip, created| svc(name, ip).port("a 80/TCP np 30050").kind("NodePort").created(created);
    let (old, new) = (with("ns/n-old", "10.96.0.1", 1), with("ns/n-new", "10.96.0.2", 2));
    let both = || {
        let mut tables = Tables::default();
        put(&mut tables, &old);
        assert_eq!(touched(&put(&mut tables, &new)), "n-new:a", "the owner is not disturbed");
        assert_eq!(owner(&tables, "192.0.2.11", 30_050), "n-old:a");
        tables
    };
    // (a), and (c): the late delete of the old one
    let mut tables = both();
    assert_eq!(touched(&tables.update(&name_of(&old), vec![])), "n-new:a n-old:a");
    assert_eq!(owner(&tables, "192.0.2.11", 30_050), "n-new:a", "case 29 a, c");
    // (b)
    let mut tables = both();
    assert_eq!(touched(&tables.update(&name_of(&new), vec![])), "n-new:a", "the owner is not disturbed");
    assert_eq!(owner(&tables, "192.0.2.11", 30_050), "n-old:a", "case 29 b");
}

#[test]
fn a_group_has_what_it_asks_for_less_what_others_own() {
    let mut tables = Tables::default();
    put(&mut tables, &external("ns/old", "10.96.0.1", "a 80/TCP", 1));
    put(&mut tables, &external("ns/young", "10.96.0.2", "a 80/TCP", 2));
    let owned = |name: &str| {
        let service = service_name(name);
        let keys: Vec<GroupKey> = tables.of_service(&service).map(|(key, _)| (**key).clone()).collect();
        let frontends = keys.iter().flat_map(|key| tables.owned(key));
        frontends.map(|(key, _)| IpAddr::from(key.addr).to_string()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(owned("ns/old"), "10.96.0.1 203.0.113.20");
    assert_eq!(owned("ns/young"), "10.96.0.2");
    assert_eq!(owned("ns/unknown"), "");
}

#[test]
fn entries_for_unknown_ports_live_as_long_as_somebody_asks() {
    let two_ports = svc("ns/a", "10.96.0.1").port("http 80/TCP").port("https 443/TCP");
    let one_port = svc("ns/a", "10.96.0.1").port("https 443/TCP");
    let moved = svc("ns/a", "10.96.0.9").port("https 443/TCP");
    let mut tables = Tables::default();
    let any = |address| key(address, 0);

    let update = put(&mut tables, &two_ports);
    assert_eq!(Vec::from_iter(update.unknown_ports_added), [any("10.96.0.1")]);
    let update = put(&mut tables, &one_port);
    assert!(update.unknown_ports_added.is_empty() && update.unknown_ports_removed.is_empty(), "{update:?}");
    // Another port name is another group, but the address stays guarded.
    let update = put(&mut tables, &svc("ns/a", "10.96.0.1").port("renamed 443/TCP"));
    assert!(update.unknown_ports_added.is_empty() && update.unknown_ports_removed.is_empty(), "{update:?}");
    let update = put(&mut tables, &moved);
    assert_eq!(Vec::from_iter(update.unknown_ports_added), [any("10.96.0.9")]);
    assert_eq!(Vec::from_iter(update.unknown_ports_removed), [any("10.96.0.1")]);
    assert_eq!(Vec::from_iter(tables.unknown_ports()), [any("10.96.0.9")]);
    tables.update(&name_of(&moved), vec![]);
    assert_eq!(tables.unknown_ports().count(), 0);
    assert_eq!(tables.owner(&any("10.96.0.9")), None);
}

#[test]
fn an_update_touches_what_it_changes_and_nothing_else() {
    let base = || svc("ns/a", "10.96.0.1").port("http 80/TCP").port("https 443/TCP");
    let mut tables = Tables::default();
    for (id, svc, expected) in [
        ("INC new", base(), "a:http a:https"),
        ("INC same", base(), ""),
        ("INC affinity", base().affinity(None), "a:http a:https"),
        ("INC back", base(), "a:http a:https"),
        ("INC one port's number", svc("ns/a", "10.96.0.1").port("http 81/TCP").port("https 443/TCP"), "a:http"),
        ("INC one port less", svc("ns/a", "10.96.0.1").port("https 443/TCP"), "a:http"),
        ("INC one port more", svc("ns/a", "10.96.0.1").port("http 81/TCP").port("https 443/TCP"), "a:http"),
        ("INC port order", svc("ns/a", "10.96.0.1").port("https 443/TCP").port("http 81/TCP"), ""),
    ] {
        assert_eq!(touched(&put(&mut tables, &svc)), expected, "{id}");
    }
    // Ports of one Service may swap an address: both are told, nobody else.
    let swapped = svc("ns/a", "10.96.0.1").port("http 443/TCP").port("https 81/TCP");
    assert_eq!(touched(&put(&mut tables, &swapped)), "a:http a:https");
    assert_eq!(
        (owner(&tables, "10.96.0.1", 443), owner(&tables, "10.96.0.1", 81)),
        ("a:http".into(), "a:https".into())
    );

    // A loser whose address changes hands within the owner's Service is not told of the moment between.
    let rival = external("ns/rival", "10.96.0.5", "r 80/TCP", 9);
    put(&mut tables, &external("ns/own", "10.96.0.4", "one 80/TCP", 1));
    put(&mut tables, &rival);
    assert_eq!(touched(&put(&mut tables, &external("ns/own", "10.96.0.4", "two 80/TCP", 1))), "own:one own:two");
    assert_eq!(owner(&tables, "203.0.113.20", 80), "own:two");
}

/// Whatever comes in whatever order, the outcome is that of a table built from scratch, and `Touched` told every
/// difference.
#[test]
fn increments_add_up_to_the_whole() {
    let mut random = 1u64;
    let mut next = |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % below
    };
    let mut tables = Tables::default();
    let mut services: BTreeMap<ServiceName, Svc> = BTreeMap::new();
    let state = |tables: &Tables| -> BTreeMap<GroupKey, (GroupPlan, Vec<(FrontendKey, Kind)>)> {
        tables.groups().map(|(key, plan)| ((**key).clone(), (plan.clone(), tables.owned(key).collect()))).collect()
    };
    for step in 0..500 {
        let name = format!("ns/s{}", next(6));
        let before = state(&tables);
        let guarded: Vec<_> = tables.unknown_ports().collect();
        let update = if next(4) == 0 {
            services.remove(&service_name(&name));
            tables.update(&service_name(&name), vec![])
        } else {
            let mut svc = svc(&name, &format!("10.96.0.{}", 1 + next(4))).kind("NodePort").created(next(3) as i64);
            for _ in 0..=next(2) {
                svc = svc.port(&format!("p{} {}/TCP np {}", next(3), 80 + next(2), 30_000 + next(2)));
            }
            svc = svc.external(&[["203.0.113.1", "203.0.113.2"][next(2) as usize]]);
            let mut names = std::collections::BTreeSet::new();
            svc.0.spec.as_mut().unwrap().ports.as_mut().unwrap().retain(|port| names.insert(port.name.clone()));
            let update = put(&mut tables, &svc);
            services.insert(service_name(&name), svc);
            update
        };

        let mut fresh = Tables::default();
        services.values().rev().for_each(|svc| drop(put(&mut fresh, svc)));
        let after = state(&tables);
        assert_eq!(after, state(&fresh), "step {step}");
        let keys = before.keys().chain(after.keys());
        let different: std::collections::BTreeSet<_> = keys.filter(|key| before.get(key) != after.get(key)).collect();
        assert_eq!(update.groups.iter().map(|key| &**key).collect::<std::collections::BTreeSet<_>>(), different);

        let now: std::collections::BTreeSet<_> = tables.unknown_ports().collect();
        assert!(after.values().flat_map(|(_, owned)| owned).all(|(_, kind)| *kind != Kind::UnknownPort));
        assert_eq!(now, fresh.unknown_ports().collect(), "step {step}");
        let mut expected: std::collections::BTreeSet<_> = guarded.into_iter().collect();
        expected.retain(|key| !update.unknown_ports_removed.contains(key));
        expected.extend(update.unknown_ports_added);
        assert_eq!(now, expected, "step {step}");
    }
}

#[test]
fn a_thousand_services_are_independent() {
    let mut tables = Tables::default();
    for n in 0..1000 {
        put(&mut tables, &svc(&format!("ns/s{n}"), &format!("10.96.{}.{}", n / 250, n % 250 + 1)).port("80/TCP"));
    }
    let slice = slice_of("ns/x", "s7").ports("80/TCP").endpoints("10.0.0", ".1 R").build();
    let service = svc("ns/s7", "10.96.0.8").port("80/TCP").build();
    let plans = plan(&service, std::iter::once(&slice), &NodeContext::default(), &PlanOptions::default());
    assert_eq!(touched(&tables.update(&service.name, plans)), "s7:");
    assert_eq!(tables.groups().count(), 1000);
}
