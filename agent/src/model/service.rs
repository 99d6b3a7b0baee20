//! A Service, as far as a proxy cares.

use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

use ipnet::IpNet;
use sheave_ebpf::{proto, service};

/// Namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceName {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

impl ServiceName {
    /// `namespace/name`.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// IP family; the logic of a Service exists once per family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    #[must_use]
    pub const fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

/// Transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// The IANA number, as in the map ABI.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Tcp => proto::TCP,
            Self::Udp => proto::UDP,
            Self::Sctp => proto::SCTP,
        }
    }

    /// The API's spelling.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// `spec.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceType {
    /// ClusterIP, headless ones included.
    ClusterIp,
    /// NodePort.
    NodePort,
    /// LoadBalancer.
    LoadBalancer,
    /// ExternalName.
    ExternalName,
}

impl ServiceType {
    /// The API's spelling.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ClusterIp => "ClusterIP",
            Self::NodePort => "NodePort",
            Self::LoadBalancer => "LoadBalancer",
            Self::ExternalName => "ExternalName",
        }
    }
}

/// How a backend is chosen for a new connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Algorithm {
    /// Uniformly at random.
    #[default]
    Random,
    /// In turn.
    RoundRobin,
    /// The less loaded of two random choices.
    LeastConnections,
    /// Consistent hashing.
    Maglev,
}

impl Algorithm {
    /// The spelling in annotations, flags and output, by `ALGORITHM_…` number.
    pub const NAMES: [&str; 4] = ["random", "round-robin", "least-connections", "maglev"];

    /// By its spelling.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let all = [Self::Random, Self::RoundRobin, Self::LeastConnections, Self::Maglev];
        all.into_iter().find(|algorithm| algorithm.name() == text)
    }

    /// Its spelling.
    #[must_use]
    pub const fn name(self) -> &'static str {
        Self::NAMES[self.number() as usize]
    }

    /// The number in the map ABI.
    #[must_use]
    pub const fn number(self) -> u8 {
        match self {
            Self::Random => service::ALGORITHM_RANDOM,
            Self::RoundRobin => service::ALGORITHM_ROUND_ROBIN,
            Self::LeastConnections => service::ALGORITHM_LEAST_CONNECTIONS,
            Self::Maglev => service::ALGORITHM_MAGLEV,
        }
    }
}

/// Why a Service has no frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoFrontend {
    /// `clusterIP: None`.
    Headless,
    /// No ClusterIP yet.
    NoClusterIp,
    /// Type ExternalName.
    ExternalName,
    /// Label `service.kubernetes.io/service-proxy-name`.
    OtherProxy,
    /// The annotation or flag that tells sheave to leave it alone.
    Skipped,
    /// The object is malformed; says how.
    Invalid(Box<str>),
}

impl fmt::Display for NoFrontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Headless => f.write_str("headless"),
            Self::NoClusterIp => f.write_str("no cluster IP"),
            Self::ExternalName => f.write_str("external name"),
            Self::OtherProxy => f.write_str("handled by another proxy"),
            Self::Skipped => f.write_str("left alone on request"),
            Self::Invalid(why) => write!(f, "invalid: {why}"),
        }
    }
}

/// One entry of `spec.ports`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort {
    /// Name; empty for the only port.
    pub name: Arc<str>,
    /// Protocol.
    pub protocol: Protocol,
    /// Port, 1–65535.
    pub port: u16,
    /// NodePort; 0 = none.
    pub node_port: u16,
}

/// A Service whose fields have been checked and normalised. Address lists hold both families, in the API's order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Who it is.
    pub name: ServiceName,
    /// creationTimestamp in Unix seconds; `i64::MAX` where it is missing, so that such an object counts as youngest.
    pub created: i64,
    /// `spec.type`.
    pub kind: ServiceType,
    /// Set when it has no frontend; everything below is then for display only.
    pub no_frontend: Option<NoFrontend>,
    /// At most one address a family; empty for headless ones.
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`.
    pub external_ips: Vec<IpAddr>,
    /// `status.loadBalancer.ingress[].ip` with ipMode VIP.
    pub load_balancer_ips: Vec<IpAddr>,
    /// loadBalancerSourceRanges of both families; a family without any range admits everyone.
    pub source_ranges: Vec<IpNet>,
    /// internalTrafficPolicy is Local.
    pub internal_local: bool,
    /// externalTrafficPolicy is Local and the type makes it count.
    pub external_local: bool,
    /// Session affinity by client IP: timeout in seconds.
    pub affinity: Option<u32>,
    /// healthCheckNodePort; 0 = none.
    pub health_check_node_port: u16,
    /// Its ports.
    pub ports: Vec<ServicePort>,
    /// From the annotation `sheave.io/lb-algorithm`; `None` = the agent's default.
    pub algorithm: Option<Algorithm>,
    /// Labels, for `svc list -l`.
    pub labels: BTreeMap<Box<str>, Box<str>>,
}

impl Service {
    /// The ClusterIP of a family.
    #[must_use]
    pub fn cluster_ip(&self, family: Family) -> Option<IpAddr> {
        self.cluster_ips.iter().copied().find(|ip| Family::of(*ip) == family)
    }
}
