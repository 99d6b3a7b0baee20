//! A `TABLES` map that fills up: who gets less than it wants, and who does not notice.

use super::{
    Engine, Fake, Fault, Limits, Update, check_no_leak, check_whole, engine, gone, put, rows, settle, slice, svc,
};

fn synced(slots: u32) -> Engine<Fake> {
    let limits = Limits { frontends: 2_000, slots, ..Limits::default() };
    let mut engine = engine(Fake::new(limits, 1, Fault::None));
    engine.reconciler_mut().datapath_mut().after_write = Some(std::rc::Rc::new(check_whole));
    for update in [Update::Nodes(vec![]), Update::Services(vec![]), Update::Slices(vec![])] {
        engine.update(update);
    }
    engine
}

/// The Service `sNN` with endpoints of its own.
fn service(engine: &mut Engine<Fake>, number: usize, algorithm: &str, endpoints: std::ops::Range<usize>) {
    let service = svc(&format!("t/s{number:02}"), &format!("10.96.1.{number}")).port("http 80/TCP").created(1);
    engine.update(put(&service.annotation("sheave.io/lb-algorithm", algorithm)));
    let endpoints: Vec<_> = endpoints.map(|n| format!("10.1.{number}.{n} R")).collect();
    let name = format!("s{number:02}");
    engine.update(slice(&format!("t/{name}-1"), &name, "http 8080/TCP", &endpoints.join(";")));
}

/// What a client of the Service reaches.
fn backends(engine: &Engine<Fake>, number: usize) -> Vec<String> {
    let (address, port) = (format!("10.96.1.{number}"), 80);
    let row = rows(engine.datapath()).into_values().find(|row| row.address == address && row.port == port);
    row.into_iter().flat_map(|row| row.backends).map(|backend| backend.address).collect()
}

/// The numbers of the Services that are marked, with a flag to raise.
fn marked(engine: &Engine<Fake>) -> Vec<usize> {
    let services = engine.services().items.into_iter().enumerate();
    let is_marked = |message: &String| message.contains("--max-table-slots");
    services.filter(|(_, s)| s.frontends[0].message.as_ref().is_some_and(is_marked)).map(|(i, _)| i).collect()
}

/// Invariant 6: a Maglev table of 13 slots takes 16, so 7/8 of 128 are seven.
#[test]
fn maglev_tables_leave_room_for_plain_runs() {
    let mut engine = synced(128);
    service(&mut engine, 0, "random", 1..3);
    (1..=9).for_each(|number| service(&mut engine, number, "maglev", 1..3));
    engine.flush();
    assert_eq!(marked(&engine), [7, 8, 9], "they get a plain run");
    for number in 0..=9 {
        assert_eq!(backends(&engine, number).len(), 2, "service {number} works");
    }
    service(&mut engine, 0, "random", 2..4);
    service(&mut engine, 1, "maglev", 2..4);
    engine.flush();
    assert_eq!(backends(&engine, 0), ["10.1.0.2", "10.1.0.3"], "nobody's change waits for the others");
    assert_eq!(backends(&engine, 1), ["10.1.1.2", "10.1.1.3"]);
    assert_eq!(marked(&engine), [7, 8, 9], "a table that is replaced is not counted twice");

    (1..=3).for_each(|number| engine.update(gone(&format!("t/s{number:02}"))));
    engine.flush();
    engine.reclaim();
    settle(&mut engine);
    assert_eq!(marked(&engine), [0; 0], "the others get their tables by themselves");
    check_no_leak(&mut engine);
}

/// Invariant 6: 15/16 of 400 are 18 runs of 20.
#[test]
fn new_services_leave_room_for_changes_of_those_that_are_there() {
    let mut engine = synced(400);
    (0..25).for_each(|number| service(&mut engine, number, "random", 1..21));
    engine.flush();
    assert_eq!(marked(&engine), (18..25).collect::<Vec<_>>());
    for number in 0..18 {
        service(&mut engine, number, "random", 2..22);
        engine.flush();
        assert_eq!(backends(&engine, number).first().map(String::as_str), Some(&*format!("10.1.{number}.2")));
    }
}
