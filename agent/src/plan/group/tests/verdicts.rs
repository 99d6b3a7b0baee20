//! Which scope does what: 6.1 and the endpoint sets of the packet flows.

use super::{group_of, groups_of, groups_with, test_node, verdicts};
use crate::{
    model::Algorithm,
    plan::{
        group::{PlanOptions, ScopePlan},
        maglev,
    },
    source::convert::fixtures::{Slice, Svc, slice_of, svc},
};

fn balancer() -> Svc {
    svc("ns/a", "172.30.1.1").port("80/TCP np 3001").ingress("1.2.3.4", None).kind("LoadBalancer")
}

fn slices(endpoints: &str) -> Vec<Slice> {
    vec![slice_of("ns/s", "a").ports("80/TCP").endpoints("10.0.1", endpoints)]
}

#[test]
fn a_scope_forwards_rejects_or_drops() {
    let plain = || svc("ns/a", "172.30.1.1").port("80/TCP");
    let (e1, e2, e12) = ("10.0.1.1:80", "10.0.1.2:80", "10.0.1.1:80 10.0.1.2:80");
    for (id, svc, endpoints, [cluster, inside, outside]) in [
        ("V-1 no slice", balancer(), "", ["REJECT"; 3]),
        ("V-1 nobody ready", balancer(), ".1 U; .2 T L", ["REJECT"; 3]),
        ("V-1 internal Local", balancer().internal_local(), ".1 U", ["REJECT"; 3]),
        ("V-1 external Local", balancer().external_local(), ".1 U L", ["REJECT"; 3]),
        ("V-2", plain().internal_local(), ".1 R", ["DROP", "", ""]),
        ("V-2 with an external address", balancer().internal_local(), ".1 R", ["DROP", e1, e1]),
        ("V-3", balancer().external_local(), ".1 R", [e1, e1, "DROP"]),
        ("V-2 and V-3", balancer().internal_local().external_local(), ".1 R", ["DROP", e1, "DROP"]),
        ("no external address", plain(), ".1 R L", [e1, "", ""]),
        ("C29: no external address", plain().external_local(), ".1 R; .2 R L", [e12, "", ""]),
        ("both policies Cluster", balancer(), ".1 R L; .2 R", [e12; 3]),
        ("F19", balancer().external_local(), ".1 R L; .2 R", [e12, e12, e1]),
        ("F17", balancer().internal_local(), ".1 R L; .2 R", [e1, e12, e12]),
        ("F20", balancer().internal_local().external_local(), ".1 R; .2 R L", [e2, e12, e2]),
        ("case 28, first run", balancer().external_local(), ".1 R @n1", [e1, e1, "DROP"]),
        ("case 28, second run", balancer().external_local().internal_local(), ".1 R @n1", ["DROP", e1, "DROP"]),
    ] {
        assert_eq!(verdicts(&group_of(&svc, &slices(endpoints))), [cluster, inside, outside], "{id}");
    }
}

#[test]
fn scopes_with_the_same_choice_share_one_list() {
    let group = group_of(&balancer().external_local().internal_local(), &slices(".1 R L; .2 R"));
    let [ScopePlan::Forward(cluster), ScopePlan::Forward(inside), ScopePlan::Forward(outside)] = &group.scopes else {
        panic!("{group:?}")
    };
    assert!(std::sync::Arc::ptr_eq(cluster, outside) && !std::sync::Arc::ptr_eq(cluster, inside));
    let group = group_of(&balancer().external_local(), &slices(".1 R L; .2 R L"));
    let [ScopePlan::Forward(cluster), _, ScopePlan::Forward(outside)] = &group.scopes else { panic!("{group:?}") };
    assert!(std::sync::Arc::ptr_eq(cluster, outside), "the local set is the cluster set");
}

#[test]
fn internal_traffic_policy() {
    let service = |local| {
        let svc = svc("ns/a", "172.30.1.1").port("80/TCP");
        if local { svc.internal_local() } else { svc }
    };
    for (id, local, endpoints, expected) in [
        ("FLOW-8.1", false, ".1 R L; .2 R @node1; .3 R @node2", "10.0.1.1:80 10.0.1.2:80 10.0.1.3:80"),
        ("FLOW-8.2", true, ".1 R L; .2 R @node1; .3 R @node2", "10.0.1.1:80"),
        ("FLOW-8.3", true, ".1 R L; .2 R L; .3 R @node2", "10.0.1.1:80 10.0.1.2:80"),
        ("FLOW-8.4", true, ".1 R @node0; .2 R @node1; .3 R @node2", "DROP"),
    ] {
        assert_eq!(verdicts(&group_of(&service(local), &slices(endpoints)))[0], expected, "{id}");
        assert_eq!(verdicts(&group_of(&service(local), &[]))[0], "REJECT", "{id}, slice deleted");
    }
}

#[test]
fn terminating_endpoints() {
    let all = |last: &[u8]| last.iter().map(|n| format!("10.0.1.{n}:80")).collect::<Vec<_>>().join(" ");
    // id, policy Local, endpoints, pod to ClusterIP, outside to the load-balancer address
    for (id, local, endpoints, pod, outside) in [
        ("FLOW-9a", true, ".1 R L; .2 R L; .3 ST L; .4 T L; .5 R", all(&[1, 2, 5]), all(&[1, 2])),
        ("FLOW-9a", false, ".1 R L; .2 R L; .3 ST; .4 T; .5 R", all(&[1, 2, 5]), all(&[1, 2, 5])),
        ("FLOW-9b", true, ".2 ST L; .3 ST L; .4 T L; .5 R", all(&[5]), all(&[2, 3])),
        ("FLOW-9b", false, ".2 ST L; .3 ST L; .4 T; .5 ST", all(&[2, 3, 5]), all(&[2, 3, 5])),
        ("FLOW-9c", true, ".5 ST", all(&[5]), "DROP".to_owned()),
        ("FLOW-9c", false, ".5 ST", all(&[5]), all(&[5])),
        ("FLOW-9d", true, ".5 T L; .5 T", "REJECT".to_owned(), "REJECT".to_owned()),
        ("FLOW-9d", false, ".5 T L; .5 T", "REJECT".to_owned(), "REJECT".to_owned()),
    ] {
        let service = if local { balancer().external_local() } else { balancer() };
        let [cluster, _, out] = verdicts(&group_of(&service, &slices(endpoints)));
        assert_eq!((cluster, out), (pod, outside), "{id}, Local {local}");
        assert_eq!(verdicts(&group_of(&service, &[])), ["REJECT"; 3], "{id}, Local {local}, slice deleted");
    }
}

#[test]
fn every_endpoint_is_a_backend_selectable_or_not() {
    let group = group_of(&balancer(), &slices(".3 U; .1 R L; .2 ST; .10 S; .4 T"));
    let backend = |b: &crate::plan::group::BackendPlan| {
        format!("{} local {} serving {}", std::net::IpAddr::from(b.addr), b.local, b.serving)
    };
    let backends: Vec<_> = group.backends.iter().map(backend).collect();
    assert_eq!(
        backends,
        [
            "10.0.1.1 local true serving true",
            "10.0.1.2 local false serving true",
            "10.0.1.3 local false serving false",
            "10.0.1.4 local false serving false",
            "10.0.1.10 local false serving true",
        ]
    );
    assert_eq!(verdicts(&group)[0], "10.0.1.1:80");
}

#[test]
fn hints_of_this_zone_narrow_the_cluster_set_only() {
    let node = crate::plan::group::NodeContext { zone: "zone-a".into(), ..test_node() };
    let plan =
        |svc: &Svc, endpoints| verdicts(&groups_with(svc, &slices(endpoints), &node, &PlanOptions::default())[0]);
    let endpoints = ".1 R za L; .2 R zb L; .3 R za";
    let (near, local) = ("10.0.1.1:80 10.0.1.3:80", "10.0.1.1:80 10.0.1.2:80");
    assert_eq!(plan(&balancer().external_local(), endpoints), [near, near, local], "C15");
}

#[test]
fn weights_of_slices_decide_the_shares() {
    let weighted = |name: &str, weight: &str, endpoints| {
        let slice = slice_of(name, "a").ports("80/TCP").endpoints("10.0.1", endpoints);
        if weight.is_empty() { slice } else { slice.annotation("sheave.io/weight", weight) }
    };
    for (case, first, second, expected) in [
        ("none", "", "", "10.0.1.1:80 10.0.1.2:80"),
        ("equal", "30", "30", "10.0.1.1:80 10.0.1.2:80"),
        ("one to two", "50", "", "10.0.1.1:80 10.0.1.2:80 10.0.1.2:80"),
        ("maintenance", "0", "", "10.0.1.2:80"),
        ("maintenance of all", "0", "0", "10.0.1.1:80 10.0.1.2:80"),
    ] {
        let slices = [weighted("ns/s1", first, ".1 R"), weighted("ns/s2", second, ".2 R")];
        let group = group_of(&balancer(), &slices);
        assert_eq!(verdicts(&group)[0], expected, "{case}");
        assert_eq!(group.backends.len(), 2, "{case}: kept for existing connections");
    }
    // A weight is about shares; who is ready is decided before.
    let slices = [weighted("ns/s1", "0", ".1 R"), weighted("ns/s2", "100", ".2 U")];
    assert_eq!(verdicts(&group_of(&balancer(), &slices))[0], "10.0.1.1:80");
}

#[test]
fn a_maglev_run_is_the_table() {
    let options = PlanOptions { maglev_size: maglev::Size::new(251).unwrap(), ..PlanOptions::default() };
    let annotated = balancer().annotation("sheave.io/lb-algorithm", "maglev");
    let slots = |svc: &Svc, options: &PlanOptions, endpoints| {
        let group = groups_with(svc, &slices(endpoints), &test_node(), options).remove(0);
        let ScopePlan::Forward(slots) = &group.scopes[0] else { panic!("{group:?}") };
        let targets = slots.iter().map(|slot| group.backends[*slot as usize].addr).collect::<Vec<_>>();
        (group.config.algorithm(), targets)
    };
    let (algorithm, table) = slots(&annotated, &options, ".1 R L; .2 R");
    assert_eq!((algorithm, table.len()), (Algorithm::Maglev.number(), 251));
    // An unready endpoint shifts the indexes of backends, and moves the node's place in the list: not the table.
    let (_, same) = slots(&annotated, &options, ".0 U; .2 R L; .1 R");
    assert_eq!(table, same, "F43: the table depends on who is in it only");

    let by_default = PlanOptions { algorithm: Algorithm::Maglev, ..options };
    assert_eq!(slots(&balancer(), &by_default, ".1 R").1.len(), 251);
    let random = balancer().annotation("sheave.io/lb-algorithm", "random");
    assert_eq!(slots(&random, &by_default, ".1 R").1.len(), 1, "the annotation beats the default");
}

#[test]
fn a_group_is_a_port_in_a_family() {
    let service = svc("ns/a", "172.30.0.42,fd00:172:30::42").port("dns 53/UDP").port("dns 53/TCP").port("web 80/TCP");
    let slices = [
        slice_of("ns/v4", "a").ports("dns 53/UDP, dns 5353/TCP, web 8080/TCP").endpoints("10.0.1", ".1 R"),
        slice_of("ns/v6", "a").ports("dns 53/UDP, dns 5353/TCP").endpoints("", "fd00:10:180::1 R"),
    ];
    let groups = groups_of(&service, &slices);
    let text =
        groups.iter().map(|g| format!("{:?} {}/{} {}", g.key.family, g.key.port_name, g.key.protocol, verdicts(g)[0]));
    assert_eq!(
        text.collect::<Vec<_>>(),
        [
            "V4 dns/UDP 10.0.1.1:53",
            "V4 dns/TCP 10.0.1.1:5353",
            "V4 web/TCP 10.0.1.1:8080",
            "V6 dns/UDP fd00:10:180::1:53",
            "V6 dns/TCP fd00:10:180::1:5353",
            "V6 web/TCP REJECT",
        ]
    );
    let headless = svc("ns/a", "None").port("80/TCP");
    assert_eq!(groups_of(&headless, &slices), [], "SK-1");
}
