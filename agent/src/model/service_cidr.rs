//! Networks that ClusterIPs come from.

use std::sync::Arc;

use ipnet::IpNet;

/// A ServiceCIDR.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceCidr {
    /// Name.
    pub name: Arc<str>,
    /// One network of each family at most.
    pub networks: Vec<IpNet>,
}
