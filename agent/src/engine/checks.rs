//! Which healthCheckNodePorts this node serves, kept up with the plan.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::EngineOptions;
use crate::{
    model::{Family, ServiceName, State, endpoint::local_ready},
    observe::health_check::{HealthCheck, HealthChecks},
};

/// What is wanted, and whether that is news.
#[derive(Debug, Default)]
pub(super) struct Checks {
    wanted: HealthChecks,
    changed: bool,
}

impl Checks {
    /// Looks at a Service again.
    pub(super) fn update(&mut self, name: &ServiceName, state: &State, node: &str) {
        let service = state.service(name).filter(|s| s.health_check_node_port != 0 && s.no_frontend.is_none());
        let check = service.map(|service| HealthCheck {
            port: service.health_check_node_port,
            local_ready: local_ready(state.slices(name), node).len(),
        });
        let before = match check {
            Some(check) => self.wanted.services.insert(name.clone(), check),
            None => self.wanted.services.remove(name),
        };
        self.changed |= before != check;
    }

    /// Looks at the node-port addresses again.
    pub(super) fn set_addresses(&mut self, options: &EngineOptions, own: &[IpAddr], interfaces: &[IpAddr]) {
        let of_family = |family: Family| {
            let served = options.node_ports.of_family(family, own, interfaces);
            let any = match family {
                Family::V4 => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                Family::V6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            };
            // A host without any address of a family may have no such sockets.
            let match_all = served.match_all && !served.addresses.is_empty();
            if match_all { vec![any] } else { served.addresses }
        };
        let addresses: Vec<IpAddr> = Family::ALL.into_iter().flat_map(of_family).collect();
        self.changed |= self.wanted.addresses != addresses;
        self.wanted.addresses = addresses;
    }

    /// What is wanted, if that has changed since the last call.
    pub(super) fn take(&mut self) -> Option<HealthChecks> {
        std::mem::take(&mut self.changed).then(|| self.wanted.clone())
    }
}
