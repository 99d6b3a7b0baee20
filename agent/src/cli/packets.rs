//! Flags of the packet path.

use clap::{ArgAction::Set, Args, ValueEnum};
use ipnet::IpNet;

use crate::{
    datapath::programs::load::{PacketSwitches, PodSign},
    options::{FromPods, PacketOptions, PodDetection, TcAttach},
};

/// `--snat-ports` where nothing else is said.
pub const SNAT_PORTS: &str = "10000-29999";

/// Flags of the packet path.
#[derive(Debug, Args)]
#[command(next_help_heading = "Packets")]
pub struct PacketArgs {
    /// Translate packets: for clients outside this node, and for pods whose sockets the host's kernel does not see
    #[arg(long, action = Set, default_value_t = true)]
    packet_path: bool,
    /// Network devices that outside clients come in through [default: network cards, and what has a default route or an
    /// address of the Node object]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    devices: Vec<String>,
    /// Translate what pods send packet by packet too. auto: while there is an SCTP Service, since the kernel has no
    /// hook for SCTP sockets, and with --host-sockets-only; on: always, for pods whose sockets the host's kernel does
    /// not see (Kata, gVisor, virtual machines)
    #[arg(long, value_enum, value_name = "WHEN", default_value_t = PodPacketsArg::Auto, num_args = 0..=1,
          require_equals = true, default_missing_value = "on")]
    pod_packets: PodPacketsArg,
    /// How to attach programs to devices: with tcx where the kernel has it, or always as filters of a clsact qdisc
    #[arg(long, value_enum, value_name = "HOW", default_value_t = AttachArg::Auto)]
    tc_attach: AttachArg,
    /// Which clients count as pods: those with addresses in the cluster's pod networks, or only in this node's; those
    /// behind a bridge, or behind devices with a common name prefix; or none
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = DetectArg::Cluster)]
    detect_pods: DetectArg,
    /// The cluster's pod networks [default: the pod CIDRs of all Nodes]
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    cluster_cidr: Vec<IpNet>,
    /// The bridge for --detect-pods=bridge
    #[arg(long, value_name = "NAME", required_if_eq("detect_pods", "bridge"))]
    pod_bridge_interface: Option<String>,
    /// The prefix of pods' device names for --detect-pods=prefix
    #[arg(long, value_name = "PREFIX", required_if_eq("detect_pods", "prefix"))]
    pod_interface_name_prefix: Option<String>,
    /// Answer pings from outside this node to ClusterIPs, load-balancer and external addresses
    #[arg(long, action = Set, default_value_t = false)]
    answer_pings: bool,
    /// Serve ClusterIPs to whoever routes packets for them to this node, as kube-proxy does; false: to pods alone, as
    /// --detect-pods tells them, and packets of others are dropped
    #[arg(long, action = Set, default_value_t = true)]
    cluster_ips_from_outside: bool,
    /// Masquerade every client of a ClusterIP, pods included
    #[arg(long, action = Set, default_value_t = false)]
    masquerade_all: bool,
    /// With externalTrafficPolicy Cluster, keep the client's address if the backend is on the node that got the packet
    #[arg(long, action = Set, default_value_t = false)]
    preserve_client_ip_for_local_backends: bool,
    /// Source ports for masqueraded clients; keep them apart from NodePorts and from ephemeral ports
    /// (net.ipv4.ip_local_port_range)
    #[arg(long, value_name = "FIRST-LAST", default_value = SNAT_PORTS, value_parser = snat_ports)]
    snat_ports: (u16, u16),
    /// First of two adjacent bits of the packet mark, used between ingress and egress
    #[arg(long, value_name = "N", default_value_t = PacketSwitches::default().mark_bit,
          value_parser = clap::value_parser!(u8).range(0..=30))]
    mark_bit: u8,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum AttachArg {
    Auto,
    Clsact,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum DetectArg {
    Cluster,
    Node,
    Bridge,
    Prefix,
    None,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum PodPacketsArg {
    Auto,
    #[value(alias = "true")] // as YAML reads `on`
    On,
    #[value(alias = "false")]
    Off,
}

impl PacketArgs {
    /// Validated; `host_sockets_only` says that no pod's socket is translated.
    pub fn options(self, host_sockets_only: bool) -> PacketOptions {
        let args = self;
        let detection = match args.detect_pods {
            DetectArg::Cluster if args.cluster_cidr.is_empty() => PodDetection::AllNodes,
            DetectArg::Cluster => PodDetection::Within(args.cluster_cidr.into_iter().collect()),
            DetectArg::Node => PodDetection::ThisNode,
            DetectArg::Bridge => PodDetection::Bridge(args.pod_bridge_interface.unwrap_or_default()),
            DetectArg::Prefix => PodDetection::Prefix(args.pod_interface_name_prefix.unwrap_or_default()),
            DetectArg::None => PodDetection::Never,
        };
        PacketOptions {
            enabled: args.packet_path,
            devices: args.devices,
            from_pods: match args.pod_packets {
                PodPacketsArg::On => FromPods::Always,
                PodPacketsArg::Auto if host_sockets_only => FromPods::Always,
                PodPacketsArg::Auto => FromPods::Sctp,
                PodPacketsArg::Off => FromPods::Never,
            },
            attach: match args.tc_attach {
                AttachArg::Auto => TcAttach::Auto,
                AttachArg::Clsact => TcAttach::Clsact,
            },
            switches: PacketSwitches {
                mark_bit: args.mark_bit,
                snat_ports: args.snat_ports,
                masquerade_all: args.masquerade_all,
                pods: match detection {
                    PodDetection::AllNodes | PodDetection::ThisNode | PodDetection::Within(_) => PodSign::Address,
                    PodDetection::Bridge(_) | PodDetection::Prefix(_) => PodSign::Device,
                    PodDetection::Never => PodSign::Nothing,
                },
                cluster_ips_from_outside: args.cluster_ips_from_outside,
                keep_client: args.preserve_client_ip_for_local_backends,
                answer_pings: args.answer_pings,
            },
            detection,
        }
    }
}

/// Parses `--snat-ports`.
pub fn snat_ports(text: &str) -> Result<(u16, u16), String> {
    let parsed = text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    match parsed {
        Some((first, last)) if 0 < first && first <= last => Ok((first, last)),
        Some(_) | None => Err("expected two ports such as 10000-29999".to_owned()),
    }
}
