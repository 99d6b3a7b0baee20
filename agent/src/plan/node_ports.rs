//! On which addresses of the node NodePorts are served.

use std::{net::IpAddr, str::FromStr};

use ipnet::IpNet;

use crate::model::Family;

/// What the operator asked for: keywords and networks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePortAddresses {
    /// The node's first address of each family, as Kubernetes knows it.
    pub primary: bool,
    /// Every address of the host.
    pub all: bool,
    /// Loopback.
    pub localhost: bool,
    /// Addresses in these networks.
    pub networks: Vec<IpNet>,
}

impl NodePortAddresses {
    /// `primary`, as in kube-proxy's nftables mode: a NodePort is not offered to networks that nobody thought of.
    #[must_use]
    pub fn primary() -> Self {
        Self { primary: true, ..Self::default() }
    }

    /// What is served in one family. `own` are the addresses of this Node's object, `interfaces` those of the host. One
    /// that is of one link only, as each pod's device has, is served if it is the node's primary or its network is named.
    #[must_use]
    pub fn of_family(&self, family: Family, own: &[IpAddr], interfaces: &[IpAddr]) -> Served {
        let of_family = |ip: &&IpAddr| Family::of(**ip) == family;
        let networks: Vec<IpNet> = self.networks(family);
        let asked = self.primary || self.localhost || !networks.is_empty();
        let match_all = self.all || networks.iter().any(|net| net.prefix_len() == 0) || !asked;
        let primary = own.iter().find(of_family).filter(|_| self.primary);
        let wanted = |ip: &IpAddr| {
            let is_named = networks.iter().any(|net| net.prefix_len() > 0 && net.contains(ip));
            let is_any = match_all && !is_link_local(*ip);
            primary == Some(ip) || is_named || is_any || (self.localhost && ip.is_loopback())
        };
        let mut addresses: Vec<IpAddr> = Vec::new();
        for ip in interfaces.iter().filter(of_family).copied().filter(wanted) {
            if !addresses.contains(&ip) {
                addresses.push(ip);
            }
        }
        Served { match_all, addresses }
    }

    /// Whether IPv4 loopback is among what was asked for.
    #[must_use]
    pub fn includes_v4_loopback(&self) -> bool {
        let networks = self.networks(Family::V4);
        let asked = self.primary || !networks.is_empty();
        let overlaps = |net: &IpNet| net.addr().is_loopback() || net.contains(&IpAddr::from([127, 0, 0, 0]));
        self.all || self.localhost || !asked || networks.iter().any(overlaps)
    }

    fn networks(&self, family: Family) -> Vec<IpNet> {
        self.networks.iter().filter(|net| Family::of(net.addr()) == family).copied().collect()
    }
}

/// The addresses that serve NodePorts in one family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// Every address of the host, those that are still to come included.
    pub match_all: bool,
    /// Those there are now, loopback included where it was asked for, in the order of the interfaces.
    pub addresses: Vec<IpAddr>,
}

impl FromStr for NodePortAddresses {
    type Err = String;

    /// A comma-separated list of `primary`, `all`, `localhost` and networks; an empty one asks for every address.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut spec = Self::default();
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            match entry {
                "primary" => spec.primary = true,
                "all" => spec.all = true,
                "localhost" => spec.localhost = true,
                network => spec.networks.push(network.parse::<IpNet>().map(|net| net.trunc()).map_err(|_| {
                    format!("{network:?} is neither primary, all, localhost nor a network such as 192.0.2.0/24")
                })?),
            }
        }
        Ok(spec)
    }
}

/// Of one link only: it says nothing without a device.
#[must_use]
pub const fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests;
