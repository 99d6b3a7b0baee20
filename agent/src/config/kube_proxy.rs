//! Every flag of kube-proxy 1.36 and every field of its configuration file, and what each means here.

use std::net::IpAddr;

use super::Settings;
use crate::exit::Refused;

/// How a flag is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// `--flag=value` or `--flag value`.
    Value,
    /// `--flag` or `--flag=false`.
    Switch,
}

/// What it means here.
#[derive(Clone, Copy)]
pub enum Answer {
    /// The same as this flag of ours.
    Becomes(&'static str),
    /// Worked out from the value, as the words say.
    Means(fn(&mut Settings, value: &str, origin: &str) -> Result<(), String>, &'static str),
    /// Nothing; the rest of the sentence that begins with its name.
    Nothing(&'static str),
    /// Not a way to run an agent; says what to do instead.
    Instead(&'static str),
}
use Answer::{Becomes, Instead, Means, Nothing};

/// One thing that kube-proxy can be told.
pub struct Row {
    /// Its flag; `None` where it has none, or one that is ours too.
    pub flag: Option<(&'static str, Form)>,
    /// Paths in its file; of a map, the path of the map.
    pub fields: &'static [&'static str],
    /// What it means here.
    pub answer: Answer,
}

const NO_NETFILTER: &str =
    "has no effect: sheave has no rules in netfilter to synchronise, changes are written at once";
const NO_IPVS: &str = "has no effect: sheave does not use IPVS";
const API_PACE: &str = "has no effect: sheave only watches, four streams for each node";
const LOG_DETAIL: &str = "has no effect: log lines go to stderr at once";

const fn value(flag: &'static str, fields: &'static [&'static str], answer: Answer) -> Row {
    Row { flag: Some((flag, Form::Value)), fields, answer }
}

const fn switch(flag: &'static str, fields: &'static [&'static str], answer: Answer) -> Row {
    Row { flag: Some((flag, Form::Switch)), fields, answer }
}

/// A field whose flag is spelt as ours, or that has no flag.
const fn field(fields: &'static [&'static str], answer: Answer) -> Row {
    Row { flag: None, fields, answer }
}

/// All of them.
pub const ROWS: &[Row] = &[
    // General
    value("hostname-override", &["hostnameOverride"], Becomes("node-name")),
    value(
        "proxy-mode",
        &["mode"],
        Means(mode, "iptables and ipvs: NodePorts on every address, unless `--nodeport-addresses` says otherwise"),
    ),
    value(
        "bind-address",
        &["bindAddress"],
        Means(bind_address, "an IPv6 address: `--healthz-bind-address=[::]:10256 --metrics-bind-address=[::1]:10249`"),
    ),
    switch(
        "bind-address-hard-fail",
        &["bindAddressHardFail"],
        Nothing("has no effect: a port that is taken is waited for, since traffic does not depend on it"),
    ),
    switch("profiling", &["enableProfiling"], Nothing("has no effect: there is no profiling over HTTP")),
    value("feature-gates", &["featureGates"], Nothing("has no effect: sheave has no feature gates")),
    value(
        "show-hidden-metrics-for-version",
        &["showHiddenMetricsForVersion"],
        Nothing("has no effect: sheave hides no metrics"),
    ),
    value("oom-score-adj", &["oomScoreAdj"], Nothing("has no effect: the pod's priority class decides that")),
    value("config-sync-period", &["configSyncPeriod"], Nothing("has no effect: changes arrive by watches")),
    switch("cleanup", &[], Instead("to remove what an agent left, run `sheave cleanup`")),
    switch("init-only", &[], Instead("to see whether this host can run the agent, run `sheave check`")),
    value("write-config-to", &[], Instead("to see the configuration that results, use --print-config")),
    field(&["portRange"], Nothing("has no effect, in kube-proxy neither")),
    field(&["winkernel"], Nothing("has no effect: this is not Windows")),
    switch("windows-service", &["windowsRunAsService"], Nothing("has no effect: this is not Windows")),
    // API server
    field(&["clientConnection.kubeconfig"], Becomes("kubeconfig")),
    value("master", &[], Becomes("api-server")),
    value(
        "kube-api-content-type",
        &["clientConnection.contentType", "clientConnection.acceptContentTypes"],
        Nothing("has no effect: sheave reads JSON"),
    ),
    value("kube-api-burst", &["clientConnection.burst"], Nothing(API_PACE)),
    value("kube-api-qps", &["clientConnection.qps"], Nothing(API_PACE)),
    // HTTP
    field(&["healthzBindAddress"], Becomes("healthz-bind-address")),
    field(&["metricsBindAddress"], Becomes("metrics-bind-address")),
    value("healthz-port", &[], Means(healthz_port, "`--healthz-bind-address`; 0 = nowhere")),
    value("metrics-port", &[], Means(metrics_port, "`--metrics-bind-address`; 0 = nowhere")),
    // Packets
    value(
        "iptables-masquerade-bit",
        &["iptables.masqueradeBit", "nftables.masqueradeBit"],
        Nothing("has no effect: sheave marks packets with bits of its own, see --mark-bit"),
    ),
    field(&["iptables.masqueradeAll", "nftables.masqueradeAll"], Means(masquerade_all, "`--masquerade-all`")),
    switch("iptables-localhost-nodeports", &["iptables.localhostNodePorts"], Becomes("loopback-nodeports")),
    value("iptables-sync-period", &["iptables.syncPeriod", "nftables.syncPeriod"], Nothing(NO_NETFILTER)),
    value("iptables-min-sync-period", &["iptables.minSyncPeriod", "nftables.minSyncPeriod"], Nothing(NO_NETFILTER)),
    value("ipvs-sync-period", &["ipvs.syncPeriod"], Nothing(NO_IPVS)),
    value("ipvs-min-sync-period", &["ipvs.minSyncPeriod"], Nothing(NO_IPVS)),
    value(
        "ipvs-scheduler",
        &["ipvs.scheduler"],
        Means(
            scheduler,
            "`--lb-algorithm`: rr and wrr round-robin, lc and wlc least-connections, sh, dh and mh maglev",
        ),
    ),
    value("ipvs-exclude-cidrs", &["ipvs.excludeCIDRs"], Nothing(NO_IPVS)),
    switch("ipvs-strict-arp", &["ipvs.strictARP"], Nothing(NO_IPVS)),
    value("ipvs-tcp-timeout", &["ipvs.tcpTimeout"], Nothing(NO_IPVS)),
    value("ipvs-tcpfin-timeout", &["ipvs.tcpFinTimeout"], Nothing(NO_IPVS)),
    value("ipvs-udp-timeout", &["ipvs.udpTimeout"], Nothing(NO_IPVS)),
    value(
        "detect-local-mode",
        &["detectLocalMode"],
        Means(detect_local, "`--detect-pods` cluster, node, bridge or prefix"),
    ),
    field(&["detectLocal.bridgeInterface"], Becomes("pod-bridge-interface")),
    field(&["detectLocal.interfaceNamePrefix"], Becomes("pod-interface-name-prefix")),
    field(&["clusterCIDR"], Becomes("cluster-cidr")),
    field(&["nodePortAddresses"], Becomes("nodeport-addresses")),
    // Connection tracking
    field(&["conntrack.maxPerCore"], Becomes("conntrack-max-per-core")),
    field(&["conntrack.min"], Becomes("conntrack-min")),
    field(&["conntrack.tcpEstablishedTimeout"], Becomes("conntrack-tcp-timeout-established")),
    field(&["conntrack.tcpCloseWaitTimeout"], Becomes("conntrack-tcp-timeout-close-wait")),
    field(&["conntrack.tcpBeLiberal"], Becomes("conntrack-tcp-be-liberal")),
    field(&["conntrack.udpTimeout"], Becomes("conntrack-udp-timeout")),
    field(&["conntrack.udpStreamTimeout"], Becomes("conntrack-udp-timeout-stream")),
    // Logging
    value("v", &["logging.verbosity"], Means(verbosity, "`--log-level`: info below 4, debug below 6, then trace")),
    value("logging-format", &["logging.format"], Becomes("log-format")),
    value("vmodule", &["logging.vmodule"], Nothing("has no effect: --log-level takes directives for modules")),
    value("log-flush-frequency", &["logging.flushFrequency"], Nothing(LOG_DETAIL)),
    value("log-text-info-buffer-size", &["logging.options"], Nothing(LOG_DETAIL)),
    switch("log-text-split-stream", &[], Nothing(LOG_DETAIL)),
    value("log-json-info-buffer-size", &[], Nothing(LOG_DETAIL)),
    switch("log-json-split-stream", &[], Nothing(LOG_DETAIL)),
];

impl Row {
    /// What follows when this was said.
    ///
    /// # Errors
    /// When it cannot be meant for an agent, or the value is no such value.
    pub fn take(&self, settings: &mut Settings, value: &str, origin: &str) -> Result<(), Refused> {
        match self.answer {
            Becomes(_) if value.is_empty() => {}
            Becomes(flag) => settings.add(flag, value, origin),
            // kubeadm writes every field down, most of them with a value that says nothing.
            Nothing(_) if is_zero(value) => {}
            Means(work_out, _) => {
                work_out(settings, value, origin).map_err(|why| Refused(format!("{origin}: {value:?} {why}")))?;
            }
            Nothing(sentence) => settings.remark(format!("{origin} {sentence}")),
            Instead(sentence) => return Err(Refused(format!("{origin} is not for `sheave agent`: {sentence}"))),
        }
        Ok(())
    }
}

fn is_zero(value: &str) -> bool {
    matches!(value, "" | "0" | "0s" | "false")
}

/// In the older modes kube-proxy serves NodePorts on every address, unless told otherwise.
fn mode(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    match value {
        "" | "iptables" | "ipvs" => settings.imply("nodeport-addresses", "all", &format!("default of {origin}")),
        "nftables" => {}
        _ => return Err("is none of kube-proxy's modes iptables, ipvs and nftables".to_owned()),
    }
    Ok(())
}

/// Only the defaults of two other flags depend on it.
fn bind_address(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    if value.is_empty() {
        return Ok(());
    }
    let address: IpAddr = value.parse().map_err(|_| "is no IP address".to_owned())?;
    if address.is_ipv6() {
        let origin = format!("default of {origin}");
        settings.imply("healthz-bind-address", "[::]:10256", &origin);
        settings.imply("metrics-bind-address", "[::1]:10249", &origin);
    }
    Ok(())
}

fn healthz_port(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    port(settings, "healthz-bind-address", "0.0.0.0", value, origin)
}

fn metrics_port(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    port(settings, "metrics-bind-address", "127.0.0.1", value, origin)
}

fn port(settings: &mut Settings, flag: &str, host: &str, value: &str, origin: &str) -> Result<(), String> {
    match value.parse::<u16>().map_err(|_| "is no port".to_owned())? {
        0 => settings.add(flag, "", origin),
        port => settings.add(flag, &format!("{host}:{port}"), origin),
    }
    Ok(())
}

/// Two fields, one for each mode; either may say yes.
fn masquerade_all(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    if value == "true" {
        settings.add("masquerade-all", value, origin);
    }
    Ok(())
}

fn scheduler(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    match value {
        "" => {}
        "rr" | "wrr" => settings.add("lb-algorithm", "round-robin", origin),
        "lc" | "wlc" => settings.add("lb-algorithm", "least-connections", origin),
        "mh" | "sh" | "dh" => settings.add("lb-algorithm", "maglev", origin),
        _ => settings.remark(format!("{origin} {value:?} has no counterpart, see --lb-algorithm")),
    }
    Ok(())
}

fn detect_local(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    match value {
        "" | "ClusterCIDR" => {}
        "NodeCIDR" => settings.add("detect-pods", "node", origin),
        "BridgeInterface" => settings.add("detect-pods", "bridge", origin),
        "InterfaceNamePrefix" => settings.add("detect-pods", "prefix", origin),
        _ => return Err("is none of kube-proxy's modes of local detection".to_owned()),
    }
    Ok(())
}

/// What kube-proxy says at 2, its usual level, we say at info.
fn verbosity(settings: &mut Settings, value: &str, origin: &str) -> Result<(), String> {
    match value.parse::<u32>().map_err(|_| "is no number".to_owned())? {
        0..4 => {}
        4..6 => settings.add("log-level", "debug", origin),
        _ => settings.add("log-level", "trace", origin),
    }
    Ok(())
}
