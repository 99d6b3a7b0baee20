//! What is configured: a node, its settings and its Services, and what these say of a client and of a new flow.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::traffic::Random;
use crate::packet::{SCTP, TCP, UDP};

/// Networks of the world, a /24 and a /64 each.
#[derive(Clone, Copy, Debug)]
pub enum Net {
    /// Clients outside the cluster.
    Outside,
    /// Nodes; this one is number [`NODE`].
    Nodes,
    /// ClusterIPs: a service CIDR.
    Services,
    /// Addresses of load balancers, and external ones.
    Virtual,
    /// Pods of this node.
    OwnPods,
    /// Pods of other nodes.
    OtherPods,
}

/// The number of this node.
pub const NODE: u8 = 11;
/// The number of a virtual address that the host has taken for its own, as some load balancers do.
pub const TAKEN: u8 = 12;
/// First and last port that masquerade clients: few enough to run out of, and one of them is a NodePort.
pub const PORTS: (u16, u16) = (10_000, 10_004);
/// The port of every backend.
pub const PORT: u16 = 8080;

impl Net {
    /// Its address number `n`, of IPv6 or IPv4.
    #[must_use]
    pub fn ip(self, is_v6: bool, n: u8) -> IpAddr {
        let ([a, b, c], six) = match self {
            Self::Outside => ([198, 51, 100], 0x100),
            Self::Nodes => ([192, 0, 2], 0),
            Self::Services => ([10, 96, 0], 0x96),
            Self::Virtual => ([203, 0, 113], 0x203),
            Self::OwnPods => ([10, 0, 1], 1),
            Self::OtherPods => ([10, 0, 2], 2),
        };
        if is_v6 {
            Ipv6Addr::new(0x2001, 0xdb8, six, 0, 0, 0, 0, n.into()).into()
        } else {
            Ipv4Addr::new(a, b, c, n).into()
        }
    }

    /// Whether an address is one of its own.
    #[must_use]
    pub fn contains(self, ip: IpAddr) -> bool {
        match (ip, self.ip(ip.is_ipv6(), 0)) {
            (IpAddr::V4(ip), IpAddr::V4(net)) => ip.octets()[..3] == net.octets()[..3],
            (IpAddr::V6(ip), IpAddr::V6(net)) => ip.segments()[..4] == net.segments()[..4],
            _ => false,
        }
    }
}

/// What counts for all Services.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Every client of a ClusterIP is masqueraded.
    pub masquerade_all: bool,
    /// A client from outside is not, towards a backend on this node.
    pub keep_client: bool,
    /// Only pods reach ClusterIPs.
    pub inside_only: bool,
    /// Pings of ClusterIPs are answered.
    pub answer_pings: bool,
    /// How pods are told from other clients.
    pub detection: Detection,
    /// The lower one of the two bits of the mark that are ours.
    pub mark_bit: u32,
}

/// How pods are told from other clients (DL-1 to DL-5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detection {
    /// Not at all.
    Nobody = 0,
    /// By their addresses.
    ByAddress = 1,
    /// By the device that they are behind; those of this node alone.
    ByDevice = 2,
}

/// Whose pod a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// None that we know of.
    Nobodys,
    /// Of another node.
    Others,
    /// Of this node.
    Own,
}

/// What kind of address a client dials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A ClusterIP: the internal policy counts.
    ClusterIp,
    /// A port of this node.
    NodePort,
    /// Of `status.loadBalancer`: source ranges count.
    LoadBalancer,
    /// Of `spec.externalIPs`.
    ExternalIp,
}

/// Which endpoints a client may get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Those of a ClusterIP.
    Cluster,
    /// Those of an external address, for clients of this cluster.
    Inside,
    /// The same for other clients.
    Outside,
}

/// A Service without an endpoint to give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Without {
    /// There is none at all: refused (V-1).
    Any,
    /// The policy leaves none: silence (V-2, V-3).
    Local,
}

/// Where flows may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    /// Address and port.
    pub at: SocketAddr,
    /// On this node.
    pub is_local: bool,
    /// New flows may go there.
    pub serves: bool,
}

/// A Service, one port and family of it.
#[derive(Clone, Debug)]
pub struct Service {
    /// Its protocol.
    pub proto: u8,
    /// What it answers on.
    pub frontends: Vec<(Kind, SocketAddr)>,
    /// Where flows may go.
    pub endpoints: Vec<Endpoint>,
    /// internalTrafficPolicy is Local.
    pub internal_local: bool,
    /// externalTrafficPolicy is Local.
    pub external_local: bool,
    /// Session affinity by client address.
    pub is_sticky: bool,
    /// The one client that its load balancer's address admits; all, if none.
    pub admits: Option<IpAddr>,
    /// One of `ALGORITHM_…`: any choice that it makes is right.
    pub algorithm: u8,
}

impl Service {
    fn draw(random: &mut Random, proto: u8, is_v6: bool, n: u8) -> Self {
        let frontend = |kind, net: Net, host, port| (kind, SocketAddr::new(net.ip(is_v6, host), port));
        let node_port = [30_001, PORTS.0 + 2, 30_003][usize::from(n)];
        let pool = [(Net::OwnPods, 1), (Net::OwnPods, 2), (Net::OtherPods, 1), (Net::OtherPods, 2), (Net::Nodes, NODE)];
        let mut endpoints: Vec<_> = pool
            .map(|(net, host)| Endpoint {
                at: SocketAddr::new(net.ip(is_v6, host), PORT),
                is_local: !matches!(net, Net::OtherPods),
                serves: !random.once_in(3),
            })
            .into();
        endpoints.retain(|_| random.once_in(2));
        Self {
            proto,
            frontends: vec![
                frontend(Kind::ClusterIp, Net::Services, 1 + n, PORT),
                frontend(Kind::NodePort, Net::Nodes, NODE, node_port),
                frontend(Kind::LoadBalancer, Net::Virtual, 1 + n, PORT),
                frontend(Kind::ExternalIp, Net::Virtual, TAKEN + n, PORT),
            ],
            endpoints,
            internal_local: random.once_in(3),
            external_local: random.once_in(2),
            is_sticky: random.once_in(2),
            admits: random.once_in(2).then(|| Net::Outside.ip(is_v6, 10)),
            algorithm: [0, 1, 2, 3][random.below(4)],
        }
    }

    /// The endpoints that a new flow may go to.
    ///
    /// # Errors
    /// When there is none.
    pub fn endpoints(&self, scope: Scope) -> Result<Vec<Endpoint>, Without> {
        let only_local = match scope {
            Scope::Cluster => self.internal_local,
            Scope::Inside => false,
            Scope::Outside => self.external_local,
        };
        let mut endpoints: Vec<_> = self.endpoints.iter().copied().filter(|e| e.serves).collect();
        if endpoints.is_empty() {
            return Err(Without::Any);
        }
        endpoints.retain(|e| e.is_local || !only_local);
        if endpoints.is_empty() { Err(Without::Local) } else { Ok(endpoints) }
    }

    /// Whether a backend shall see this node in place of the client (F35, F36).
    #[must_use]
    pub fn masquerades(
        &self,
        settings: &Settings,
        kind: Kind,
        client: IpAddr,
        whose: Whose,
        backend: &Endpoint,
    ) -> bool {
        let is_hairpin = backend.at.ip() == client;
        let is_wanted = match kind {
            Kind::ClusterIp => {
                settings.masquerade_all || (settings.detection != Detection::Nobody && whose == Whose::Nobodys)
            }
            Kind::NodePort | Kind::LoadBalancer | Kind::ExternalIp => {
                !(self.external_local || backend.is_local && settings.keep_client)
            }
        };
        is_hairpin || is_wanted
    }
}

/// Everything that is configured.
#[derive(Clone, Debug)]
pub struct World {
    /// What counts for all Services.
    pub settings: Settings,
    /// The Services; their places are their names.
    pub services: Vec<Service>,
    /// Pods of this node are behind the device that packets come through.
    pub is_pods_device: bool,
    /// The devices of this node's workloads have programs, so that a client can be masqueraded towards them.
    pub workload_programs: bool,
    /// Datagrams that a connected socket of this host waits for: from where, and to where.
    pub awaited: Vec<(SocketAddr, SocketAddr)>,
}

impl World {
    /// Two worlds, in which every switch is off in one and on in the other.
    pub fn draw_two(random: &mut Random) -> [Self; 2] {
        let mut flip = || random.once_in(2);
        let one = Settings {
            masquerade_all: flip(),
            keep_client: flip(),
            inside_only: flip(),
            answer_pings: flip(),
            detection: [Detection::ByAddress, Detection::ByDevice, Detection::Nobody][random.below(3)],
            mark_bit: [11, 13, 14, 30][random.below(4)],
        };
        let other = Settings {
            masquerade_all: !one.masquerade_all,
            keep_client: !one.keep_client,
            inside_only: !one.inside_only,
            answer_pings: !one.answer_pings,
            detection: [Detection::ByAddress, Detection::ByDevice][random.below(2)],
            mark_bit: [11, 13, 14, 30][random.below(4)],
        };
        [one, other].map(|settings| {
            let mut services = Vec::new();
            for is_v6 in [false, true] {
                for proto in [TCP, UDP, SCTP] {
                    services.extend((0..3).map(|n| Service::draw(random, proto, is_v6, n)));
                }
            }
            Self { settings, services, is_pods_device: false, workload_programs: true, awaited: Vec::new() }
        })
    }

    /// An endpoint begins or ceases to serve; the Service that it is of.
    pub fn turn_one(&mut self, random: &mut Random) -> usize {
        let n = random.below(self.services.len());
        let endpoints = &mut self.services[n].endpoints;
        if !endpoints.is_empty() {
            let endpoint = random.below(endpoints.len());
            endpoints[endpoint].serves ^= true;
        }
        n
    }

    /// The Service that answers there, and on which kind of address.
    #[must_use]
    pub fn frontend(&self, proto: u8, at: SocketAddr) -> Option<(usize, Kind)> {
        let of = |service: &Service| service.frontends.iter().find(|(_, a)| *a == at).map(|(kind, _)| *kind);
        let mut services = self.services.iter().enumerate().filter(|(_, service)| service.proto == proto);
        services.find_map(|(n, service)| Some((n, of(service)?)))
    }

    /// Whether any Service has this address as one of a kind.
    #[must_use]
    pub fn has(&self, ip: IpAddr, is_kind: impl Fn(Kind) -> bool) -> bool {
        self.services.iter().flat_map(|service| &service.frontends).any(|(kind, at)| at.ip() == ip && is_kind(*kind))
    }

    /// Whose pod a client is.
    #[must_use]
    pub fn whose(&self, client: IpAddr) -> Whose {
        match self.settings.detection {
            Detection::ByAddress if Net::OwnPods.contains(client) => Whose::Own,
            Detection::ByAddress if Net::OtherPods.contains(client) => Whose::Others,
            Detection::ByDevice if self.is_pods_device => Whose::Own,
            Detection::ByAddress | Detection::ByDevice | Detection::Nobody => Whose::Nobodys,
        }
    }

    /// This node's address of a family: the one that it lends to masqueraded clients.
    #[must_use]
    pub fn node(is_v6: bool) -> IpAddr {
        Net::Nodes.ip(is_v6, NODE)
    }
}
