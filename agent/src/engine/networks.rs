//! Which addresses are dropped silently although no Service has them: those of the networks that ClusterIPs come from,
//! except the ClusterIPs of Services that somebody else serves.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use ipnet::IpNet;

use crate::model::{Service, ServiceName, service::NoFrontend};

/// Kept up with the plan.
#[derive(Debug)]
pub(super) struct ServiceNetworks {
    left_alone: BTreeMap<ServiceName, Vec<IpAddr>>,
    /// What is wanted differs from what was written last.
    pub(super) is_dirty: bool,
}

impl ServiceNetworks {
    /// Nothing is known of what the kernel has.
    pub(super) const fn new() -> Self {
        Self { left_alone: BTreeMap::new(), is_dirty: true }
    }

    /// Looks at a Service again; `None` = it is gone.
    pub(super) fn update(&mut self, name: &ServiceName, service: Option<&Service>) {
        let others = |why: &NoFrontend| matches!(why, NoFrontend::Skipped | NoFrontend::OtherProxy);
        let left_alone = service.filter(|service| service.no_frontend.as_ref().is_some_and(others));
        let addresses = left_alone.map(|service| service.cluster_ips.clone());
        let before = match addresses.clone() {
            Some(addresses) => self.left_alone.insert(name.clone(), addresses),
            None => self.left_alone.remove(name),
        };
        self.is_dirty |= before != addresses;
    }

    /// Networks, and whether their addresses are dropped silently.
    pub(super) fn wanted(&self, configured: &[IpNet], listed: Option<BTreeSet<IpNet>>) -> BTreeMap<IpNet, bool> {
        let silent = configured.iter().copied().chain(listed.into_iter().flatten());
        let left_alone = self.left_alone.values().flatten();
        silent.map(|net| (net, true)).chain(left_alone.map(|ip| (IpNet::from(*ip), false))).collect()
    }
}
