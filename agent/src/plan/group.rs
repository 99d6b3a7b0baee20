//! The plan of one group: one port of one Service in one family (`semantics.md` 2.1).

use std::{net::IpAddr, sync::Arc};

use ipnet::IpNet;
use sheave_ebpf::{addr::Addr, frontend::FrontendKey, service::Config};

use crate::model::{Algorithm, Family, Protocol, ServiceName};

/// The key of everything (`semantics.md` 2.1).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupKey {
    /// Service.
    pub service: ServiceName,
    /// Name of the port, possibly empty.
    pub port_name: Arc<str>,
    /// Protocol.
    pub protocol: Protocol,
    /// Family.
    pub family: Family,
}

/// What of this node the plan depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeContext {
    /// Name; empty = unknown, nothing is local.
    pub name: Arc<str>,
    /// Zone; empty = none.
    pub zone: Arc<str>,
    /// This node's own addresses: of its Node object.
    pub addresses: Vec<IpAddr>,
    /// Addresses of every Node, this one included: never a virtual address of whose unknown ports we would refuse.
    pub all_addresses: Vec<IpAddr>,
    /// Addresses on which NodePorts are served (`semantics.md` 12.5), loopback ones not included.
    pub node_port_addresses: Vec<IpAddr>,
    /// This node's pod CIDRs.
    pub pod_cidrs: Vec<IpNet>,
}

/// Which externalIPs are served (CVE-2020-8554).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExternalIps {
    /// All, as kube-proxy does.
    #[default]
    Allow,
    /// None.
    Deny,
    /// Those inside one of these networks.
    Within(Vec<IpNet>),
}

/// What the operator chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// For Services without an annotation.
    pub algorithm: Algorithm,
    /// Slots of a Maglev table; a prime.
    pub maglev_size: u32,
    /// Which externalIPs are served.
    pub external_ips: ExternalIps,
    /// NodePorts answer on loopback in the host's network namespace.
    pub loopback_node_ports: bool,
    /// Unknown ports of a ClusterIP are refused (V-4).
    pub refuse_unknown_ports: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Random,
            maglev_size: 16_381,
            external_ips: ExternalIps::Allow,
            loopback_node_ports: true,
            refuse_unknown_ports: true,
        }
    }
}

/// One endpoint in any slice of the group, selectable or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendPlan {
    /// Address.
    pub addr: Addr,
    /// Target port, host order.
    pub port: u16,
    /// Runs on this node.
    pub local: bool,
    /// Condition `serving`: UDP flows to it may go on (`semantics.md` 10.1).
    pub serving: bool,
}

/// What one scope does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopePlan {
    /// Nothing dials this scope.
    Unused,
    /// V-1.
    Reject,
    /// V-2, V-3.
    Drop,
    /// Into these slots: indexes into [`GroupPlan::backends`], never empty, repeated by weight. With Maglev the order
    /// is the table's; otherwise it has no meaning. Scopes with the same choice share one list.
    Forward(Arc<[u32]>),
}

/// Everything the kernel must know of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlan {
    /// Who it is.
    pub key: GroupKey,
    /// Age of the Service; the older owns a contested address (`semantics.md` 14.5).
    pub created: i64,
    /// What it answers on, with the `KIND_…` of each; no key twice.
    pub frontends: Vec<(FrontendKey, u32)>,
    /// Its endpoints, sorted, no address and port twice.
    pub backends: Vec<BackendPlan>,
    /// By `Scope as usize`.
    pub scopes: [ScopePlan; 3],
    /// Algorithm, affinity, flags.
    pub config: Config,
    /// Networks that LoadBalancer addresses admit, of this family; empty = everyone.
    pub source_ranges: Vec<IpNet>,
}
