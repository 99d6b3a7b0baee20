//! What kind of address a frontend has: `KIND_…` of the map ABI, as an enum.

use sheave_ebpf::frontend::{
    KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_LOOPBACK, KIND_NODE_PORT, KIND_UNKNOWN_PORT,
};

/// The kinds, with their numbers in the maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Kind {
    /// The ClusterIP.
    ClusterIp = KIND_CLUSTER_IP,
    /// A NodePort on one of the node-port addresses.
    NodePort = KIND_NODE_PORT,
    /// An address of `status.loadBalancer.ingress`.
    LoadBalancer = KIND_LOAD_BALANCER,
    /// An address of `spec.externalIPs`.
    ExternalIp = KIND_EXTERNAL_IP,
    /// A NodePort on loopback.
    Loopback = KIND_LOOPBACK,
    /// No frontend: the entry for all ports of an address that no Service defines, or for pings of it.
    UnknownPort = KIND_UNKNOWN_PORT,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::ClusterIp, Self::NodePort, Self::LoadBalancer, Self::ExternalIp, Self::Loopback, Self::UnknownPort];

    /// What stands in the maps.
    #[must_use]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// `None` for a number that this version does not know.
    #[must_use]
    pub fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.number() == number)
    }

    /// As people are shown it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::ExternalIp => "ExternalIP",
            Self::Loopback => "Loopback",
            Self::UnknownPort => "UnknownPort",
        }
    }

    /// Whether clients outside the cluster dial such an address. Whoever may write a Service can ask for one; ClusterIPs
    /// are the API server's to give.
    #[must_use]
    pub const fn is_external(self) -> bool {
        match self {
            Self::NodePort | Self::LoadBalancer | Self::ExternalIp => true,
            Self::ClusterIp | Self::Loopback | Self::UnknownPort => false,
        }
    }
}
