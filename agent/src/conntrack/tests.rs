use std::collections::HashMap;

use sheave_ebpf::{conntrack::ROLE_RETURN, proto};

use super::*;

impl ReadFlows for HashMap<Tuple, Flow> {
    fn flow(&self, tuple: &Tuple) -> Option<Flow> {
        self.get(tuple).copied()
    }
}

fn addr(text: &str) -> Addr {
    text.parse::<std::net::IpAddr>().unwrap().into()
}

/// All entries of a flow whose client is hidden, dialled from port 1 at `dialled` and answered at `replied`. Behind
/// ingress the client has the port given.
fn table(port: u16, protocol: u8, dialled: (u32, u32), replied: (u32, u32)) -> HashMap<Tuple, Flow> {
    let (client, frontend) = (addr("198.51.100.10"), addr("192.0.2.11"));
    let (backend, node) = (addr("10.244.1.10"), addr("10.244.1.1"));
    let tuple = |src, src_port: u16, dst, dst_port: u16, hook| Tuple {
        src,
        dst,
        src_port: src_port.to_be(),
        dst_port: dst_port.to_be(),
        proto: protocol,
        hook,
        zero: 0,
    };
    let entry = |to, to_port: u16, other_port: u16, (flags, time), role| Flow {
        to,
        to_port: to_port.to_be(),
        other_port: other_port.to_be(),
        seen: seen::word(flags, time),
        service: 1,
        backend: 2,
        created: 0,
        flags: role,
        zero: 0,
    };
    let at = HOOK_EGRESS;
    HashMap::from([
        (tuple(client, 1, frontend, 2, HOOK_INGRESS), entry(backend, 3, port, dialled, ROLE_DIAL | FLAG_MASQUERADE)),
        (tuple(backend, 3, client, port, at), entry(frontend, 2, 1, replied, ROLE_REPLY)),
        (tuple(client, port, backend, 3, at), entry(node, 4, 3, (0, 0), ROLE_MASQUERADE)),
        (tuple(backend, 3, node, 4, HOOK_INGRESS), entry(client, port, 3, (0, 0), ROLE_RETURN)),
    ])
}

/// Sweeps until nothing changes; how many passes it took and how many entries are left.
fn collect(table: &mut HashMap<Tuple, Flow>, now: u32) -> (usize, usize) {
    collect_from(table, now, false)
}

fn collect_from(table: &mut HashMap<Tuple, Flow>, now: u32, is_crowded: bool) -> (usize, usize) {
    for pass in 0.. {
        let gone: Vec<_> = table.iter().flat_map(|(tuple, flow)| sweep(now, is_crowded, tuple, flow, table)).collect();
        if gone.is_empty() {
            return (pass, table.len());
        }
        table.retain(|tuple, _| !gone.contains(tuple));
    }
    unreachable!("a finite table")
}

#[test]
fn a_flow_lives_while_either_side_may_speak_and_goes_whole() {
    const ANY: u32 = seen::ANY;
    const STREAM: u32 = seen::STREAM;
    const SYN: u32 = seen::ANY | seen::SYN;
    const FIN: u32 = seen::ANY | seen::FIN;
    const RST: u32 = seen::ANY | seen::RST;
    let cases = [
        ("an open connection, silent for a day less a second", proto::TCP, (ANY, 1000), (ANY, 1000), 86_399, 4),
        ("an open connection, silent for a day", proto::TCP, (ANY, 1000), (ANY, 1000), 86_401, 0),
        ("only the backend speaks", proto::TCP, (ANY, 1000), (ANY, 80_000), 100_000, 4),
        ("only the client speaks", proto::TCP, (ANY, 80_000), (ANY, 1000), 100_000, 4),
        ("a SYN nobody answered", proto::TCP, (SYN, 1000), (0, 1000), 61, 0),
        ("a SYN that may still be answered", proto::TCP, (SYN, 1000), (0, 1000), 60, 4),
        ("a SYN answered, never acknowledged", proto::TCP, (SYN, 1000), (ANY, 1000), 61, 0),
        ("a SYN whose answer may still be acknowledged", proto::TCP, (SYN, 1000), (ANY, 1000), 60, 4),
        ("one side closed", proto::TCP, (FIN, 1000), (ANY, 1000), 3600, 4),
        ("one side closed long ago", proto::TCP, (FIN, 1000), (ANY, 1000), 3601, 0),
        ("both sides closed", proto::TCP, (FIN, 1000), (FIN, 1000), 11, 0),
        ("both sides just closed", proto::TCP, (FIN, 1000), (FIN, 1000), 10, 4),
        ("reset by the backend", proto::TCP, (ANY, 1000), (RST, 1000), 11, 0),
        ("a question nobody answered", proto::UDP, (ANY, 1000), (0, 1000), 31, 0),
        ("a question and its answer", proto::UDP, (ANY, 1000), (ANY, 1000), 30, 4),
        ("a question and its answer, over", proto::UDP, (ANY, 1000), (ANY, 1000), 31, 0),
        ("questions and answers", proto::UDP, (ANY | STREAM, 1000), (ANY, 1000), 120, 4),
        ("questions and answers, over", proto::UDP, (ANY | STREAM, 1000), (ANY, 1000), 121, 0),
    ];
    for (name, protocol, dialled, replied, later, left) in cases {
        for port in [1, 5] {
            let mut table = table(port, protocol, dialled, replied);
            let (passes, entries) = collect(&mut table, if name.starts_with("only") { later } else { 1000 + later });
            assert_eq!(entries, left, "{name}, port {port}");
            assert!(passes <= 1, "{name}, port {port}: {passes} passes");
        }
    }
}

/// Room is made by what carries nothing, never by a connection that is open.
#[test]
fn a_crowded_table_does_without_what_is_dispensable() {
    const ANY: u32 = seen::ANY;
    const STREAM: u32 = seen::ANY | seen::STREAM;
    const FIN: u32 = seen::ANY | seen::FIN;
    const RST: u32 = seen::ANY | seen::RST;
    const SYN: u32 = seen::ANY | seen::SYN;
    let cases = [
        ("an open connection", proto::TCP, ANY, ANY, false),
        ("one side closed", proto::TCP, FIN, ANY, false),
        ("both sides closed", proto::TCP, FIN, FIN, true),
        ("reset by the backend", proto::TCP, ANY, RST, true),
        ("a SYN nobody answered", proto::TCP, SYN, 0, true),
        ("a SYN answered, never acknowledged", proto::TCP, SYN, ANY, true),
        ("a question nobody answered", proto::UDP, ANY, 0, true),
        ("a question and its answer", proto::UDP, ANY, ANY, true),
        ("questions and answers", proto::UDP, STREAM, ANY, false),
        ("an association", proto::SCTP, ANY, ANY, false),
    ];
    for (name, protocol, dialled, replied, is_dispensable) in cases {
        for (later, is_crowded, is_gone) in [(6, true, is_dispensable), (5, true, false), (6, false, false)] {
            let mut table = table(1, protocol, (dialled, 1000), (replied, 1000));
            let left = collect_from(&mut table, 1000 + later, is_crowded).1;
            assert_eq!(left, if is_gone { 0 } else { 4 }, "{name}, {later} seconds later, crowded: {is_crowded}");
        }
    }
}

#[test]
fn what_a_full_table_pushed_out_leaves_nothing_behind() {
    let roles = [
        ("the dialled entry", ROLE_DIAL),
        ("the reply's", ROLE_REPLY),
        ("the hiding one", ROLE_MASQUERADE),
        ("the one back to the client", ROLE_RETURN),
    ];
    for (name, role) in roles {
        let mut table = table(5, proto::UDP, (seen::ANY, 1000), (seen::ANY, 1000));
        table.retain(|_, flow| flow.role() != role);
        assert_eq!(collect(&mut table, 1000 + 121).1, 0, "without {name}");
    }
}

#[test]
fn the_replies_of_a_port_that_the_client_has_no_more_are_forgotten() {
    let then = table(5, proto::UDP, (seen::ANY | seen::STREAM, 1000), (seen::ANY, 1000));
    let mut table = table(6, proto::UDP, (seen::ANY | seen::STREAM, 1100), (seen::ANY, 1100));
    then.into_iter().for_each(|(tuple, flow)| {
        table.entry(tuple).or_insert(flow);
    });
    assert_eq!(table.len(), 6, "the dialled entry and the one back to the client are the same");
    collect(&mut table, 1121);
    assert_eq!(table.len(), 4);
}

#[test]
fn people_see_the_clients_own_port_and_what_the_backend_sees() {
    let cases = [
        ("hidden", 1, true, Some("10.244.1.1:4")),
        ("hidden, another port", 5, true, Some("10.244.1.1:4")),
        ("seen", 1, false, None),
        ("seen, another port", 5, false, Some("198.51.100.10:5")),
    ];
    for (name, port, is_hidden, seen_as) in cases {
        let table = table(port, proto::TCP, (seen::ANY, 0), (seen::ANY, 0));
        let mut entries: Vec<_> = table.clone().into_iter().collect();
        if !is_hidden {
            entries.iter_mut().for_each(|(_, flow)| flow.flags &= !FLAG_MASQUERADE);
        }
        let flows = views(0, &entries, &table, &|_| None);
        let [flow] = flows.as_slice() else { panic!("{name}: {flows:?}") };
        assert_eq!(flow.client, "198.51.100.10:1".parse().unwrap(), "{name}");
        assert_eq!(flow.masqueraded_as, seen_as.map(|text| text.parse().unwrap()), "{name}");
    }
}

#[test]
fn a_flow_whose_clients_port_was_used_again_after_it_was_copied_stays_whole() {
    const FIN: u32 = seen::ANY | seen::FIN;
    let (old, new) = ((FIN, 1000), (seen::ANY, 2000));
    let now = 2000;
    let renewed = |created, seen: (u32, u32)| {
        let mut table = table(1, proto::TCP, seen, seen);
        table.values_mut().for_each(|flow| flow.created = created);
        table
    };
    let copied = renewed(900, old);
    for (case, table, gone) in [
        ("nothing happened", renewed(900, old), true),
        ("another flow has the same keys", renewed(2000, new), false),
        ("and is as old as the pass", renewed(2000, old), false),
        ("another packet came", renewed(900, new), false),
    ] {
        for (tuple, flow) in &copied {
            let removed = sweep(now, false, tuple, flow, &table);
            let is_over = gone && flow.role() == ROLE_DIAL;
            assert_eq!(removed.len(), if is_over { 4 } else { 0 }, "{case}: role {}", flow.role());
        }
    }
    // What the full table left of a flow: its other half came again just after it was copied.
    for (case, role, other) in [
        ("the answers", ROLE_REPLY, ROLE_DIAL),
        ("the hiding entry", ROLE_MASQUERADE, ROLE_REPLY),
        ("the one back to the client", ROLE_RETURN, ROLE_REPLY),
    ] {
        let (tuple, flow) = copied.iter().find(|(_, flow)| flow.role() == role).unwrap();
        let mut orphaned = copied.clone();
        orphaned.retain(|_, flow| flow.role() != other);
        assert_eq!(sweep(now, false, tuple, flow, &orphaned), [*tuple], "{case}, orphaned");
        assert_eq!(sweep(now, false, tuple, flow, &copied), [], "{case}, whole again");
        orphaned.get_mut(tuple).unwrap().created = now;
        assert_eq!(sweep(now, false, tuple, flow, &orphaned), [], "{case}, made anew");
    }
}

#[test]
fn the_kinds_of_flows_are_those_of_what_is_left() {
    let own = addr("10.244.1.10");
    let kinds = |keep: &dyn Fn(&Flow) -> bool, is_own: bool| {
        let mut kinds = Kinds::default();
        let table = table(1, proto::TCP, (seen::ANY, 0), (seen::ANY, 0));
        table.values().filter(|f| keep(f)).for_each(|f| kinds.add(f, |a| is_own && *a == own));
        (kinds.masqueraded, kinds.plain)
    };
    assert_eq!(kinds(&|_| true, false), (true, false));
    assert_eq!(kinds(&|_| true, true), (true, true), "a process of this node answers unmarked");
    assert_eq!(kinds(&|_| false, true), (false, false));
    assert_eq!(kinds(&|f| f.role() == ROLE_RETURN, false), (true, false));
}
