//! From slices to the endpoints of a port; which of them are local and ready; one address in several slices.

use super::{EndpointSlice, Offers, local_ready};
use crate::{
    model::{Family, Protocol, State},
    source::convert::fixtures::{Gen, OWN, Slice, generated, service_name, show, shown, slice_of},
};

const HOSTS: &[&str] = &["host1", "host2"];

/// The endpoints of ns1/svc1's `port` after these slices came in this order.
fn ingest(slices: &[Slice], port: &str, own: &str) -> String {
    let mut state = State::default();
    slices.iter().for_each(|slice| drop(state.apply(slice.update())));
    show(&Offers::of(state.slices(&service_name("ns1/svc1"))).endpoints(port, Protocol::Tcp, Family::V4), own)
}

#[test]
fn slices_become_endpoints_in_any_order_of_ports() {
    let slice = Gen { hosts: HOSTS, ports: &[80, 443], ..generated(1, 3) }.api();
    for (port, number) in [("port-0", 80), ("port-1", 443)] {
        let expected = shown("10.0.1", number, ".1 R; .2 R L; .3 R");
        assert_eq!(ingest(std::slice::from_ref(&slice), port, "host1"), expected, "I01 {port}");
    }
}

#[test]
fn slices_of_one_service_are_merged() {
    let unready = |every| Gen { unready_every: every, ..generated(1, 10) };
    let both = |every| Gen { unready_every: every, term_every: 5, ..generated(1, 10) };
    let u6 = ".1 R; .2 R; .3 R; .4 R; .5 R; .6 U; .7 R; .8 R; .9 R; .10 R";
    let other = |service| Gen { service, ..generated(1, 3) }.api();
    let mut no_port = generated(1, 3).api();
    no_port.0.ports.iter_mut().flatten().for_each(|port| port.port = None);

    let two = [shown("10.0.1", 80, ".1 R; .2 R; .3 R"), shown("10.0.2", 80, ".1 R; .2 R; .3 R")].join("; ");
    for (id, slices, expected) in [
        ("I02", vec![generated(1, 3).api(), generated(2, 3).api()], two),
        ("I03", vec![generated(1, 3).api(), generated(1, 4).api()], shown("10.0.1", 80, ".1 R; .2 R; .3 R; .4 R")),
        // kube-proxy sorts by text, .10 before .1; sheave by number. The order means nothing to traffic.
        ("I04", vec![unready(3).api(), unready(6).api()], shown("10.0.1", 80, u6)),
        (
            "I05",
            vec![both(3).api(), both(6).api()],
            shown("10.0.1", 80, ".1 R; .2 R; .3 R; .4 R; .5 ST; .6 U; .7 R; .8 R; .9 R; .10 ST"),
        ),
        ("I06", vec![unready(1).api(), unready(1).api()], shown("10.0.1", 80, &u6.replace('R', "U"))),
        ("I07", vec![other("ns1/svc1"), other("ns1/svc2"), other("ns2/svc1")], shown("10.0.1", 80, ".1 R; .2 R; .3 R")),
        ("I08", vec![no_port], String::new()),
    ] {
        assert_eq!(ingest(&slices, "port-0", "host1"), expected, "{id}");
    }
}

#[test]
fn one_address_with_two_ports_is_two_endpoints() {
    let slice = |slice, port: &'static [u16]| Gen { hosts: HOSTS, offset: 1, ports: port, ..generated(slice, 2) }.api();
    let expected = "10.0.1.1:80 R; 10.0.1.1:8080 R; 10.0.1.2:80 R L; 10.0.1.2:8080 R L";
    assert_eq!(ingest(&[slice(1, &[80]), slice(2, &[8080])], "port-0", "host1"), expected, "I09");
}

#[test]
fn an_address_is_as_good_as_its_best_appearance_in_whatever_order() {
    for (id, first, second, expected) in [
        ("I10", ".1 ST L; .1 R L; .1 T L", "", ".1 R L"),
        ("ready beats unready", ".1 U L", ".1 R L", ".1 R L"),
        ("ready beats serving and terminating", ".1 ST L", ".1 R @other", ".1 R"),
        ("serving and terminating beats unready", ".1 U L", ".1 ST L", ".1 ST L"),
        ("serving and terminating beats terminating", ".1 T L", ".1 ST L", ".1 ST L"),
        ("ready beats ready but terminating", ".1 R+T L", ".1 R L", ".1 R L"),
        ("ready but terminating beats the rest", ".1 R+T L", ".1 ST L", ".1 R+T L"),
        // Differs from kube-proxy, which keeps the first or the last that came.
        ("twice, in any order", ".1 R L; .2 U", ".1 U L; .2 R", ".1 R L; .2 R"),
        ("two nodes", ".1 R @a", ".1 R L", ".1 R"),
    ] {
        let slices = [
            slice_of("ns1/a", "svc1").ports("p 80/TCP").endpoints("10.0.0", first),
            slice_of("ns1/b", "svc1").ports("p 80/TCP").endpoints("10.0.0", second),
        ];
        let [a, b] = slices.clone();
        for (order, slices) in [("as written", slices), ("reversed", [b, a])] {
            assert_eq!(ingest(&slices, "p", OWN), shown("10.0.0", 80, expected), "{id}, {order}");
        }
    }
}

#[test]
fn a_duplicate_has_the_weight_of_the_appearance_that_counts() {
    let weighted = |name, weight, endpoints| {
        slice_of(name, "svc1").ports("p 80/TCP").annotation("sheave.io/weight", weight).endpoints("10.0.0", endpoints)
    };
    let slices = [weighted("ns1/a", "5", ".1 U"), weighted("ns1/b", "7", ".1 R"), weighted("ns1/c", "6", ".1 R")];
    let slices: Vec<EndpointSlice> = slices.iter().map(Slice::build).collect();
    let weights: Vec<_> =
        Offers::of(&slices).endpoints("p", Protocol::Tcp, Family::V4).iter().map(|e| e.weight).collect();
    assert_eq!(weights, [Some(7)]);
}

#[test]
fn local_ready_addresses_are_counted_once_per_service() {
    let lr4 = ("p11 11/TCP, p12 12/TCP", "1.1.1.1 R; 1.1.1.2 R L");
    let ep2 = |p23| [("p22 22/TCP", "2.2.2.2 R L; 2.2.2.22 R L"), ("p23 23/TCP", p23)];
    let ep4 = [("p44 44/TCP", "4.4.4.4 R L; 4.4.4.5 R"), ("p45 45/TCP", "4.4.4.6 R L")];
    let lr8 = "10.0.1.1 R L; 10.0.1.2 R L; 10.0.1.3 R L; 10.0.1.4 S L";
    let st = |(ports, endpoints): (&'static str, &str)| (ports, endpoints.replace(" R", " ST"));
    let [a, b] = ep2("2.2.2.3 R L");
    let (all_st_a, all_st_b) = (st(a), st(b));
    for (id, slices, expected) in [
        ("LR-1", vec![], ""),
        ("LR-2", vec![("11/TCP", "1.1.1.1 R")], ""),
        ("LR-3", vec![("11/TCP", "1.1.1.1 R L")], "1.1.1.1"),
        ("LR-4", vec![lr4], "1.1.1.2"),
        ("LR-5 ep2", ep2("2.2.2.3 R L").to_vec(), "2.2.2.2 2.2.2.3 2.2.2.22"),
        ("LR-5 ep4", ep4.to_vec(), "4.4.4.4 4.4.4.6"),
        ("LR-6", ep2("2.2.2.3 ST L").to_vec(), "2.2.2.2 2.2.2.22"),
        ("LR-7", vec![(all_st_a.0, &*all_st_a.1), (all_st_b.0, &*all_st_b.1)], ""),
        ("LR-8", vec![("80/TCP", lr8)], "10.0.1.1 10.0.1.2 10.0.1.3"),
        ("LR-9", vec![("80/TCP", "10.0.1.1 S L; 10.0.1.2 ST L; 10.0.1.3 ST L; 10.0.1.4 T L")], ""),
        ("no port, no service", vec![("", "1.1.1.1 R L")], ""),
    ] {
        let build =
            |(ports, endpoints): &(&str, &str)| slice_of("ns/s", "ep").ports(ports).endpoints("", endpoints).build();
        let slices: Vec<EndpointSlice> = slices.iter().map(build).collect();
        let local = |node| local_ready(&slices, node).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        assert_eq!(local(OWN), expected, "{id}");
        assert_eq!(local(""), "", "{id}: a node without name has nothing");
    }
}
