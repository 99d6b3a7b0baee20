//! ServiceCIDRs.

use k8s_openapi::api::networking::v1 as networking;

use super::{Converted, Problems};
use crate::{
    model::ServiceCidr,
    source::{address::parse_net, intern::intern},
};

pub(super) fn convert(api: &networking::ServiceCIDR) -> Option<Converted<ServiceCidr>> {
    let name = api.metadata.name.as_deref().filter(|name| !name.is_empty())?;
    let mut problems = Problems::of(format!("ServiceCIDR {name}"));
    let mut networks = Vec::new();
    for text in api.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten()) {
        match parse_net(text) {
            Some(net) if net.prefix_len() == 0 => {
                problems.add(format_args!("the network {text:?} is every address, so it is ignored"));
            }
            Some(net) => networks.push(net),
            None => problems.add(format_args!("{text:?} is not a network, so it is ignored")),
        }
    }
    Some(Converted { value: ServiceCidr { name: intern(name), networks }, problems: problems.found })
}
