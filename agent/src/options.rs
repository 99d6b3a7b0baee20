//! What the operator chose, validated. Knows nothing of flags: [`cli`](crate::cli) fills it in, tests construct it.

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use ipnet::IpNet;

use crate::{
    config::Effective,
    datapath::{Limits, host::conntrack_sysctls::ConntrackSysctls, programs::load::PacketSwitches},
    model::ServiceName,
    plan::{group::PlanOptions, node_ports::NodePortAddresses},
};

/// Everything [`run`](crate::run::run) needs to know.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// Where objects come from.
    pub source: SourceOptions,
    /// This node's name, never empty.
    pub node_name: String,
    /// Where the agent keeps its files on the host.
    pub paths: HostPaths,
    /// Root of the cgroup v2 tree whose sockets are translated; `None` = found from the mounts.
    pub cgroup_root: Option<PathBuf>,
    /// Address of `/healthz`, `/livez` and `/readyz`; `None` = not served.
    pub healthz_bind_address: Option<SocketAddr>,
    /// Address of `/metrics`; `None` = not served.
    pub metrics_bind_address: Option<SocketAddr>,
    /// At most so many Services, and so many backends, have a metric of their own.
    pub max_metrics_series: usize,
    /// Every value and where it came from, for `/configz`.
    pub effective: Vec<Effective>,
    /// Sizes of the kernel maps.
    pub limits: Limits,
    /// What the plan depends on.
    pub plan: PlanOptions,
    /// On which of the node's addresses NodePorts answer.
    pub node_port_addresses: NodePortAddresses,
    /// Networks that ClusterIPs come from; an address in them that no Service has is dropped
    /// silently. ServiceCIDR objects add to them.
    pub service_cidrs: Vec<IpNet>,
    /// Services that are left alone.
    pub skip_services: BTreeSet<ServiceName>,
    /// Only sockets of the host's network namespace are translated.
    pub host_sockets_only: bool,
    /// Processes on this node may not bind to a NodePort.
    pub bind_protection: bool,
    /// TCP connections to a removed backend are closed, not only UDP sockets.
    pub close_tcp: bool,
    /// The packet path.
    pub packets: PacketOptions,
    /// What is set of netfilter's connection tracking; `None` = nothing.
    pub conntrack: Option<ConntrackSysctls>,
}

/// The packet path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PacketOptions {
    /// Whether there is one.
    pub enabled: bool,
    /// Devices that clients outside the node come through; empty = chosen by what they are.
    pub devices: Vec<String>,
    /// Packets of this node's workloads are translated too.
    pub from_pods: FromPods,
    /// How programs are put on devices.
    pub attach: TcAttach,
    /// What the programs must know.
    pub switches: PacketSwitches,
    /// Which sources are pods.
    pub detection: PodDetection,
}

/// When packets of this node's workloads are translated, and not only those of clients outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromPods {
    /// While there is an SCTP Service: the kernel has no hook for such sockets.
    Sctp,
    /// Always: for pods whose sockets the host's kernel does not see, or does not translate.
    Always,
    /// Never.
    Never,
}

/// How programs are put on devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcAttach {
    /// By tcx where the kernel has it (Linux 6.6), else as filters of clsact.
    Auto,
    /// As filters of clsact, for tools that know nothing else.
    Clsact,
}

/// Which sources are pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodDetection {
    /// Those in the pod CIDRs of all Nodes.
    AllNodes,
    /// Those in the pod CIDRs of this Node.
    ThisNode,
    /// Those in these networks.
    Within(BTreeSet<IpNet>),
    /// Those that come through this bridge.
    Bridge(String),
    /// Those that come through a device whose name has this prefix.
    Prefix(String),
    /// None.
    Never,
}

impl PodDetection {
    /// Whether all that comes through a device of that name is pods'.
    #[must_use]
    pub fn is_of_pods(&self, device: &str) -> bool {
        match self {
            Self::Bridge(name) => device == name,
            Self::Prefix(prefix) => device.starts_with(prefix.as_str()),
            Self::AllNodes | Self::ThisNode | Self::Within(_) | Self::Never => false,
        }
    }
}

/// Where objects come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceOptions {
    /// A watched directory of YAML manifests.
    Manifests(PathBuf),
    /// A Kubernetes API server.
    Kubernetes {
        /// Credentials and address; `None` = the pod's service account.
        kubeconfig: Option<PathBuf>,
        /// Addresses that replace the kubeconfig's, tried in order; empty = the kubeconfig's.
        api_servers: Vec<http::Uri>,
    },
}

/// Where the agent keeps its files on the host. Two agents with different ones are two nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPaths {
    /// A mounted BPF filesystem, or a directory in one.
    pub bpffs: PathBuf,
    /// Directory of the API socket and the lock.
    pub run_dir: PathBuf,
}

impl HostPaths {
    /// Default of `bpffs`.
    pub const DEFAULT_BPFFS: &str = "/sys/fs/bpf";
    /// Default of `run_dir`.
    pub const DEFAULT_RUN_DIR: &str = "/run/sheave";

    /// The unix socket that `svc` and `status` ask.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("agent.sock")
    }

    /// The file that a running agent holds locked.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.run_dir.join("lock")
    }
}

impl Default for HostPaths {
    fn default() -> Self {
        Self { bpffs: Path::new(Self::DEFAULT_BPFFS).to_owned(), run_dir: Path::new(Self::DEFAULT_RUN_DIR).to_owned() }
    }
}
