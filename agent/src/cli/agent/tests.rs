//! Flags in, options out.

use std::net::SocketAddr;

use clap::Parser;

use super::{AgentArgs, bind_address};
use crate::{
    datapath::Limits,
    datapath::programs::load::PodSign,
    model::{Algorithm, ServiceName},
    options::{AgentOptions, FromPods, HostPaths, PodDetection, SourceOptions, TcAttach},
    plan::{
        group::{ExternalIps, PlanOptions},
        node_ports::NodePortAddresses,
    },
};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    agent: AgentArgs,
}

/// `flags` after `agent --node-name n1`.
fn options(flags: &str) -> Result<AgentOptions, String> {
    let words = "agent --node-name n1".split(' ').chain(flags.split(' ').filter(|w| !w.is_empty()));
    let line = Line::try_parse_from(words).map_err(|e| e.to_string())?;
    line.agent.into_options().map_err(|e| format!("{e:#}"))
}

#[test]
fn without_flags_the_documented_defaults_hold() {
    let options = options("").unwrap();
    assert_eq!(options.source, SourceOptions::Kubernetes { kubeconfig: None, api_servers: Vec::new() });
    assert_eq!(options.paths, HostPaths::default());
    assert_eq!(options.limits, Limits::default());
    let node_agent_ports = [10250, 10256].into(); // metrics are on loopback, which nobody takes
    assert_eq!(options.plan, PlanOptions { node_agent_ports, ..PlanOptions::default() });
    assert_eq!(options.node_port_addresses, NodePortAddresses::primary());
    assert_eq!(options.healthz_bind_address, Some(SocketAddr::from(([0, 0, 0, 0], 10256))));
    assert_eq!(options.metrics_bind_address, Some(SocketAddr::from(([127, 0, 0, 1], 10249))));
    assert_eq!((options.cgroup_root, options.packets.devices.len(), options.skip_services.len()), (None, 0, 0));
    assert_eq!((options.host_sockets_only, options.bind_protection, options.close_tcp), (false, true, false));
}

#[test]
fn every_flag_reaches_its_option() {
    type Check = fn(&AgentOptions) -> bool;
    let cases: &[(&str, Check)] = &[
        ("--manifests /m", |o| o.source == SourceOptions::Manifests("/m".into())),
        ("--kubeconfig /k --api-server https://192.0.2.1:6443 --api-server https://[2001:db8::1]:6443", |o| {
            matches!(&o.source, SourceOptions::Kubernetes { kubeconfig: Some(k), api_servers }
                if k.ends_with("k") && api_servers.len() == 2 && api_servers[1].host() == Some("[2001:db8::1]"))
        }),
        ("--bpffs /b --run-dir /r --cgroup-root /c", |o| {
            o.paths == HostPaths { bpffs: "/b".into(), run_dir: "/r".into() } && o.cgroup_root == Some("/c".into())
        }),
        ("--devices eth0,eth1 --devices bond0", |o| o.packets.devices == ["eth0", "eth1", "bond0"]),
        ("--metrics-bind-address=", |o| o.metrics_bind_address.is_none()),
        ("--max-metrics-series 7", |o| o.max_metrics_series == 7),
        ("--max-frontends 1 --max-table-slots 3", |o| {
            o.limits == Limits { frontends: 1, slots: 3, ..Limits::default() }
        }),
        ("--max-backends 2 --max-affinity 4 --max-peers 5 --max-source-ranges 6", |o| {
            o.limits == Limits { backends: 2, affinity: 4, peers: 5, source_ranges: 6, ..Limits::default() }
        }),
        ("--lb-algorithm least-connections", |o| o.plan.algorithm == Algorithm::LeastConnections),
        ("--lb-algorithm round-robin", |o| o.plan.algorithm == Algorithm::RoundRobin),
        ("--lb-algorithm maglev --maglev-table-size 251", |o| {
            o.plan.algorithm == Algorithm::Maglev && o.plan.maglev_size.get() == 251
        }),
        ("--nodeport-addresses 192.0.2.0/24,2001:db8::/64", |o| {
            !o.node_port_addresses.primary && o.node_port_addresses.networks.len() == 2
        }),
        ("--allow-service-external-ips=false", |o| o.plan.external_ips == ExternalIps::Deny),
        (
            "--external-ip-cidrs 203.0.113.0/24",
            |o| matches!(&o.plan.external_ips, ExternalIps::Within(nets) if nets.len() == 1),
        ),
        ("--skip-services kube-system/kube-dns,t/web", |o| o.skip_services.contains(&ServiceName::new("t", "web"))),
        ("--refuse-unknown-ports=false", |o| !o.plan.refuse_unknown_ports),
        ("--loopback-nodeports=false", |o| !o.plan.loopback_node_ports),
        ("--loopback-nodeports", |o| o.plan.loopback_node_ports),
        ("--host-sockets-only", |o| o.host_sockets_only),
        ("--bind-protection=false", |o| !o.bind_protection),
        ("--close-tcp", |o| o.close_tcp),
        ("--max-conntrack 7", |o| o.limits.conntrack == 7),
        ("--packet-path=false", |o| !o.packets.enabled),
        ("", |o| o.packets.from_pods == FromPods::Sctp),
        ("--host-sockets-only", |o| o.packets.from_pods == FromPods::Always),
        ("--host-sockets-only --pod-packets=off", |o| o.packets.from_pods == FromPods::Never),
        ("--pod-packets", |o| o.packets.from_pods == FromPods::Always),
        ("--tc-attach clsact", |o| o.packets.attach == TcAttach::Clsact),
        ("--masquerade-all", |o| o.packets.switches.masquerade_all),
        ("--masquerade-all=false --pod-packets=on", |o| {
            !o.packets.switches.masquerade_all && o.packets.from_pods == FromPods::Always
        }),
        ("", |o| o.packets.switches.cluster_ips_from_outside),
        ("--cluster-ips-from-outside=false", |o| !o.packets.switches.cluster_ips_from_outside),
        ("--answer-pings", |o| o.packets.switches.answer_pings && o.plan.answer_pings),
        ("--preserve-client-ip-for-local-backends", |o| o.packets.switches.keep_client),
        ("--snat-ports 61000-65535 --mark-bit 3", |o| {
            o.packets.switches.snat_ports == (61_000, 65_535) && o.packets.switches.mark_bit == 3
        }),
        ("--detect-pods none", |o| {
            o.packets.detection == PodDetection::Never && o.packets.switches.pods == PodSign::Nothing
        }),
        ("--detect-pods node", |o| {
            o.packets.detection == PodDetection::ThisNode && o.packets.switches.pods == PodSign::Address
        }),
        ("--detect-pods bridge --pod-bridge-interface cni0", |o| {
            o.packets.detection.is_of_pods("cni0") && o.packets.switches.pods == PodSign::Device
        }),
        ("--detect-pods prefix --pod-interface-name-prefix cali", |o| {
            o.packets.detection.is_of_pods("cali123") && !o.packets.detection.is_of_pods("eth0")
        }),
        (
            "--cluster-cidr 10.0.0.0/8,2001:db8::/32",
            |o| matches!(&o.packets.detection, PodDetection::Within(nets) if nets.len() == 2),
        ),
        ("--close-tcp=true --host-sockets-only=false", |o| o.close_tcp && !o.host_sockets_only),
    ];
    for (flags, holds) in cases {
        let options = options(flags).unwrap_or_else(|e| panic!("{flags}: {e}"));
        assert!(holds(&options), "{flags}: {options:?}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_a_hint() {
    for (flags, hint) in [
        ("--manifests /m --kubeconfig /k", "cannot be used with"),
        ("--api-server 192.0.2.1:6443", "expected a URL such as"),
        ("--api-server ftp://192.0.2.1", "expected a URL such as"),
        ("--maglev-table-size 16384", "prime"),
        ("--max-frontends 0", "1.."),
        ("--snat-ports 5000-4000", "such as"),
        ("--snat-ports 0-4000", "such as"),
        ("--mark-bit 31", "0..=30"),
        ("--max-backends 99999999999", "1.."),
        ("--nodeport-addresses eth0", "--nodeport-addresses"),
        ("--external-ip-cidrs 203.0.113.0", "invalid"),
        ("--skip-services kube-dns", "expected NAMESPACE/NAME"),
        ("--lb-algorithm fastest", "least-connections"),
        ("--healthz-bind-address localhost", "--healthz-bind-address"),
    ] {
        let error = options(flags).expect_err(flags);
        assert!(error.contains(hint), "{flags}: {hint:?} is not in {error}");
    }
    let line = Line::try_parse_from(["agent", "--node-name", " "]).unwrap();
    assert!(line.agent.into_options().unwrap_err().to_string().contains("NODE_NAME"));
}

#[test]
fn a_bind_address_may_lack_its_port() {
    for (row, text, expected) in [
        ("BA-1", "0.0.0.0:12345", Some("0.0.0.0:12345")),
        ("BA-2", "9.8.7.6", Some("9.8.7.6:23456")),
        ("BA-3", "[::]:12345", Some("[::]:12345")),
        ("BA-4", "fd00:1::5", Some("[fd00:1::5]:23456")),
        ("BA-5", "[fd00:1::5]", None),
    ] {
        let found = bind_address("--flag", text, 23456).ok().flatten().map(|a| a.to_string());
        assert_eq!(found.as_deref(), expected, "{row}");
    }
    assert_eq!(bind_address("--flag", "", 1).unwrap(), None);
}
