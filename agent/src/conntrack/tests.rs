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

/// All entries of a flow whose client is hidden: it was dialled at `dialled` and answered at `replied`.
fn table(protocol: u8, dialled: (u32, u32), replied: (u32, u32)) -> HashMap<Tuple, Flow> {
    let (client, frontend) = (addr("198.51.100.10"), addr("192.0.2.11"));
    let (backend, node) = (addr("10.244.1.10"), addr("10.244.1.1"));
    let tuple =
        |src, src_port, dst, dst_port, hook| Tuple { src, dst, src_port, dst_port, proto: protocol, hook, zero: 0 };
    let entry = |to, to_port, (flags, time), role| Flow {
        to,
        to_port,
        seen: seen::word(flags, time),
        service: 1,
        backend: 2,
        created: 0,
        flags: role,
    };
    let at = HOOK_EGRESS;
    HashMap::from([
        (tuple(client, 1, frontend, 2, HOOK_INGRESS), entry(backend, 3, dialled, ROLE_DIAL | FLAG_MASQUERADE)),
        (tuple(backend, 3, client, 1, at), entry(frontend, 2, replied, ROLE_REPLY)),
        (tuple(client, 1, backend, 3, at), entry(node, 4, (0, 0), ROLE_MASQUERADE)),
        (tuple(backend, 3, node, 4, HOOK_INGRESS), entry(client, 1, (0, 0), ROLE_RETURN)),
    ])
}

/// Sweeps until nothing changes; how many passes it took and how many entries are left.
fn collect(table: &mut HashMap<Tuple, Flow>, now: u32) -> (usize, usize) {
    for pass in 0.. {
        let mut gone = Vec::new();
        table.iter().for_each(|(tuple, flow)| sweep(now, tuple, flow, table, &mut gone));
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
    const FIN: u32 = seen::ANY | seen::FIN;
    const RST: u32 = seen::ANY | seen::RST;
    let cases = [
        ("an open connection, silent for a day less a second", proto::TCP, (ANY, 1000), (ANY, 1000), 86_399, 4),
        ("an open connection, silent for a day", proto::TCP, (ANY, 1000), (ANY, 1000), 86_401, 0),
        ("only the backend speaks", proto::TCP, (ANY, 1000), (ANY, 80_000), 100_000, 4),
        ("only the client speaks", proto::TCP, (ANY, 80_000), (ANY, 1000), 100_000, 4),
        ("a SYN nobody answered", proto::TCP, (ANY, 1000), (0, 1000), 61, 0),
        ("a SYN that may still be answered", proto::TCP, (ANY, 1000), (0, 1000), 60, 4),
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
        let mut table = table(protocol, dialled, replied);
        let (passes, entries) = collect(&mut table, if name.starts_with("only") { later } else { 1000 + later });
        assert_eq!(entries, left, "{name}");
        assert!(passes <= 1, "{name}: {passes} passes");
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
        let mut table = table(proto::UDP, (seen::ANY, 1000), (seen::ANY, 1000));
        table.retain(|_, flow| flow.role() != role);
        assert_eq!(collect(&mut table, 1000 + 121).1, 0, "without {name}");
    }
}

#[test]
fn the_kinds_of_flows_are_those_of_what_is_left() {
    let own = addr("10.244.1.10");
    let kinds = |keep: &dyn Fn(&Flow) -> bool, is_own: bool| {
        let mut kinds = Kinds::default();
        let table = table(proto::TCP, (seen::ANY, 0), (seen::ANY, 0));
        table.values().filter(|f| keep(f)).for_each(|f| kinds.add(f, |a| is_own && *a == own));
        (kinds.masqueraded, kinds.plain)
    };
    assert_eq!(kinds(&|_| true, false), (true, false));
    assert_eq!(kinds(&|_| true, true), (true, true), "a process of this node answers unmarked");
    assert_eq!(kinds(&|_| false, true), (false, false));
    assert_eq!(kinds(&|f| f.role() == ROLE_RETURN, false), (true, false));
}
