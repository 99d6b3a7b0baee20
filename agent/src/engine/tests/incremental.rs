//! What is programmed after each step, and that nothing else is written.

use super::{Engine, Fake, Update, check_no_leak, check_whole, empty_tables, engine, gone, put, settle, svc};
use crate::{lb, source::convert::fixtures::slice_of};

/// The Service `svcN` on 172.30.0.4N.
fn service(number: u8, port: u16) -> Update {
    put(&svc(&format!("t/svc{number}"), &format!("172.30.0.4{number}")).port(&format!("p {port}/TCP")))
}

/// Its slice; `endpoints` in the notation of 0.2 below 10.0.N, all on this node.
fn slice(number: u8, endpoints: &str) -> Update {
    let (name, service) = (format!("t/svc{number}-1"), format!("svc{number}"));
    slice_of(&name, &service).ports("p 80/TCP").endpoints(&format!("10.0.{number}"), endpoints).update()
}

/// Every frontend as `.41:80 → 10.0.1.1:80 …`, or with its verdict.
fn programmed(engine: &Engine<Fake>) -> Vec<String> {
    let rows = lb::views(engine.datapath()).items.into_iter().filter(|row| row.port != 0);
    rows.map(|row| {
        let at = format!("{}:{}", row.address.trim_start_matches("172.30.0"), row.port);
        let backends: Vec<_> = row.backends.iter().map(|b| format!("{}:{}", b.address, b.port)).collect();
        let to = if backends.is_empty() { row.verdict } else { backends.join(" ") };
        format!("{at} → {to}")
    })
    .collect()
}

/// Takes a step in; how many writes it cost.
fn step(engine: &mut Engine<Fake>, updates: Vec<Update>) -> u64 {
    let before = engine.datapath().writes;
    updates.into_iter().for_each(|update| engine.update(update));
    assert!(engine.flush());
    check_whole(engine.datapath());
    engine.datapath().writes - before
}

/// An engine whose sources are in step and have told nothing.
fn synced() -> Engine<Fake> {
    let mut engine = engine(empty_tables());
    step(&mut engine, vec![Update::Services(vec![]), Update::Slices(vec![]), Update::Nodes(vec![])]);
    engine
}

#[test]
fn inc_1_to_11_each_step_programs_its_own_service() {
    let one = ".41:80 → 10.0.1.1:80";
    let steps = [
        (
            "INC-1: start",
            vec![service(1, 80), slice(1, ".1 R L"), service(2, 8080), slice(2, ".1 R L")],
            vec![one, ".42:8080 → 10.0.2.1:80"],
        ),
        (
            "INC-2: svc3 added",
            vec![service(3, 80), slice(3, ".1 R L")],
            vec![one, ".42:8080 → 10.0.2.1:80", ".43:80 → 10.0.3.1:80"],
        ),
        ("INC-3: svc2 deleted", vec![gone("t/svc2")], vec![one, ".43:80 → 10.0.3.1:80"]),
        ("INC-4: svc4 without endpoints", vec![service(4, 80)], vec![one, ".43:80 → 10.0.3.1:80", ".44:80 → reject"]),
        ("INC-5: its slice", vec![slice(4, ".1 R L")], vec![one, ".43:80 → 10.0.3.1:80", ".44:80 → 10.0.4.1:80"]),
        (
            "INC-6: another endpoint of svc3",
            vec![slice(3, ".2 R L")],
            vec![one, ".43:80 → 10.0.3.2:80", ".44:80 → 10.0.4.1:80"],
        ),
        (
            "INC-7: one more",
            vec![slice(3, ".2 R L;.3 R L")],
            vec![one, ".43:80 → 10.0.3.2:80 10.0.3.3:80", ".44:80 → 10.0.4.1:80"],
        ),
        ("INC-8: emptied", vec![slice(3, "")], vec![one, ".43:80 → reject", ".44:80 → 10.0.4.1:80"]),
        (
            "INC-9: restored",
            vec![slice(3, ".2 R L;.3 R L")],
            vec![one, ".43:80 → 10.0.3.2:80 10.0.3.3:80", ".44:80 → 10.0.4.1:80"],
        ),
        (
            "INC-9: emptied and restored at once",
            vec![slice(3, ""), slice(3, ".2 R L;.3 R L")],
            vec![one, ".43:80 → 10.0.3.2:80 10.0.3.3:80", ".44:80 → 10.0.4.1:80"],
        ),
        ("INC-10: emptied", vec![slice(3, "")], vec![one, ".43:80 → reject", ".44:80 → 10.0.4.1:80"]),
        (
            "INC-10: restored",
            vec![slice(3, ".2 R L;.3 R L")],
            vec![one, ".43:80 → 10.0.3.2:80 10.0.3.3:80", ".44:80 → 10.0.4.1:80"],
        ),
    ];
    let mut engine = synced();
    let mut writes = Vec::new();
    for (name, updates, expected) in steps {
        writes.push((name, step(&mut engine, updates)));
        assert_eq!(programmed(&engine), expected, "{name}");
    }
    let alone = step(&mut synced(), vec![service(3, 80), slice(3, ".1 R L")]);
    assert_eq!(writes[1].1, alone, "INC-2: as many writes as for svc3 alone");
    assert_eq!(writes[9].1, 0, "INC-9: {:?}", writes[9]);
    assert_eq!(step(&mut engine, vec![slice(3, ".2 R L;.3 R L"), service(1, 80)]), 0, "INC-11: the same told again");
    while engine.reclaim() {}
    engine.resync();
    assert_eq!(step(&mut engine, vec![]), 0, "INC-11: a full pass");
    check_no_leak(&mut engine);
}

/// What the kernel has when the agent starts, and what the cluster wants.
fn successor(left_over: Vec<Update>, services: Vec<Update>, slices: Vec<Update>) -> (Vec<String>, Engine<Fake>) {
    let mut first = synced();
    step(&mut first, left_over);
    let had = programmed(&first);
    let mut second = engine(first.into_datapath());
    for updates in [services, slices] {
        // One kind after the other, each with its complete list first.
        updates.into_iter().for_each(|update| second.update(update));
        assert!(second.flush());
        assert_eq!(programmed(&second), had, "nothing changes before every source has listed");
    }
    second.update(Update::Nodes(vec![]));
    settle(&mut second);
    check_whole(second.datapath());
    (had, second)
}

#[test]
fn inc_12_left_over_state_is_brought_in_line_and_what_is_right_stays() {
    let left_over = vec![service(1, 80), slice(1, ".1 R L"), service(2, 8080), slice(2, ".1 R L")];
    let services = vec![Update::Services(vec![]), service(1, 80), service(2, 8080), service(3, 80)];
    let slices = vec![Update::Slices(vec![]), slice(1, ".1 R L;.2 R L"), slice(2, ".1 R L")];
    let (_, mut engine) = successor(left_over, services, slices);
    let expected = [".41:80 → 10.0.1.1:80 10.0.1.2:80", ".42:8080 → 10.0.2.1:80", ".43:80 → reject"];
    assert_eq!(programmed(&engine), expected);
    check_no_leak(&mut engine);
}

#[test]
fn inc_13_a_left_over_service_goes_once_every_source_has_listed() {
    let left_over = vec![service(1, 80), slice(1, ".1 R L"), service(2, 8080), slice(2, ".1 R L")];
    let (had, mut engine) = successor(
        left_over,
        vec![Update::Services(vec![]), service(1, 80)],
        vec![Update::Slices(vec![]), slice(1, ".1 R L")],
    );
    assert_eq!(had.len(), 2);
    assert_eq!(programmed(&engine), [".41:80 → 10.0.1.1:80"]);
    check_no_leak(&mut engine);
}
