//! Groups: what is programmed, before anything is.

mod flows;
mod frontends;
mod verdicts;

use std::net::IpAddr;

use super::{GroupPlan, NodeContext, PlanOptions, ScopePlan, plan};
use crate::{
    model::{EndpointSlice, Service},
    source::convert::fixtures::{OWN, Slice, Svc},
};

/// The node of 7.1, with both its families.
fn test_node() -> NodeContext {
    let ips = |texts: &[&str]| -> Vec<IpAddr> { texts.iter().map(|text| text.parse().unwrap()).collect() };
    let addresses = ips(&["192.168.0.2", "192.168.1.2", "192.168.99.11", "2001:db8::1", "2001:db8:1::2"]);
    NodeContext {
        name: OWN.into(),
        zone: "".into(),
        all_addresses: addresses.iter().copied().chain(ips(&["192.168.0.3", "2001:db8::3"])).collect(),
        api_servers: ["192.168.0.3:6443", "[2001:db8::3]:6443", "203.0.113.6:443"].map(|at| at.parse().unwrap()).into(),
        addresses,
        node_port_addresses: ips(&["192.168.0.2", "2001:db8::1"]),
        pod_cidrs: ["10.0.0.0/24", "fd00:10::/64"].iter().map(|text| text.parse().unwrap()).collect(),
    }
}

fn groups_of(service: &Svc, slices: &[Slice]) -> Vec<GroupPlan> {
    groups_with(service, slices, &test_node(), &PlanOptions::default())
}

fn groups_with(service: &Svc, slices: &[Slice], node: &NodeContext, options: &PlanOptions) -> Vec<GroupPlan> {
    let service: Service = service.build();
    let slices: Vec<EndpointSlice> = slices.iter().map(Slice::build).collect();
    plan(&service, slices.iter(), node, options)
}

/// The only group of a Service with one port and one family.
fn group_of(service: &Svc, slices: &[Slice]) -> GroupPlan {
    let mut groups = groups_of(service, slices);
    assert_eq!(groups.len(), 1, "{groups:?}");
    groups.remove(0)
}

/// What the scopes Cluster, Inside and Outside do: endpoints, REJECT, DROP, or nothing where nobody dials.
fn verdicts(group: &GroupPlan) -> [String; 3] {
    [0, 1, 2].map(|scope| match &group.scopes[scope] {
        ScopePlan::Unused => String::new(),
        ScopePlan::Reject => "REJECT".to_owned(),
        ScopePlan::Drop => "DROP".to_owned(),
        ScopePlan::Forward(slots) => {
            let target = |slot: &u32| {
                let backend = &group.backends[*slot as usize];
                format!("{}:{}", IpAddr::from(backend.addr), backend.port)
            };
            slots.iter().map(target).collect::<Vec<_>>().join(" ")
        }
    })
}
