//! Which Service ports count as having no local endpoint.

use super::no_local;
use crate::{
    model::Family,
    observe::metrics::NoLocal,
    plan::group::{NodeContext, PlanOptions, plan},
    source::convert::fixtures::{OWN, Svc, slice_of, svc},
};

#[test]
fn ports_that_a_local_policy_leaves_without_an_endpoint_are_counted() {
    let service = || svc("ns/a", "172.30.1.1").port("80/TCP np 123").kind("NodePort");
    let (internal, external) = (|| service().internal_local(), || service().external_local());
    let both = || service().internal_local().external_local();
    let (here, elsewhere) = (".1 R L; .2 R @node1; .3 R @node2", ".1 R @node0; .2 R @node1; .3 R @node2");
    let cases: [(&str, Svc, &str, [usize; 2]); 7] = [
        ("NL-1", internal(), here, [0, 0]),
        ("NL-2", external(), here, [0, 0]),
        ("NL-3", both(), here, [0, 0]),
        ("NL-4", internal(), elsewhere, [1, 0]),
        ("NL-5", external(), elsewhere, [0, 1]),
        ("NL-6", both(), elsewhere, [1, 1]),
        ("NL-7", both(), "", [0, 0]),
    ];
    for (row, service, endpoints, [internal, external]) in cases {
        let slice = slice_of("ns/s", "a").ports("80/TCP").endpoints("10.0.1", endpoints).build();
        let node = NodeContext {
            name: OWN.into(),
            node_port_addresses: vec!["192.168.0.2".parse().unwrap()],
            ..NodeContext::default()
        };
        let plans = plan(&service.build(), [&slice], &node, &PlanOptions::default());
        let counted = no_local(plans.iter());
        assert_eq!(counted[&Family::V4], NoLocal { internal, external }, "{row}");
        assert_eq!(counted[&Family::V6], NoLocal::default(), "{row}");
    }
}
