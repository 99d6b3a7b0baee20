//! The plan of one group: one port of one Service in one family.

use std::{
    collections::BTreeSet,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use sheave_ebpf::{
    addr::Addr,
    frontend::FrontendKey,
    service::{
        Config, FLAG_EXTERNAL_LOCAL, FLAG_HOST_ALLOWED, FLAG_PODS_ALLOWED, FLAG_PODS_BY_PACKET, FLAG_SOURCE_RANGES,
    },
};

use super::{
    frontends::{self, Frontends},
    kind::Kind,
    maglev, run,
};
use crate::model::{
    Algorithm, EndpointSlice, Family, Protocol, Service, ServiceName, ServicePort,
    endpoint::{Offers, PortEndpoint},
    topology::{Selection, categorize},
};

/// What names a group everywhere: in the plan, the reconciler, the tables and the metrics.
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
    pub all_addresses: BTreeSet<IpAddr>,
    /// Where API servers answer, those that the agent itself asks among them.
    pub api_servers: BTreeSet<SocketAddr>,
    /// Addresses on which NodePorts are served, loopback ones not included.
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

/// Where kubelets answer the API server.
pub const KUBELET: u16 = 10250;

/// What the operator chose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanOptions {
    /// For Services without an annotation.
    pub algorithm: Algorithm,
    /// Slots of a Maglev table.
    pub maglev_size: maglev::Size,
    /// Which externalIPs are served.
    pub external_ips: ExternalIps,
    /// TCP ports that no Service takes from a node: the kubelet's and our own.
    pub node_agent_ports: BTreeSet<u16>,
    /// NodePorts answer on loopback in the host's network namespace.
    pub loopback_node_ports: bool,
    /// Unknown ports of a ClusterIP are refused.
    pub refuse_unknown_ports: bool,
    /// There is a packet path, which can judge pods by their addresses where their sockets cannot say.
    pub judge_pods_by_packet: bool,
    /// Pings of virtual addresses are answered.
    pub answer_pings: bool,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            algorithm: Algorithm::Random,
            maglev_size: maglev::Size::DEFAULT,
            external_ips: ExternalIps::Allow,
            node_agent_ports: BTreeSet::from([KUBELET]),
            loopback_node_ports: true,
            refuse_unknown_ports: true,
            judge_pods_by_packet: true,
            answer_pings: false,
        }
    }
}

/// Who else answers at an address and port, so that no Service gets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeper {
    /// An API server: the agent would never learn that the Service is gone.
    ApiServer,
    /// A node's kubelet or its service proxy.
    NodeAgent,
}

impl fmt::Display for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ApiServer => "an API server answers at this address and port, so no Service gets it",
            Self::NodeAgent => "the kubelet or sheave itself answers at this port of a node, so no Service gets it",
        })
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
    /// Condition `serving`: UDP flows to it may go on.
    pub serving: bool,
}

/// What one scope does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopePlan {
    /// Nothing dials this scope.
    Unused,
    /// No endpoint anywhere: refused at once.
    Reject,
    /// Endpoints exist, but the Local policy leaves none here: dropped silently.
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
    /// Age of the Service; the older owns a contested address.
    pub created: i64,
    /// What it answers on, with the kind of each; no key twice.
    pub frontends: Vec<(FrontendKey, Kind)>,
    /// What it asks for and does not get, with the kind of each and who keeps it.
    pub kept: Vec<(FrontendKey, Kind, Keeper)>,
    /// Its endpoints by address, numerically, and port; none twice.
    pub backends: Vec<BackendPlan>,
    /// By `Scope as usize`.
    pub scopes: [ScopePlan; 3],
    /// Algorithm, affinity, flags.
    pub config: Config,
    /// Networks that LoadBalancer addresses admit, of this family, and those addresses themselves where the node may come
    /// from one; empty = everyone.
    pub source_ranges: Vec<IpNet>,
}

/// The groups of a Service, given all its slices: one for each port and family with a ClusterIP.
///
/// SCTP is planned like the rest, though packets are translated only where target port and port are equal.
#[must_use]
pub fn plan<'a>(
    service: &Service,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    node: &NodeContext,
    options: &PlanOptions,
) -> Vec<GroupPlan> {
    if service.no_frontend.is_some() {
        return Vec::new();
    }
    let offers = Offers::of(slices);
    let families = Family::ALL.into_iter().filter_map(|family| Some((family, service.cluster_ip(family)?)));
    let mut groups = Vec::new();
    for (family, cluster_ip) in families {
        for port in &service.ports {
            let endpoints = offers.endpoints(&port.name, port.protocol, family);
            groups.push(Group { service, port, family, cluster_ip, node, options }.plan(&endpoints));
        }
    }
    groups
}

/// What the plan of one group depends on, endpoints aside.
pub(super) struct Group<'a> {
    pub(super) service: &'a Service,
    pub(super) port: &'a ServicePort,
    pub(super) family: Family,
    pub(super) cluster_ip: IpAddr,
    pub(super) node: &'a NodeContext,
    pub(super) options: &'a PlanOptions,
}

impl Group<'_> {
    fn plan(&self, endpoints: &[PortEndpoint<'_>]) -> GroupPlan {
        let selection = self.selection();
        let backend = |endpoint: &PortEndpoint<'_>| BackendPlan {
            addr: endpoint.target.ip().into(),
            port: endpoint.target.port(),
            local: selection.is_local(endpoint),
            serving: endpoint.endpoint.serving,
        };
        let source_ranges = self.source_ranges();
        let Frontends { served, kept } = frontends::of(self);
        GroupPlan {
            key: GroupKey {
                service: self.service.name.clone(),
                port_name: self.port.name.clone(),
                protocol: self.port.protocol,
                family: self.family,
            },
            created: self.service.created,
            frontends: served,
            kept,
            backends: endpoints.iter().map(backend).collect(),
            scopes: self.scopes(endpoints, selection),
            config: self.config(&source_ranges),
            source_ranges,
        }
    }

    fn selection(&self) -> Selection<'_> {
        let accessible = self.port.node_port != 0
            || self.load_balancer_ips().next().is_some()
            || self.external_ips().next().is_some();
        Selection {
            internal_local: self.service.internal_local,
            external_local: self.service.external_local,
            externally_accessible: accessible,
            node: &self.node.name,
            zone: &self.node.zone,
        }
    }

    /// Which set each scope uses, and what an empty one means.
    fn scopes(&self, endpoints: &[PortEndpoint<'_>], selection: Selection<'_>) -> [ScopePlan; 3] {
        let categories = categorize(endpoints, selection);
        let scope = |set: &Option<Vec<usize>>| match set.as_deref() {
            _ if !categories.has_any => ScopePlan::Reject,
            None | Some([]) => ScopePlan::Drop,
            Some(set) => ScopePlan::Forward(self.slots(endpoints, set)),
        };
        let cluster = scope(&categories.cluster);
        let local = if categories.local == categories.cluster { cluster.clone() } else { scope(&categories.local) };

        let by_policy = |policy_is_local: bool| if policy_is_local { local.clone() } else { cluster.clone() };
        let internal = by_policy(selection.internal_local);
        if !selection.externally_accessible {
            return [internal, ScopePlan::Unused, ScopePlan::Unused];
        }
        // Inside clients are short-circuited to the cluster set, whatever the policies.
        [internal, cluster.clone(), by_policy(selection.external_local)]
    }

    fn slots(&self, endpoints: &[PortEndpoint<'_>], set: &[usize]) -> Arc<[u32]> {
        let weights = run::weights(set.iter().map(|i| endpoints[*i].weight));
        let members = set.iter().zip(weights).filter(|(_, weight)| *weight > 0);
        if self.algorithm() == Algorithm::Maglev {
            let members: Vec<_> = members
                .map(|(&i, weight)| maglev::Member { id: i as u32, target: endpoints[i].target, weight })
                .collect();
            maglev::fill(&members, self.options.maglev_size).into()
        } else {
            members.flat_map(|(&i, weight)| std::iter::repeat_n(i as u32, weight as usize)).collect()
        }
    }

    fn algorithm(&self) -> Algorithm {
        self.service.algorithm.unwrap_or(self.options.algorithm)
    }

    /// Of this family; empty where no load-balancer address could use them. Where they admit the node, they admit these
    /// addresses as well: the node may carry one, and its packets to it then come from it (F22).
    fn source_ranges(&self) -> Vec<IpNet> {
        if self.load_balancer_ips().next().is_none() {
            return Vec::new();
        }
        let of_family = |range: &&IpNet| Family::of(range.addr()) == self.family;
        let mut ranges: Vec<_> = self.service.source_ranges.iter().filter(of_family).copied().collect();
        if self.admits_the_node(&ranges) {
            let is_new = |ip: &IpAddr| !ranges.iter().any(|range| range.contains(ip));
            let own: Vec<_> = self.load_balancer_ips().filter(is_new).map(IpNet::from).collect();
            ranges.extend(own);
        }
        ranges
    }

    fn admits_the_node(&self, ranges: &[IpNet]) -> bool {
        self.node.addresses.iter().any(|ip| ranges.iter().any(|range| range.contains(ip)))
    }

    fn config(&self, source_ranges: &[IpNet]) -> Config {
        let mut flags = if self.service.external_local { FLAG_EXTERNAL_LOCAL } else { 0 };
        if !source_ranges.is_empty() {
            flags |= FLAG_SOURCE_RANGES;
            if self.admits_the_node(source_ranges) {
                flags |= FLAG_HOST_ALLOWED; // for sockets that have no address yet
            }
            flags |= self.pods(source_ranges);
        }
        Config::new(self.algorithm().number(), flags, self.service.affinity.unwrap_or(0))
    }

    /// A socket has no address yet when it connects, so its pod's is judged by the node's pod CIDRs: all are within the
    /// ranges, or none is. Else the sockets are left alone, and their packets judged.
    fn pods(&self, source_ranges: &[IpNet]) -> u32 {
        let merged = IpNet::aggregate(&source_ranges.to_vec());
        let cidrs = self.node.pod_cidrs.iter().filter(|net| Family::of(net.addr()) == self.family);
        let cidrs: Vec<_> = cidrs.collect();
        let within = |cidr: &IpNet| merged.iter().any(|range| range.contains(cidr));
        let apart = |cidr: &IpNet| !merged.iter().any(|range| range.contains(cidr) || cidr.contains(range));
        match cidrs.as_slice() {
            [_, ..] if cidrs.iter().all(|cidr| within(cidr)) => FLAG_PODS_ALLOWED,
            [_, ..] if cidrs.iter().all(|cidr| apart(cidr)) => 0,
            _ if self.options.judge_pods_by_packet => FLAG_PODS_BY_PACKET,
            _ => 0,
        }
    }

    pub(super) fn load_balancer_ips(&self) -> impl Iterator<Item = IpAddr> {
        self.service.load_balancer_ips.iter().copied().filter(|ip| Family::of(*ip) == self.family)
    }

    /// Those that the operator lets Services claim.
    pub(super) fn external_ips(&self) -> impl Iterator<Item = IpAddr> {
        let allowed = |ip: &IpAddr| match &self.options.external_ips {
            ExternalIps::Allow => true,
            ExternalIps::Deny => false,
            ExternalIps::Within(nets) => nets.iter().any(|net| net.contains(ip)),
        };
        self.service.external_ips.iter().copied().filter(move |ip| Family::of(*ip) == self.family && allowed(ip))
    }
}

#[cfg(test)]
mod tests;
