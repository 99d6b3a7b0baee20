//! Flags of the packet path.

use clap::{ArgAction::Set, Args, ValueEnum};
use ipnet::IpNet;

use crate::{
    datapath::load::PacketSwitches,
    options::{PacketOptions, PodDetection, TcAttach},
};

/// Flags of the packet path.
#[derive(Debug, Args)]
#[command(next_help_heading = "Packets")]
pub struct PacketArgs {
    /// Translate packets: for clients outside this node, and pods whose sockets are not the host's
    #[arg(long, value_name = "true|false", default_value_t = true, action = Set, num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    packet_path: bool,
    /// Network devices that clients outside the node come through [default: network cards, and whatever has a default
    /// route]
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    devices: Vec<String>,
    /// Translate packets on workloads' devices too: for pods whose sockets the host's kernel does not see
    #[arg(long, value_name = "true|false", default_value_t = false, action = Set, num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    pod_packets: bool,
    /// Put programs on devices by tcx where the kernel has it, or always as filters of a clsact qdisc
    #[arg(long, value_enum, value_name = "HOW", default_value_t = AttachArg::Auto)]
    tc_attach: AttachArg,
    /// Which sources are pods: addresses in the cluster's pod networks, in this node's, or none
    #[arg(long, value_enum, value_name = "WHICH", default_value_t = DetectArg::Cluster)]
    detect_pods: DetectArg,
    /// The cluster's pod networks [default: those of all Nodes]
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    cluster_cidr: Vec<IpNet>,
    /// Hide every client of a ClusterIP from the backend, pods too
    #[arg(long, value_name = "true|false", default_value_t = false, action = Set, num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    masquerade_all: bool,
    /// With externalTrafficPolicy Cluster, show the client's address to backends on the node that it came to
    #[arg(long, value_name = "true|false", default_value_t = false, action = Set, num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    preserve_client_ip_for_local_backends: bool,
    /// Ports that hide clients; apart from NodePorts and from the host's own (net.ipv4.ip_local_port_range)
    #[arg(long, value_name = "FIRST-LAST", default_value = "10000-29999", value_parser = ports)]
    snat_ports: (u16, u16),
    /// The first of two neighbouring bits of the packet mark, for use between ingress and egress
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
    None,
}

impl From<PacketArgs> for PacketOptions {
    fn from(args: PacketArgs) -> Self {
        let detection = match args.detect_pods {
            DetectArg::Cluster if args.cluster_cidr.is_empty() => PodDetection::AllNodes,
            DetectArg::Cluster => PodDetection::Within(args.cluster_cidr.into_iter().collect()),
            DetectArg::Node => PodDetection::ThisNode,
            DetectArg::None => PodDetection::Never,
        };
        Self {
            enabled: args.packet_path,
            devices: args.devices,
            from_pods: args.pod_packets,
            attach: match args.tc_attach {
                AttachArg::Auto => TcAttach::Auto,
                AttachArg::Clsact => TcAttach::Clsact,
            },
            switches: PacketSwitches {
                mark_bit: args.mark_bit,
                snat_ports: args.snat_ports,
                masquerade_all: args.masquerade_all,
                detect_pods: detection != PodDetection::Never,
                keep_client: args.preserve_client_ip_for_local_backends,
            },
            detection,
        }
    }
}

fn ports(text: &str) -> Result<(u16, u16), String> {
    let parsed = text.split_once('-').and_then(|(first, last)| Some((first.parse().ok()?, last.parse().ok()?)));
    match parsed {
        Some((first, last)) if 0 < first && first <= last => Ok((first, last)),
        Some(_) | None => Err("expected two ports such as 10000-29999".to_owned()),
    }
}
