//! `sheave agent`: its flags, and how they become [`AgentOptions`].

pub mod layers;

use std::{
    any::TypeId,
    ffi::OsString,
    fs,
    net::{AddrParseError, IpAddr, SocketAddr},
    path::PathBuf,
};

use anyhow::{Context as _, ensure};
use clap::{Arg, ArgAction::Set, Args, ValueEnum, builder::RangedU64ValueParser};
use ipnet::IpNet;

use layers::{KubeProxyFlags, Resolved};

use super::{conntrack::ConntrackArgs, host::HostArgs, packets::PacketArgs};
use crate::{
    datapath::Limits,
    exit::{self, Refused},
    logging::{self, LogFormat},
    model::{Algorithm, ServiceName},
    options::{AgentOptions, FromPods, SourceOptions},
    plan::{
        group::{ExternalIps, KUBELET, PlanOptions},
        maglev,
        node_ports::NodePortAddresses,
    },
    run,
};

const EXAMPLES: &str = "\
Examples:
  # On a node of a cluster, with the pod's service account
  sheave agent --node-name node-1

  # With the API server's own address: its ClusterIP works only once sheave does
  sheave agent --kubeconfig /etc/kubernetes/kubelet.conf --api-server https://192.0.2.1:6443

  # Without a cluster: Services, EndpointSlices and Nodes from YAML files, reread when they change
  sheave agent --manifests ./manifests --node-name n1

  # A second node on the same host, for tests
  sheave agent --manifests ./manifests --node-name n2 --run-dir /run/n2 --bpffs /mnt/n2 --cgroup-root /sys/fs/cgroup/n2";

/// Flags of `sheave agent`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES, mut_args = switch)]
pub struct AgentArgs {
    /// kube-proxy's KubeProxyConfiguration, or a file as printed by --print-config; flags take precedence
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    config: Option<PathBuf>,
    /// Print the resulting configuration and where each value comes from, then exit. Understands kube-proxy's flags too
    #[arg(long, help_heading = "Configuration")]
    print_config: bool,
    #[command(flatten)]
    kube_proxy: KubeProxyFlags,

    /// Read Services, EndpointSlices and Nodes from the YAML files in this directory instead of a cluster
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kubeconfig", "api_servers"], help_heading = "Source")]
    manifests: Option<PathBuf>,
    /// Credentials and address of the API server [default: the pod's service account]
    #[arg(long, value_name = "FILE", help_heading = "Source")]
    kubeconfig: Option<PathBuf>,
    /// Address of the API server, overriding the kubeconfig's; several are tried in order
    #[arg(long = "api-server", value_name = "URL", value_delimiter = ',', value_parser = api_server, help_heading = "Source")]
    api_servers: Vec<http::Uri>,
    /// Name of this node's Node object [default: the host name in lower case]
    #[arg(long, value_name = "NAME", env = "NODE_NAME", help_heading = "Source")]
    node_name: Option<String>,
    /// Services to ignore, because something else serves them
    #[arg(long, value_name = "NAMESPACE/NAME", value_delimiter = ',', value_parser = service_name, help_heading = "Source")]
    skip_services: Vec<ServiceName>,

    #[command(flatten)]
    host: HostArgs,
    /// Root of the cgroup v2 tree whose sockets are translated [default: found in /proc/self/mountinfo]
    #[arg(long, value_name = "DIR", env = "SHEAVE_CGROUP_ROOT", help_heading = "Host")]
    cgroup_root: Option<PathBuf>,
    /// Where to serve /healthz, /livez and /readyz; "" turns it off
    #[arg(long, value_name = "ADDRESS[:PORT]", default_value = "0.0.0.0:10256", help_heading = "Host")]
    healthz_bind_address: String,
    /// Where to serve /metrics; "" turns it off
    #[arg(long, value_name = "ADDRESS[:PORT]", default_value = "127.0.0.1:10249", help_heading = "Host")]
    metrics_bind_address: String,
    /// How many Services, and how many backends, get a series of live connections in /metrics; the busiest come first
    #[arg(long, value_name = "N", default_value_t = 1000, help_heading = "Host")]
    max_metrics_series: usize,

    /// How backends are chosen, unless a Service's annotation sheave.io/lb-algorithm says otherwise
    #[arg(long, value_enum, value_name = "NAME", default_value_t = AlgorithmArg::Random, help_heading = "Services")]
    lb_algorithm: AlgorithmArg,
    /// Slots in a Maglev table: a prime, ideally a hundred times the largest number of endpoints
    #[arg(long, value_name = "PRIME", default_value = "16381", help_heading = "Services")]
    maglev_table_size: maglev::Size,
    /// Node addresses on which NodePorts answer: primary (those in the Node object), all, localhost, or
    /// those inside the given networks
    #[arg(long, value_name = "WHICH,…|CIDR,…", default_value = "primary", help_heading = "Services")]
    nodeport_addresses: NodePortAddresses,
    /// Serve spec.externalIPs; false protects against CVE-2020-8554
    #[arg(long, action = Set, default_value_t = true, help_heading = "Services")]
    allow_service_external_ips: bool,
    /// Serve only externalIPs inside these networks
    #[arg(long, value_name = "CIDR", value_delimiter = ',', help_heading = "Services")]
    external_ip_cidrs: Vec<IpNet>,
    /// Refuse connections to ports of a ClusterIP that its Service does not define and, from outside, to such ports of load
    /// balancers' and external addresses that no node has
    #[arg(long, action = Set, default_value_t = true, help_heading = "Services")]
    refuse_unknown_ports: bool,
    /// Networks that ClusterIPs come from, besides the cluster's ServiceCIDRs: connections to addresses in them that
    /// belong to no Service are dropped instead of leaving the node
    #[arg(long, value_name = "CIDR", value_delimiter = ',', help_heading = "Services")]
    service_cidrs: Vec<IpNet>,
    /// Let NodePorts answer on 127.0.0.1 and ::1, for processes in the host's network namespace
    #[arg(long, action = Set, default_value_t = true, help_heading = "Services")]
    loopback_nodeports: bool,

    /// Translate only sockets in the host's network namespace: for meshes and VMs that need to see the Service's
    /// address
    #[arg(long, action = Set, default_value_t = false, help_heading = "Sockets")]
    host_sockets_only: bool,
    /// Keep processes on this node from binding to a NodePort
    #[arg(long, action = Set, default_value_t = true, help_heading = "Sockets")]
    bind_protection: bool,
    /// Close TCP connections to a removed backend as well, not only UDP sockets
    #[arg(long, action = Set, default_value_t = false, help_heading = "Sockets")]
    close_tcp: bool,

    #[command(flatten)]
    packets: PacketArgs,
    #[command(flatten)]
    conntrack: ConntrackArgs,
    #[command(flatten)]
    limits: LimitArgs,

    /// Format of log lines
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormatArg::Text, env = "SHEAVE_LOG_FORMAT",
          help_heading = "Logging")]
    log_format: LogFormatArg,
    /// What is logged: trace, debug, info, warn, error, or directives such as info,sheave_agent::source=debug
    #[arg(long, value_name = "LEVEL", default_value = "info", env = "SHEAVE_LOG_LEVEL", help_heading = "Logging")]
    log_level: logging::Level,
}

/// Sizes of maps; each is named by the error and the metric of a full map.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits (entries in kernel maps, fixed when the maps are created)")]
struct LimitArgs {
    /// Addresses and ports that Services answer on
    #[arg(long, value_name = "N", default_value_t = Limits::default().frontends, value_parser = limit())]
    max_frontends: u32,
    /// Backends of all Services together
    #[arg(long, value_name = "N", default_value_t = Limits::default().backends, value_parser = limit())]
    max_backends: u32,
    /// Slots of all backend tables together
    #[arg(long, value_name = "N", default_value_t = Limits::default().slots, value_parser = limit())]
    max_table_slots: u32,
    /// Clients remembered for session affinity
    #[arg(long, value_name = "N", default_value_t = Limits::default().affinity, value_parser = limit())]
    max_affinity: u32,
    /// Peers that unconnected UDP sockets talk to
    #[arg(long, value_name = "N", default_value_t = Limits::default().peers, value_parser = limit())]
    max_peers: u32,
    /// Networks in all loadBalancerSourceRanges together
    #[arg(long, value_name = "N", default_value_t = Limits::default().source_ranges, value_parser = limit())]
    max_source_ranges: u32,
    /// Entries for flows on the packet path: two per flow, or four if its client is masqueraded
    #[arg(long, value_name = "N", default_value_t = Limits::default().conntrack, value_parser = limit())]
    max_conntrack: u32,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AlgorithmArg {
    Random,
    RoundRobin,
    LeastConnections,
    Maglev,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum LogFormatArg {
    Text,
    Json,
}

impl AgentArgs {
    /// Starts logging and runs the agent until it is told to stop. `line` is the whole command line.
    pub fn run(line: &[OsString]) -> anyhow::Result<()> {
        let Resolved { args, values, remarks } = layers::resolve(line).map_err(|e| Refused::because(&e))?;
        if args.print_config {
            remarks.iter().for_each(|remark| exit::note(format_args!("note: {remark}")));
            return exit::print(layers::print(&values));
        }
        let format = match args.log_format {
            LogFormatArg::Text => LogFormat::Text,
            LogFormatArg::Json => LogFormat::Json,
        };
        logging::start(format, &args.log_level);
        for remark in remarks {
            tracing::warn!("{remark}");
        }
        let options = args.into_options().map_err(|e| Refused::because(&e))?;
        run::run(AgentOptions { effective: values, ..options })
    }

    /// The options, checked as far as that needs more than one flag or the host's name.
    pub fn into_options(self) -> anyhow::Result<AgentOptions> {
        let external_ips = match (self.allow_service_external_ips, self.external_ip_cidrs) {
            (false, _) => ExternalIps::Deny,
            (true, cidrs) if cidrs.is_empty() => ExternalIps::Allow,
            (true, cidrs) => ExternalIps::Within(cidrs),
        };
        let packets = self.packets.options(self.host_sockets_only);
        let healthz_bind_address = bind_address("--healthz-bind-address", &self.healthz_bind_address, 10256)?;
        let metrics_bind_address = bind_address("--metrics-bind-address", &self.metrics_bind_address, 10249)?;
        let exposed =
            [healthz_bind_address, metrics_bind_address].into_iter().flatten().filter(|a| !a.ip().is_loopback());
        Ok(AgentOptions {
            source: match self.manifests {
                Some(directory) => SourceOptions::Manifests(directory),
                None => SourceOptions::Kubernetes { kubeconfig: self.kubeconfig, api_servers: self.api_servers },
            },
            node_name: node_name(self.node_name)?,
            paths: self.host.paths(),
            cgroup_root: self.cgroup_root,
            healthz_bind_address,
            metrics_bind_address,
            max_metrics_series: self.max_metrics_series,
            effective: Vec::new(),
            limits: self.limits.into(),
            plan: PlanOptions {
                algorithm: self.lb_algorithm.into(),
                maglev_size: self.maglev_table_size,
                external_ips,
                node_agent_ports: exposed.map(|address| address.port()).chain([KUBELET]).collect(),
                loopback_node_ports: self.loopback_nodeports,
                refuse_unknown_ports: self.refuse_unknown_ports,
                judge_pods_by_packet: packets.enabled && packets.from_pods != FromPods::Never,
                answer_pings: packets.switches.answer_pings,
            },
            node_port_addresses: self.nodeport_addresses,
            service_cidrs: self.service_cidrs,
            skip_services: self.skip_services.into_iter().collect(),
            host_sockets_only: self.host_sockets_only,
            bind_protection: self.bind_protection,
            close_tcp: self.close_tcp,
            packets,
            conntrack: self.conntrack.sysctls(),
        })
    }
}

impl From<LimitArgs> for Limits {
    fn from(args: LimitArgs) -> Self {
        Self {
            frontends: args.max_frontends,
            backends: args.max_backends,
            slots: args.max_table_slots,
            affinity: args.max_affinity,
            peers: args.max_peers,
            source_ranges: args.max_source_ranges,
            conntrack: args.max_conntrack,
        }
    }
}

impl From<AlgorithmArg> for Algorithm {
    fn from(arg: AlgorithmArg) -> Self {
        match arg {
            AlgorithmArg::Random => Self::Random,
            AlgorithmArg::RoundRobin => Self::RoundRobin,
            AlgorithmArg::LeastConnections => Self::LeastConnections,
            AlgorithmArg::Maglev => Self::Maglev,
        }
    }
}

/// The kernel allows more entries; beyond this a typing mistake is likelier than a wish.
fn limit() -> RangedU64ValueParser<u32> {
    RangedU64ValueParser::new().range(1..=16_777_216)
}

fn node_name(given: Option<String>) -> anyhow::Result<String> {
    let name = match given {
        Some(name) => name.trim().to_owned(),
        // The kubelet's default name is the host name in lower case too.
        None => fs::read_to_string("/proc/sys/kernel/hostname")
            .context("cannot read the host name; name this node with --node-name")?
            .trim()
            .to_lowercase(),
    };
    ensure!(!name.is_empty(), "the node's name is empty; name this node with --node-name or NODE_NAME");
    Ok(name)
}

/// The port may be missing, as with kube-proxy; an empty text means: not served.
fn bind_address(flag: &str, text: &str, port: u16) -> anyhow::Result<Option<SocketAddr>> {
    if text.is_empty() {
        return Ok(None);
    }
    let with_port = |_: AddrParseError| text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, port));
    let address = text.parse::<SocketAddr>().or_else(with_port);
    address.map(Some).with_context(|| format!("{flag}: {text:?} is neither an address nor an address and a port"))
}

/// What is true or false is said as `--flag`, `--flag=true` or `--flag=false`, so that a file's `true` can be taken back.
fn switch(arg: Arg) -> Arg {
    if arg.get_value_parser().type_id() != TypeId::of::<bool>() || !matches!(arg.get_action(), Set) {
        return arg;
    }
    arg.value_name("true|false").num_args(0..=1).require_equals(true).default_missing_value("true")
}

fn api_server(text: &str) -> Result<http::Uri, String> {
    let uri: http::Uri = text.parse().map_err(|e| format!("{e}"))?;
    if matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|h| !h.is_empty()) {
        return Ok(uri);
    }
    Err("expected a URL such as https://192.0.2.1:6443".to_owned())
}

fn service_name(text: &str) -> Result<ServiceName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
            Ok(ServiceName::new(namespace, name))
        }
        Some(_) | None => Err("expected NAMESPACE/NAME".to_owned()),
    }
}

#[cfg(test)]
mod tests;
