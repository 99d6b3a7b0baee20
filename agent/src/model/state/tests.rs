//! What an update touches, what is kept until a slice or Service goes, and when the lists are complete.

use super::{Changes, ServiceCidr, State, Update};
use crate::{
    model::{Family, Protocol, endpoint, endpoint::local_ready},
    source::convert::fixtures::{
        Gen, OWN, Slice, generated, node_with, service_name, show, shown, slice_name, slice_of, svc,
    },
};

const HOSTS: &[&str] = &["host1", "host2"];
const HOST1: &[&str] = &["host1"];
const PORTS: &[u16] = &[80, 443];

fn state_of(slices: &[Gen<'_>]) -> State {
    let mut state = State::default();
    slices.iter().for_each(|slice| drop(state.apply(slice.update())));
    state
}

fn list(state: &State, service: &str, port: &str, protocol: Protocol, own: &str) -> String {
    show(&endpoint::Offers::of(state.slices(&service_name(service))).endpoints(port, protocol, Family::V4), own)
}

/// Names of the services an update touched.
fn touched(changes: &Changes) -> String {
    changes.services.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_slice_changes_when_anything_of_it_does() {
    let start = slice_of("ns/s", "svc").ports("a 80/TCP, b 443/TCP").endpoints("10.0.0", ".1 R; .2 R");
    let with = |ports, endpoints| slice_of("ns/s", "svc").ports(ports).endpoints("10.0.0", endpoints);
    for (id, slice, changed) in [
        ("CD-1, CD-5", with("a 80/TCP, b 443/TCP", ".1 R; .2 R"), false),
        ("CD-2", with("b 443/TCP, a 80/TCP", ".1 R; .2 R"), true),
        ("CD-3", with("a 80/TCP", ".1 R; .2 R"), true),
        ("CD-4", with("a 80/TCP, b 443/TCP, c 1/TCP", ".1 R; .2 R"), true),
        ("CD-6", with("a 80/TCP, b 443/TCP", ".2 R; .1 R"), true),
        ("CD-7", with("a 80/TCP, b 443/TCP", ".1 R; .2 R; .3 R"), true),
    ] {
        let mut state = State::default();
        assert_eq!(touched(&state.apply(start.update())), "ns/svc", "{id}");
        assert_eq!(!state.apply(slice.update()).is_empty(), changed, "{id}");
    }
}

#[test]
fn slice_events_change_the_list() {
    let on = |hosts, slice, n| Gen { hosts, ports: PORTS, ..generated(slice, n) };
    let fqdn = || {
        let mut slice = on(HOSTS, 1, 3).api();
        slice.0.metadata.name = Some("svc1-fqdn".to_owned());
        slice.0.address_type = "FQDN".to_owned();
        slice.update()
    };
    let unready = |slice: Gen<'static>, every| Gen { unready_every: every, ..slice };
    let unready2 = |n, slice| Gen { unready_every: 2, ..on(HOST1, slice, n) };
    let both2 = |n, slice| Gen { unready_every: 2, term_every: 2, ..on(HOST1, slice, n) };
    let three = ".1 R; .2 R L; .3 R";
    let (one, two) = (on(HOSTS, 1, 3), on(HOSTS, 2, 2));
    let extra = Gen { offset: 1, ports: &[80], ..on(HOST1, 3, 5) };

    // id, slices before, event, changed, 10.0.1.x, 10.0.2.x
    for (id, before, event, changed, net1, net2) in [
        ("U01", vec![], one.update(), true, three, ""),
        ("U02", vec![one], one.update(), false, three, ""),
        ("U03", vec![one], fqdn(), false, three, ""),
        (
            "U04",
            vec![one, two],
            on(HOST1, 1, 5).update(),
            true,
            ".1 R L; .2 R L; .3 R L; .4 R L; .5 R L",
            ".1 R; .2 R L",
        ),
        (
            "U05",
            vec![on(HOST1, 1, 3), on(HOST1, 2, 2)],
            extra.update(),
            true,
            ".1 R L; .2 R L; .3 R L; .4 R L; .5 R L",
            ".1 R L; .2 R L",
        ),
        ("U06", vec![one, two], one.api().gone(), true, "", ".1 R; .2 R L"),
        ("U07", vec![one, two], on(HOSTS, 3, 2).api().gone(), false, three, ".1 R; .2 R L"),
        ("U08", vec![one], unready(on(HOST1, 1, 3), 1).update(), true, ".1 U L; .2 U L; .3 U L", ""),
        ("U09", vec![unready(on(HOST1, 1, 2), 1)], on(HOST1, 1, 2).update(), true, ".1 R L; .2 R L", ""),
        (
            "U10",
            vec![unready2(3, 1), unready2(2, 2)],
            unready(on(HOST1, 1, 3), 3).update(),
            true,
            ".1 R L; .2 R L; .3 U L",
            ".1 R L; .2 U L",
        ),
        (
            "U11",
            vec![both2(3, 1), both2(2, 2)],
            Gen { unready_every: 3, ..both2(3, 1) }.update(),
            true,
            ".1 R L; .2 ST L; .3 U L",
            ".1 R L; .2 T L",
        ),
    ] {
        let mut state = state_of(&before);
        let changes = state.apply(event);
        assert_eq!(!changes.is_empty(), changed, "{id}");
        let list = |port| list(&state, "ns1/svc1", port, Protocol::Tcp, "host1");
        let expected = |port, net1| {
            let nets = [shown("10.0.1", port, net1), shown("10.0.2", port, net2)];
            nets.into_iter().filter(|net| !net.is_empty()).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(list("port-0"), expected(80, net1), "{id} port-0");
        // U05's third slice offers port 80 only.
        let net1 = if id == "U05" { ".1 R L; .2 R L; .3 R L" } else { net1 };
        assert_eq!(list("port-1"), expected(443, net1), "{id} port-1");
    }
}

#[test]
fn what_is_pending_and_what_was_before_can_be_told_apart() {
    let lists = |state: &State| ["port-0", "port-1"].map(|port| list(state, "ns1/svc1", port, Protocol::Tcp, ""));
    let state = State::default();
    assert_eq!(lists(&state), ["", ""], "CO-1");

    let mut state = State::default();
    state.apply(Gen { unready_every: 3, term_every: 2, hosts: HOST1, ..generated(1, 3) }.update());
    assert_eq!(lists(&state), [shown("10.0.1", 80, ".1 R; .2 ST; .3 U"), String::new()], "CO-2");

    let slice = Gen { unready_every: 3, hosts: HOST1, ports: PORTS, ..generated(1, 3) };
    let mut state = state_of(&[slice]);
    let endpoints = ".1 R; .2 R; .3 U";
    assert_eq!(lists(&state), [shown("10.0.1", 80, endpoints), shown("10.0.1", 443, endpoints)], "CO-3 before");
    state.apply(Gen { ports: &[80], ..slice }.update());
    assert_eq!(lists(&state), [shown("10.0.1", 80, endpoints), String::new()], "CO-3 after");
}

/// Slices in short form: `ns1/slice of ep1 [ports] endpoints`.
fn short(text: &str) -> Slice {
    let (head, rest) = text.split_once(" [").expect("ports");
    let (name, service) = head.split_once(" of ").expect("an owner");
    let (ports, endpoints) = rest.split_once("] ").unwrap_or((rest.trim_end_matches(']'), ""));
    slice_of(name, service).ports(ports).endpoints("", endpoints)
}

/// All ports of all services as `service port: endpoints`.
fn everything(state: &State) -> String {
    let mut lines = Vec::new();
    for (service, slices) in &state.slices {
        let mut ports: Vec<_> = slices.values().flat_map(|s| &s.ports).map(|p| p.name.clone()).collect();
        ports.sort_unstable();
        ports.dedup();
        for port in ports {
            let endpoints = list(state, &service.to_string(), &port, Protocol::Udp, OWN);
            if !endpoints.is_empty() {
                lines.push(format!("{} {port}: {endpoints}", service.name));
            }
        }
    }
    lines.join("\n")
}

/// id; slices before; slices after; endpoints after; local ready addresses; Services that changed.
type Row<'a> = (&'a str, &'a [&'a str], &'a [&'a str], &'a str, &'a str, &'a str);

#[test]
fn endpoint_maps_follow_their_slices() {
    let unnamed = "ns1/s1 of ep1 [11/UDP] 1.1.1.1";
    let p11 = "ns1/s1 of ep1 [p11 11/UDP] 1.1.1.1";
    let p11_12 = "ns1/s1 of ep1 [p11 11/UDP, p12 12/UDP] 1.1.1.1; 1.1.1.2 L";
    let m06 = [
        "ns1/s1 of ep1 [p11 11/UDP, p12 12/UDP] 1.1.1.1; 1.1.1.2 L",
        "ns1/s2 of ep1 [p13 13/UDP, p14 14/UDP] 1.1.1.3; 1.1.1.4 L",
        "ns2/s1 of ep2 [p21 21/UDP, p22 22/UDP] 2.2.2.1; 2.2.2.2 L",
    ];
    let m15_before = [
        p11,
        "ns2/s1 of ep2 [p22 22/UDP] 2.2.2.2 L; 2.2.2.22 L",
        "ns2/s2 of ep2 [p23 23/UDP] 2.2.2.3 L",
        "ns4/s1 of ep4 [p44 44/UDP] 4.4.4.4 L; 4.4.4.5 L",
        "ns4/s2 of ep4 [p45 45/UDP] 4.4.4.6 L",
    ];
    let m15_after = [
        "ns1/s1 of ep1 [p11 11/UDP] 1.1.1.1; 1.1.1.11",
        "ns1/s2 of ep1 [p12 12/UDP, p122 122/UDP] 1.1.1.2",
        "ns3/s1 of ep3 [p33 33/UDP] 3.3.3.3",
        "ns4/s1 of ep4 [p44 44/UDP] 4.4.4.4 L",
    ];
    let st = "ns1/s1 of ep1 [11/UDP] 1.1.1.1 ST";
    let empty = "ns1/s1 of ep1 [11/UDP]";

    // Which flows a row of M makes stale is a matter of what is cleaned up, not of the model.
    let rows: &[Row<'_>] = &[
        ("M01", &[], &[], "", "", ""),
        ("M02", &[unnamed], &[unnamed], "ep1 : 1.1.1.1:11 R", "", ""),
        (
            "M03",
            &["ns1/s1 of ep1 [p11 11/UDP] 1.1.1.1 L"],
            &["ns1/s1 of ep1 [p11 11/UDP] 1.1.1.1 L"],
            "ep1 p11: 1.1.1.1:11 R L",
            "ep1:1",
            "",
        ),
        (
            "M04",
            &[p11, "ns1/s2 of ep1 [p12 12/UDP] 1.1.1.2"],
            &[p11, "ns1/s2 of ep1 [p12 12/UDP] 1.1.1.2"],
            "ep1 p11: 1.1.1.1:11 R\nep1 p12: 1.1.1.2:12 R",
            "",
            "",
        ),
        (
            "M05",
            &["ns1/s1 of ep1 [p11 11/UDP, p12 12/UDP] 1.1.1.1 L", "ns1/s2 of ep1 [p13 13/UDP] 1.1.1.3"],
            &["ns1/s1 of ep1 [p11 11/UDP, p12 12/UDP] 1.1.1.1 L", "ns1/s2 of ep1 [p13 13/UDP] 1.1.1.3"],
            "ep1 p11: 1.1.1.1:11 R L\nep1 p12: 1.1.1.1:12 R L\nep1 p13: 1.1.1.3:13 R",
            "ep1:1",
            "",
        ),
        (
            "M06",
            &m06,
            &m06,
            "ep1 p11: 1.1.1.1:11 R; 1.1.1.2:11 R L\nep1 p12: 1.1.1.1:12 R; 1.1.1.2:12 R L\n\
             ep1 p13: 1.1.1.3:13 R; 1.1.1.4:13 R L\nep1 p14: 1.1.1.3:14 R; 1.1.1.4:14 R L\n\
             ep2 p21: 2.2.2.1:21 R; 2.2.2.2:21 R L\nep2 p22: 2.2.2.1:22 R; 2.2.2.2:22 R L",
            "ep1:2 ep2:1",
            "",
        ),
        ("M07", &[], &["ns1/s1 of ep1 [11/UDP] 1.1.1.1 L"], "ep1 : 1.1.1.1:11 R L", "ep1:1", "ep1"),
        ("M08", &["ns1/s1 of ep1 [11/UDP] 1.1.1.1 L"], &[], "", "", "ep1"),
        (
            "M09",
            &[p11],
            &[p11_12],
            "ep1 p11: 1.1.1.1:11 R; 1.1.1.2:11 R L\nep1 p12: 1.1.1.1:12 R; 1.1.1.2:12 R L",
            "ep1:1",
            "ep1",
        ),
        ("M10", &[p11_12], &[p11], "ep1 p11: 1.1.1.1:11 R", "", "ep1"),
        (
            "M11",
            &[p11],
            &[p11, "ns1/s2 of ep1 [p12 12/UDP] 1.1.1.2 L"],
            "ep1 p11: 1.1.1.1:11 R\nep1 p12: 1.1.1.2:12 R L",
            "ep1:1",
            "ep1",
        ),
        ("M12", &[p11, "ns1/s2 of ep1 [p12 12/UDP] 1.1.1.2"], &[p11], "ep1 p11: 1.1.1.1:11 R", "", "ep1"),
        ("M13", &[p11], &["ns1/s1 of ep1 [p11-2 11/UDP] 1.1.1.1"], "ep1 p11-2: 1.1.1.1:11 R", "", "ep1"),
        ("M14", &[p11], &["ns1/s1 of ep1 [p11 22/UDP] 1.1.1.1"], "ep1 p11: 1.1.1.1:22 R", "", "ep1"),
        (
            "M15",
            &m15_before,
            &m15_after,
            "ep1 p11: 1.1.1.1:11 R; 1.1.1.11:11 R\nep1 p12: 1.1.1.2:12 R\nep1 p122: 1.1.1.2:122 R\n\
             ep3 p33: 3.3.3.3:33 R\nep4 p44: 4.4.4.4:44 R L",
            "ep4:1",
            "ep1 ep2 ep3 ep4",
        ),
        ("M16", &[empty], &[unnamed], "ep1 : 1.1.1.1:11 R", "", "ep1"),
        ("M17", &[unnamed], &[st], "ep1 : 1.1.1.1:11 ST", "", "ep1"),
        ("M18", &[st], &[empty], "", "", "ep1"),
        ("M19", &["ns1/s1 of ep1 [p 1/TCP] 1.1.1.1"], &["ns1/s1 of ep1 [p 1/TCP] 1.1.1.2"], "", "", "ep1"),
    ];
    for (id, before, after, expected, local, changed) in rows {
        let mut state = State::default();
        let slices = |texts: &[&str]| texts.iter().map(|text| short(text).build()).collect::<Vec<_>>();
        state.apply(Update::Slices(slices(before)));
        // One at a time, as a watch tells it.
        let mut changes = Changes::default();
        for slice in slices(after) {
            changes.merge(state.apply(Update::Slice(Box::new(slice))));
        }
        let gone = |name: &&str| !after.iter().any(|a| a.split(' ').next() == Some(name));
        for name in before.iter().filter_map(|text| text.split(' ').next()).filter(gone) {
            changes.merge(state.apply(Update::SliceGone(slice_name(name))));
        }
        let names = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let sorted = |text: &str| {
            let mut l: Vec<_> = text.lines().map(str::to_owned).collect();
            l.sort();
            l
        };
        assert_eq!(sorted(&everything(&state)), sorted(expected), "{id}");
        let changed_services: Vec<String> = changes.services.iter().map(|s| s.name.to_string()).collect();
        assert_eq!(changed_services, names(changed), "{id}: changed");
        let counts = state.slices.keys().filter_map(|service| {
            let count = local_ready(state.slices(service), OWN).len();
            (count > 0).then(|| format!("{}:{count}", service.name))
        });
        assert_eq!(counts.collect::<Vec<_>>(), names(local), "{id}: local");

        // A complete list that says the same changes nothing, and one that comes at once ends in the same state.
        assert!(state.apply(Update::Slices(slices(after))).is_empty(), "{id}: listed again");
        let mut at_once = State::default();
        at_once.apply(Update::Slices(slices(before)));
        let changes = at_once.apply(Update::Slices(slices(after)));
        assert_eq!(everything(&at_once), everything(&state), "{id}: listed");
        assert_eq!(changes.services.len(), names(changed).len(), "{id}: listed");
    }
}

#[test]
fn nothing_stays_of_what_is_gone() {
    let slice = |service, slice| Gen { service, ..generated(slice, 1) };
    for (id, slices, deleted, tracked) in [
        ("ML-1", vec![slice("ns1/svc1", 1)], 1, 0),
        ("ML-2", vec![slice("ns1/svc1", 1), slice("ns1/svc2", 1)], 2, 0),
        ("ML-3", vec![slice("ns1/svc1", 1), slice("ns1/svc1", 2)], 2, 0),
        ("ML-4", vec![slice("ns1/svc1", 1), slice("ns2/svc1", 1)], 2, 0),
        ("ML-5", vec![slice("ns1/svc1", 1), slice("ns1/svc1", 2)], 1, 1),
    ] {
        let mut state = state_of(&slices);
        slices.iter().take(deleted).for_each(|slice| drop(state.apply(slice.api().gone())));
        assert_eq!((state.slices.len(), state.owners.len()), (tracked, tracked), "{id}");
    }
}

#[test]
fn a_slice_may_change_its_owner() {
    let slice = |owner| slice_of("ns/s", owner).ports("80/TCP").endpoints("10.0.0", ".1 R");
    let mut state = State::default();
    state.apply(slice("old").update());
    assert_eq!(touched(&state.apply(slice("new").update())), "ns/new ns/old");
    assert_eq!(state.slices(&service_name("ns/old")).count(), 0);
    assert_eq!(state.slices(&service_name("ns/new")).count(), 1);
    // SK-7: from now on the slice of a headless Service.
    let headless = slice("new").label("service.kubernetes.io/headless", "");
    assert_eq!(touched(&state.apply(headless.update())), "ns/new");
    assert!(state.slices.is_empty() && state.owners.is_empty());
}

#[test]
fn services_are_tracked() {
    let s1 = |port| Update::Service(Box::new(svc("ns/s1", "10.0.0.1").port(port).build()));
    let s2 = || Update::Service(Box::new(svc("ns/s2", "10.0.0.2").port("30/TCP").build()));
    let gone = |name| Update::ServiceGone(service_name(name));
    let mut state = State::default();
    for (id, update, changed, known) in [
        ("W-1", s1("10/TCP"), "ns/s1", "ns/s1"),
        ("W-2", s2(), "ns/s2", "ns/s1 ns/s2"),
        ("T04c", s2(), "", "ns/s1 ns/s2"),
        ("W-3", s1("20/TCP"), "ns/s1", "ns/s1 ns/s2"),
        ("W-4", gone("ns/s1"), "ns/s1", "ns/s2"),
        ("SK-8", gone("ns/s1"), "", "ns/s2"),
        ("W-5", gone("ns/s2"), "ns/s2", ""),
    ] {
        assert_eq!(touched(&state.apply(update)), changed, "{id}");
        let names: Vec<_> = state.services().map(|service| service.name.to_string()).collect();
        assert_eq!(names.join(" "), known, "{id}");
    }
}

#[test]
fn a_complete_list_replaces_everything_of_its_kind() {
    let service = |name, ip| svc(name, ip).port("80/TCP").build();
    let mut state = State::default();
    assert!(!state.is_synced());
    state.apply(Update::Services(vec![service("ns/a", "10.0.0.1"), service("ns/b", "10.0.0.2")]));
    state.apply(Update::Slices(vec![]));
    assert!(!state.is_synced(), "W-7: one kind is missing");
    state.apply(Update::Nodes(vec![]));
    assert!(state.is_synced());

    let changes = state.apply(Update::Services(vec![service("ns/b", "10.0.0.3"), service("ns/c", "10.0.0.4")]));
    assert_eq!(touched(&changes), "ns/a ns/b ns/c");
    let changes = state.apply(Update::Services(vec![service("ns/b", "10.0.0.3"), service("ns/c", "10.0.0.4")]));
    assert!(changes.is_empty(), "{changes:?}");
    assert!(state.is_synced(), "synced once is synced for good");
}

#[test]
fn service_cidrs_are_one_list_without_repetitions() {
    let cidr = |name: &str, networks: &[&str]| {
        let networks = networks.iter().map(|net| net.parse().unwrap()).collect();
        ServiceCidr { name: name.into(), networks }
    };
    let mut state = State::default();
    assert_eq!(state.service_cidrs(), None, "not known yet");
    let first = vec![cidr("foo", &["1.1.1.0/24"]), cidr("bar", &["2.2.2.0/24", "fc00::/64"])];
    for (id, update, expected) in [
        ("SC-1", Update::ServiceCidrs(first.clone()), "1.1.1.0/24 2.2.2.0/24 fc00::/64"),
        (
            "SC-2",
            Update::ServiceCidr(cidr("foobar", &["3.3.3.0/24", "2001:db8::/64"])),
            "1.1.1.0/24 2.2.2.0/24 3.3.3.0/24 2001:db8::/64 fc00::/64",
        ),
        (
            "SC-3",
            Update::ServiceCidr(cidr("foo", &["4.4.4.0/24"])),
            "2.2.2.0/24 3.3.3.0/24 4.4.4.0/24 2001:db8::/64 fc00::/64",
        ),
        ("SC-4", Update::ServiceCidrGone("bar".into()), "3.3.3.0/24 4.4.4.0/24 2001:db8::/64"),
        (
            "a network twice",
            Update::ServiceCidr(cidr("more", &["4.4.4.0/24", "2001:db8::/64"])),
            "3.3.3.0/24 4.4.4.0/24 2001:db8::/64",
        ),
    ] {
        assert!(state.apply(update.clone()).service_cidrs, "{id}");
        assert!(state.apply(update).is_empty(), "{id}: told again");
        let list: Vec<_> = state.service_cidrs().unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(list.join(" "), expected, "{id}");
    }
    assert!(state.apply(Update::ServiceCidrs(first)).service_cidrs, "a complete list");
    assert_eq!(state.service_cidrs().unwrap().len(), 3);
}

#[test]
fn a_node_changes_when_something_that_counts_does() {
    let node = |ip, zone, cidr| node_with("n1", &[ip], zone, &[cidr]);
    let mut state = State::default();
    for (id, node, changed) in [
        ("new", node("192.0.2.11", "", "10.244.1.0/24"), true),
        ("NC-1", node("192.0.2.11", "", "10.244.1.0/24"), false),
        ("NC-2", node("192.0.2.12", "", "10.244.1.0/24"), true),
        ("NC-4", node("192.0.2.12", "", "10.244.2.0/24"), true),
        ("TP-3", node("192.0.2.12", "us-west-2a", "10.244.2.0/24"), true),
        ("TP-4", node("192.0.2.12", "us-east-1b", "10.244.2.0/24"), true),
    ] {
        assert_eq!(state.apply(Update::Node(Box::new(node))).nodes, changed, "{id}");
    }
    assert!(state.apply(Update::NodeGone("n2".into())).is_empty());
    assert!(state.apply(Update::NodeGone("n1".into())).nodes);
    assert_eq!(state.nodes().count(), 0);
}
