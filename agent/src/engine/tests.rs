//! The whole agent without a kernel: invariants 1 to 3 and 6 of the design, over tables that fail and agents that die.

mod adoption;
mod incremental;
mod node;
mod room;
mod services;
mod stale;
mod views;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    rc::Rc,
};

use sheave_ebpf::{
    backend::Backend,
    frontend::{Frontend, FrontendKey, KIND_CLUSTER_IP, KIND_LOOPBACK, KIND_UNKNOWN_PORT},
    service::{Scope, VERDICT_FORWARD, VERDICT_NONE, Word, word_index},
};

use super::{Engine, EngineOptions};
use crate::{
    datapath::{
        Datapath, Limits,
        tables::fake::{Fake, Fault},
    },
    lb,
    model::Update,
    plan::{group::PlanOptions, kind::Kind, maglev, node_ports::NodePortAddresses},
    reconcile::Reconciler,
    source::convert::fixtures::{OWN, Svc, node_with, service_name, slice_of, svc},
    view::{FrontendView, LbView},
};

fn engine(fake: Fake) -> Engine<Fake> {
    let options = EngineOptions {
        node: OWN.into(),
        plan: PlanOptions { maglev_size: maglev::Size::TINY, ..PlanOptions::default() },
        node_ports: NodePortAddresses::primary(),
        service_cidrs: vec![],
    };
    let mut engine = Engine::new(options, Reconciler::adopt(fake).unwrap());
    engine.set_interfaces(vec![IpAddr::from([192, 0, 2, 11]), IpAddr::from([127, 0, 0, 1])]);
    engine
}

fn empty_tables() -> Fake {
    Fake::new(Limits { frontends: 100, backends: 100, slots: 400, ..Limits::default() }, 1, Fault::None)
}

fn put(svc: &Svc) -> Update {
    Update::Service(Box::new(svc.build()))
}

fn gone(name: &str) -> Update {
    Update::ServiceGone(service_name(name))
}

fn slice(name: &str, service: &str, ports: &str, endpoints: &str) -> Update {
    slice_of(name, service).ports(ports).endpoints("10.0.0", endpoints).update()
}

/// A life of a cluster: every step is one batch of events.
fn life() -> Vec<Vec<Update>> {
    let a = svc("t/a", "10.96.0.1").port("http 80/TCP").port("dns 53/UDP").created(1);
    let b = svc("t/b", "10.96.0.2").port("http 80/TCP np 30080").kind("LoadBalancer").created(2);
    let b = b.ingress("203.0.113.1", None).ranges(&["198.51.100.0/24", "192.0.2.0/24"]).external_local();
    let e = svc("t/e", "10.96.0.5").port("http 80/TCP").external(&["203.0.113.9"]).created(5);
    let f = svc("t/f", "10.96.0.6").port("http 80/TCP").external(&["203.0.113.9"]).created(6).affinity(Some(10));
    let maglev = e.clone().annotation("sheave.io/lb-algorithm", "maglev");
    vec![
        vec![
            Update::Nodes(vec![node_with(OWN, &["192.0.2.11"], "", &["10.0.0.0/24"])]),
            Update::Services(vec![a.build(), b.build(), svc("t/c", "10.96.0.3").port("http 80/TCP").build()]),
            Update::Slices(vec![]),
            slice("t/a-1", "a", "http 8080/TCP,dns 5353/UDP", ".1 R L;.2 R"),
            slice("t/b-1", "b", "http 8080/TCP", ".1 R L;.3 R;.4 ST L"),
        ],
        vec![slice("t/a-1", "a", "http 8080/TCP,dns 5353/UDP", ".1 R L;.2 R;.5 R;.6 U;.7 ST")],
        vec![
            slice("t/a-1", "a", "http 8080/TCP,dns 5353/UDP", ".7 R"),
            slice("t/b-1", "b", "http 8080/TCP", ".3 R;.4 ST"),
        ],
        // A Service takes over the address of one that is deleted in the same breath.
        vec![
            gone("t/a"),
            put(&svc("t/d", "10.96.0.1").port("http 80/TCP").created(4)),
            slice("t/d-1", "d", "http 9090/TCP", ".20 R;.21 R"),
        ],
        // Empty, no longer empty; external addresses and ranges go.
        vec![
            slice("t/c-1", "c", "http 8080/TCP", ".30 R"),
            put(&svc("t/b", "10.96.0.2").port("http 80/TCP").created(2)),
        ],
        // Two want one address: the older has it.
        vec![put(&f), slice("t/f-1", "f", "http 80/TCP", ".50 R")],
        vec![put(&e), slice("t/e-1", "e", "http 80/TCP", ".40 R;.41 R;.42 R")],
        vec![put(&maglev)],
        vec![slice("t/e-1", "e", "http 80/TCP", ".40 R;.42 R")],
        vec![gone("t/e")],
        vec![Update::Services(vec![]), Update::Slices(vec![])],
    ]
}

type Rows = BTreeMap<(String, u16, String, String), LbView>;

fn rows(fake: &Fake) -> Rows {
    lb::views(fake)
        .items
        .into_iter()
        .map(|mut row| {
            row.backends.iter_mut().for_each(|b| b.connections = 0);
            ((row.address.clone(), row.port, row.protocol.clone(), row.scope.clone()), row)
        })
        .collect()
}

/// What a program could follow is all there: invariant 1.
fn check_whole(fake: &Fake) {
    for (key, frontend) in fake.frontends().unwrap() {
        let scopes: &[Scope] = match frontend.kind {
            KIND_UNKNOWN_PORT => continue,
            KIND_CLUSTER_IP => &[Scope::Cluster],
            KIND_LOOPBACK => &[Scope::Inside],
            _ => &[Scope::Inside, Scope::Outside],
        };
        assert!(fake.name(frontend.service).is_some(), "{key:?} names the nameless service {}", frontend.service);
        for scope in scopes {
            let word = Word(fake.word(word_index(frontend.service, *scope)));
            assert_ne!(word.verdict(), VERDICT_NONE, "{key:?} {scope:?} has no verdict");
            if word.verdict() != VERDICT_FORWARD {
                continue;
            }
            assert!(word.length() > 0, "{key:?} forwards into an empty run");
            let members = if word.is_maglev() { fake.slot(word.offset() + word.length()) } else { 0 };
            let slots = (0..word.length()).chain(word.length() + 1..word.length() + 1 + members);
            for slot in slots {
                let backend = fake.backend(fake.slot(word.offset() + slot));
                assert_ne!(backend, Backend::UNUSED, "{key:?} {scope:?} slot {slot} leads to an unused backend");
                assert_eq!(backend.service, frontend.service, "{key:?} leads to another service's backend");
            }
        }
    }
}

/// Every row is as before the step or as after it, and one that is in both never goes away.
fn check_between(fake: &Fake, before: &Rows, after: &Rows) {
    let now = rows(fake);
    let by_frontend = |rows: &Rows| -> BTreeMap<(String, u16, String), Vec<LbView>> {
        let mut grouped = BTreeMap::<_, Vec<LbView>>::new();
        for ((address, port, protocol, _), row) in rows {
            grouped.entry((address.clone(), *port, protocol.clone())).or_default().push(row.clone());
        }
        grouped
    };
    let (now, before, after) = (by_frontend(&now), by_frontend(before), by_frontend(after));
    // The scopes of a frontend switch one after the other, so each row is compared by itself.
    let decides = |rows: &[LbView], scope: &str| -> Option<(String, Vec<String>)> {
        let row = rows.iter().find(|r| r.scope == scope || r.scope == "both")?;
        let backends = row.backends.iter().map(|b| format!("{}:{}x{}", b.address, b.port, b.weight)).collect();
        Some((row.verdict.clone(), backends))
    };
    for (key, rows) in &now {
        for scope in ["internal", "external"] {
            let Some(here) = decides(rows, scope) else { continue };
            let allowed: Vec<_> = [&before, &after].iter().filter_map(|r| decides(r.get(key)?, scope)).collect();
            assert!(allowed.contains(&here), "{key:?} {scope}: {here:?} is neither of {allowed:?}");
        }
    }
    for key in before.keys().filter(|key| after.contains_key(*key)) {
        assert!(now.contains_key(key), "{key:?} blinked");
    }
}

/// The tables after every step, without faults.
fn golden() -> Vec<Rows> {
    let mut engine = engine(empty_tables());
    life()
        .into_iter()
        .map(|step| {
            step.into_iter().for_each(|update| engine.update(update));
            assert!(engine.flush());
            rows(engine.datapath())
        })
        .collect()
}

fn settle(engine: &mut Engine<Fake>) {
    for _ in 0..200 {
        if engine.flush() {
            return;
        }
    }
    panic!("never done");
}

/// Runs the life with a check after every write.
fn live(mut engine: Engine<Fake>, mut step_done: impl FnMut(usize, &mut Engine<Fake>)) -> Engine<Fake> {
    let golden = golden();
    let bounds = Rc::new(RefCell::new((Rows::new(), Rows::new())));
    let check = bounds.clone();
    engine.reconciler_mut().datapath_mut().after_write = Some(Rc::new(move |fake: &Fake| {
        check_whole(fake);
        let (before, after) = &*check.borrow();
        check_between(fake, before, after);
    }));
    let mut before = Rows::new();
    for (i, step) in life().into_iter().enumerate() {
        *bounds.borrow_mut() = (before, golden[i].clone());
        step.into_iter().for_each(|update| engine.update(update));
        step_done(i, &mut engine);
        settle(&mut engine);
        engine.reclaim();
        assert_eq!(rows(engine.datapath()), golden[i], "after step {i}");
        before = golden[i].clone();
    }
    engine
}

/// Nothing is left over: what is in use is what the rows need.
fn check_no_leak(engine: &mut Engine<Fake>) {
    engine.reclaim();
    engine.reclaim();
    let usage = engine.reconciler_mut().usage();
    let groups: Vec<_> = engine.tables.groups().map(|(_, plan)| plan.clone()).collect();
    assert_eq!(usage.services, groups.len(), "service ids");
    assert_eq!(usage.backends, groups.iter().map(|g| g.backends.len()).sum::<usize>(), "backend ids");
    let frontends: BTreeSet<FrontendKey> = groups
        .iter()
        .flat_map(|g| &g.frontends)
        .filter(|(_, kind)| *kind != Kind::UnknownPort)
        .map(|(key, _)| *key)
        .collect();
    assert_eq!(usage.frontends, frontends.len(), "frontends");
    let fake = engine.datapath();
    let words =
        |service| [Scope::Cluster, Scope::Inside, Scope::Outside].map(|s| Word(fake.word(word_index(service, s))));
    let runs: BTreeSet<(u32, u32)> = fake
        .names()
        .unwrap()
        .iter()
        .flat_map(|(id, _)| words(*id))
        .filter(|word| word.verdict() == VERDICT_FORWARD)
        .map(|w| (w.offset(), w.length() + if w.is_maglev() { 1 + fake.slot(w.offset() + w.length()) } else { 0 }))
        .collect();
    assert_eq!(usage.slots, runs.iter().map(|(_, length)| *length as usize).sum::<usize>(), "table slots");
}

#[test]
fn a_program_never_sees_half_a_service() {
    let mut engine = live(engine(empty_tables()), |_, _| {});
    check_no_leak(&mut engine);
    assert_eq!(engine.datapath().frontends().unwrap(), []);
}

#[test]
fn failing_writes_are_tried_again_until_all_is_as_wanted() {
    for seed in 1..40 {
        let fake = Fake::new(empty_tables().limits, seed * 7919, Fault::OneIn(6 + seed % 9));
        let mut engine = live(engine(fake), |_, _| {});
        engine.reconciler_mut().datapath_mut().fault = Fault::None;
        check_no_leak(&mut engine);
    }
}

/// Invariant 2: whatever write the agent was killed after, its successor adopts the tables, changes nothing that is
/// wanted, and reaches the same end.
#[test]
fn an_agent_killed_at_any_write_leaves_tables_that_the_next_one_adopts() {
    let golden = golden();
    let steps = life();
    for step in 0..steps.len() {
        for deadline in 0.. {
            // Up to here all went well.
            let mut first = engine(empty_tables());
            for updates in &steps[..step] {
                updates.iter().cloned().for_each(|update| first.update(update));
                assert!(first.flush());
                first.reclaim();
            }
            let before = if step == 0 { Rows::new() } else { golden[step - 1].clone() };
            let fake = first.reconciler_mut().datapath_mut();
            fake.fault = Fault::DeadAfter(fake.writes + deadline);
            steps[step].iter().cloned().for_each(|update| first.update(update));
            let survived = first.flush();
            first.reclaim();
            let mut fake = first.into_datapath();
            check_whole(&fake);
            check_between(&fake, &before, &golden[step]);

            fake.fault = Fault::None;
            let after = golden[step].clone();
            let at_death = rows(&fake);
            fake.after_write = Some(Rc::new(move |fake: &Fake| {
                check_whole(fake);
                check_between(fake, &at_death, &after);
            }));
            let mut second = engine(fake);
            // The successor is told everything from the beginning, as complete lists.
            let mut told = crate::model::State::default();
            for update in steps[..=step].iter().flatten().cloned() {
                told.apply(update);
            }
            second.update(Update::Services(told.services().cloned().collect()));
            assert!(second.flush());
            check_between(second.datapath(), &rows(second.datapath()), &golden[step]); // not synced: untouched
            let names: Vec<_> = told.services().map(|s| s.name.clone()).collect();
            second.update(Update::Slices(names.iter().flat_map(|n| told.slices(n).cloned()).collect()));
            second.update(Update::Nodes(told.nodes().cloned().collect()));
            settle(&mut second);
            assert_eq!(rows(second.datapath()), golden[step], "step {step}, killed after {deadline} writes");
            check_no_leak(&mut second);
            if survived {
                break;
            }
        }
    }
}

/// Invariant 3, case 31 of the field: lists that arrive one by one change nothing until the last is there.
#[test]
fn nothing_is_written_before_every_source_has_listed() {
    let mut first = engine(empty_tables());
    life()[0].iter().cloned().for_each(|update| first.update(update));
    assert!(first.flush());
    let fake = first.into_datapath();
    let (writes, had) = (fake.writes, rows(&fake));

    let mut second = engine(fake);
    for update in [Update::Services(vec![]), Update::Nodes(vec![])] {
        second.update(update);
        assert!(second.flush());
    }
    assert_eq!((second.datapath().writes, rows(second.datapath())), (writes, had));
    second.update(Update::Slices(vec![]));
    settle(&mut second);
    assert_eq!(rows(second.datapath()), Rows::new());
}

/// INC-11.
#[test]
fn a_pass_without_a_change_writes_nothing() {
    let mut engine = engine(empty_tables());
    life()[0].iter().cloned().for_each(|update| engine.update(update));
    assert!(engine.flush());
    let writes = engine.datapath().writes;
    engine.resync();
    assert!(engine.flush());
    assert_eq!(engine.datapath().writes, writes);
}

/// Somebody else writes to our tables: the next full pass mends it.
#[test]
fn a_full_pass_mends_what_others_changed() {
    let mut engine = engine(empty_tables());
    life()[0].iter().cloned().for_each(|update| engine.update(update));
    assert!(engine.flush());
    let had = rows(engine.datapath());
    let fake = engine.reconciler_mut().datapath_mut();
    let (first, _) = fake.frontends().unwrap()[0];
    fake.remove_frontend(&first).unwrap();
    fake.put_word(word_index(0, Scope::Cluster), 0).unwrap();
    let stray = FrontendKey { port: 9, ..first };
    fake.put_frontend(&stray, &Frontend { service: 77, kind: KIND_CLUSTER_IP }).unwrap();
    engine.resync();
    settle(&mut engine);
    assert_eq!(rows(engine.datapath()), had);
    check_no_leak(&mut engine);
}

/// A backend with connections keeps its id until they end: its counter counts them down (invariants 1 and 4).
#[test]
fn a_removed_backend_keeps_its_id_while_connections_live() {
    let mut engine = engine(empty_tables());
    life()[0].iter().cloned().for_each(|update| engine.update(update));
    assert!(engine.flush());
    let busy = engine.datapath().slot(Word(engine.datapath().word(0)).offset());
    let was = engine.datapath().backend(busy);
    engine.reconciler_mut().datapath_mut().connect(busy, 1);
    engine.update(Update::Services(vec![]));
    assert!(engine.flush());
    assert!(engine.reclaim());
    assert_eq!(engine.datapath().backend(busy), was);
    engine.reconciler_mut().datapath_mut().connect(busy, -1);
    assert!(!engine.reclaim());
    assert_eq!(engine.datapath().backend(busy), Backend::UNUSED);
    check_no_leak(&mut engine);
}

/// Case 34 of the field: what fits works, what does not is marked, and comes in when there is room.
#[test]
fn services_that_do_not_fit_are_marked_and_programmed_later() {
    let cases = [
        ("frontends", Limits { frontends: 60, ..Limits::default() }),
        ("backends", Limits { frontends: 2_000, backends: 300, ..Limits::default() }),
        ("slots", Limits { frontends: 2_000, slots: 300, ..Limits::default() }),
    ];
    for (map, limits) in cases {
        let mut engine = engine(Fake::new(limits, 1, Fault::None));
        let service = |i: usize| svc(&format!("t/s{i:03}"), &format!("10.96.1.{i}")).port("http 80/TCP").created(1);
        let endpoints = |i: usize| (1..=20).map(|n| format!("10.1.{i}.{n} R")).collect::<Vec<_>>().join(";");
        let update = |i: usize| slice(&format!("t/s{i:03}-1"), &format!("s{i:03}"), "http 8080/TCP", &endpoints(i));
        engine.update(Update::Nodes(vec![]));
        engine.update(Update::Services((0..100).map(|i| service(i).build()).collect()));
        engine.update(Update::Slices(vec![]));
        (0..100).for_each(|i| engine.update(update(i)));
        assert!(!engine.flush(), "{map}");
        check_whole(engine.datapath());

        let views = |engine: &Engine<Fake>| -> Vec<FrontendView> {
            engine.services().items.into_iter().flat_map(|s| s.frontends).collect()
        };
        let shown = views(&engine);
        let programmed = rows(engine.datapath());
        assert!(shown.iter().any(|f| f.programmed) && shown.iter().any(|f| !f.programmed), "{map}");
        for frontend in &shown {
            let row = programmed.get(&(frontend.address.clone(), frontend.port, "TCP".to_owned(), "both".to_owned()));
            assert_eq!(row.is_some(), frontend.programmed, "{map}: works or is marked, no third kind: {frontend:?}");
            assert!(row.is_none_or(|row| row.backends.len() == 20), "{map}: not half programmed");
            assert!(frontend.programmed || frontend.message.as_ref().is_some_and(|m| m.contains("--max-")), "{map}");
        }
        assert_eq!(engine.status(super::StatusInput::default()).health, "degraded", "{map}");

        (0..90).for_each(|i| engine.update(gone(&format!("t/s{i:03}"))));
        engine.flush();
        settle(&mut engine);
        assert!(views(&engine).iter().all(|f| f.programmed), "{map}: the rest came in by itself");
        check_whole(engine.datapath());
    }
}
