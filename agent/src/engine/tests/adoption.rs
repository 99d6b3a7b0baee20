//! What a successor takes over from tables in which one thing is there twice, and what it does when it cannot read them.

use std::net::IpAddr;

use super::{
    Datapath, Engine, Fake, Fault, Limits, Scope, Svc, Update, VERDICT_FORWARD, Word, check_no_leak, check_whole,
    empty_tables, engine, gone, put, rows, settle, slice, svc, word_index,
};

fn web() -> Svc {
    svc("t/web", "10.96.0.1").port("http 80/TCP").created(1)
}

fn endpoints(endpoints: &str) -> Update {
    slice("t/web-1", "web", "http 8080/TCP", endpoints)
}

fn lists(service: &Svc) -> Vec<Update> {
    let service = vec![service.build()];
    vec![Update::Nodes(vec![]), Update::Services(service), Update::Slices(vec![]), endpoints(".1 R;.2 R")]
}

fn step(engine: &mut Engine<Fake>, updates: Vec<Update>) {
    updates.into_iter().for_each(|update| engine.update(update));
    settle(engine);
    engine.reclaim();
}

/// The id that the words of the only Service that forwards have for 10.0.0.1.
fn id_in_use(fake: &Fake) -> u32 {
    let words = fake.names().unwrap().into_iter().map(|(id, _)| Word(fake.word(word_index(id, Scope::Cluster))));
    let forwarding: Vec<_> = words.filter(|word| word.verdict() == VERDICT_FORWARD).collect();
    let [word] = forwarding[..] else { panic!("{} Services forward", forwarding.len()) };
    let ids = (0..word.length()).map(|slot| fake.slot(word.offset() + slot));
    ids.into_iter().find(|id| fake.backend(*id).addr == IpAddr::from([10, 0, 0, 1]).into()).unwrap()
}

/// Invariant 2: what came back while connections to its former life lasted is there twice. Programs use the younger.
#[test]
fn of_two_records_of_one_thing_a_successor_keeps_the_one_in_use() {
    let maglev = web().annotation("sheave.io/lb-algorithm", "maglev");
    for (name, service, leaves, returns) in [
        ("an endpoint", web(), endpoints(".2 R"), vec![endpoints(".1 R;.2 R")]),
        ("all endpoints", web(), endpoints(""), vec![endpoints(".1 R;.2 R")]),
        ("an endpoint in a Maglev table", maglev.clone(), endpoints(".2 R"), vec![endpoints(".1 R;.2 R")]),
        ("a Service", web(), gone("t/web"), vec![put(&web())]),
        ("a Service with a Maglev table", maglev.clone(), gone("t/web"), vec![put(&maglev)]),
    ] {
        let mut first = engine(empty_tables());
        step(&mut first, lists(&service));
        let busy = id_in_use(first.datapath());
        first.reconciler_mut().datapath_mut().connect(busy, 1);
        step(&mut first, vec![leaves]);
        step(&mut first, returns);
        let fake = first.into_datapath();
        assert_ne!(id_in_use(&fake), busy, "{name}: there twice");
        let (had, writes) = (rows(&fake), fake.writes);

        let mut second = engine(fake);
        (0..3).for_each(|_| _ = second.reclaim()); // the API server is away: only time passes
        check_whole(second.datapath());
        assert_eq!((second.datapath().writes, rows(second.datapath())), (writes, had.clone()), "{name}: no list yet");

        lists(&service).into_iter().for_each(|update| second.update(update));
        settle(&mut second);
        assert_eq!((second.datapath().writes, rows(second.datapath())), (writes, had.clone()), "{name}: nothing new");

        second.reconciler_mut().datapath_mut().connect(busy, -1);
        check_no_leak(&mut second);
        check_whole(second.datapath());
        assert_eq!(rows(second.datapath()), had, "{name}: the former one is given back");
    }
}

/// Invariant 1: a full pass that cannot read the tables goes on with what it knew, and takes no id that is in use.
#[test]
fn tables_that_cannot_be_read_again_are_not_taken_for_empty() {
    let mut engine = engine(empty_tables());
    step(&mut engine, lists(&web()));
    let had = rows(engine.datapath());
    engine.reconciler_mut().datapath_mut().unreadable = true;
    engine.resync();
    let fake = engine.reconciler_mut().datapath_mut();
    fake.unreadable = false;
    fake.after_write = Some(std::rc::Rc::new(check_whole));
    let other = put(&svc("t/other", "10.96.0.2").port("http 80/TCP").created(2));
    step(&mut engine, vec![other, slice("t/other-1", "other", "http 8080/TCP", ".7 R;.8 R")]);
    let has = rows(engine.datapath());
    assert!(had.iter().all(|(key, row)| has.get(key) == Some(row)) && has.len() > had.len(), "{has:?}");
    check_no_leak(&mut engine);
}

/// Invariant 1: what rests is forgotten by a full pass, so its grace period comes before.
#[test]
fn a_full_pass_waits_for_what_rests() {
    let two_runs = Limits { slots: 4, ..empty_tables().limits };
    let mut engine = engine(Fake::new(two_runs, 1, Fault::None));
    step(&mut engine, lists(&web()));
    engine.update(endpoints(".2 R;.3 R"));
    assert!(engine.flush(), "into the other run; the first rests");
    let graces = engine.datapath().graces;
    engine.resync();
    engine.update(endpoints(".3 R;.4 R"));
    assert!(engine.flush(), "into the first run");
    assert_eq!(engine.datapath().graces, graces + 1);
}
