//! Nodes.

use k8s_openapi::api::core::v1 as core;

use super::{Converted, Problems};
use crate::{
    model::Node,
    source::{
        address::{parse_ip, parse_net},
        intern::intern,
    },
};

const ZONE: &str = "topology.kubernetes.io/zone";
const GOING_AWAY: &str = "ToBeDeletedByClusterAutoscaler";

pub(super) fn convert(api: &core::Node) -> Option<Converted<Node>> {
    let meta = &api.metadata;
    let name = meta.name.as_deref().filter(|name| !name.is_empty())?;
    let mut problems = Problems::of(format!("Node {name}"));
    let spec = api.spec.as_ref();

    let listed = || api.status.iter().flat_map(|s| s.addresses.iter().flatten());
    let mut addresses = Vec::new();
    for kind in ["InternalIP", "ExternalIP"] {
        for entry in listed().filter(|a| a.type_ == kind) {
            match parse_ip(&entry.address) {
                Some(ip) if !addresses.contains(&ip) => addresses.push(ip),
                Some(_) => {}
                None => {
                    problems.add(format_args!("the {kind} {:?} is not an IP address, so it is ignored", entry.address));
                }
            }
        }
    }

    // podCIDRs begins with podCIDR; objects older than dual stack have the latter only.
    let listed = || spec.into_iter().flat_map(|s| s.pod_cidrs.iter().flatten());
    let single = || spec.into_iter().filter_map(|s| s.pod_cidr.as_ref());
    let mut pod_cidrs = Vec::new();
    for text in listed().chain(single()).filter(|t| !t.is_empty()) {
        match parse_net(text) {
            Some(net) if !pod_cidrs.contains(&net) => pod_cidrs.push(net),
            Some(_) => {}
            None => problems.add(format_args!("the pod CIDR {text:?} is not a network, so it is ignored")),
        }
    }

    let taints = || spec.into_iter().flat_map(|s| s.taints.iter().flatten());
    let value = Node {
        name: intern(name),
        addresses,
        zone: meta.labels.as_ref().and_then(|l| l.get(ZONE)).filter(|zone| !zone.is_empty()).map(|z| intern(z)),
        pod_cidrs,
        going_away: meta.deletion_timestamp.is_some() || taints().any(|taint| taint.key == GOING_AWAY),
    };
    Some(Converted { value, problems: problems.found })
}
