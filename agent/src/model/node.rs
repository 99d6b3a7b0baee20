//! Nodes: their addresses, pod networks and zones.

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;

/// A Node, as far as a proxy cares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Name.
    pub name: Arc<str>,
    /// InternalIP addresses first, then ExternalIP, each in the API's order; host names are left out.
    pub addresses: Vec<IpAddr>,
    /// Label `topology.kubernetes.io/zone`; empty and absent are alike.
    pub zone: Option<Arc<str>>,
    /// spec.podCIDRs.
    pub pod_cidrs: Vec<IpNet>,
    /// The cluster autoscaler's taint, or a deletionTimestamp: load balancers should drain it.
    pub going_away: bool,
}
