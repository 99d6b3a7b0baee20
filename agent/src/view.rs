//! What `svc list` and `lb list` say, as data. JSON and YAML of these types are a contract: camelCase, fields may be
//! added, never renamed or removed.

use serde::{Deserialize, Serialize};

/// Every list is wrapped so.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Items<T> {
    /// The entries.
    pub items: Vec<T>,
}

/// One Service, as the agent wants it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// `spec.type`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Addresses, empty for headless Services.
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Vec<String>,
    /// Why it has no frontend: headless, external name, invalid …; null when it has.
    pub reason: Option<String>,
    /// Labels of the object.
    #[serde(default, skip_serializing_if = "std::collections::BTreeMap::is_empty")]
    pub labels: std::collections::BTreeMap<String, String>,
    /// What it answers on.
    pub frontends: Vec<FrontendView>,
}

/// One address and port of a Service.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendView {
    /// ClusterIP, NodePort, LoadBalancer or ExternalIP.
    pub kind: String,
    /// Address.
    pub address: String,
    /// Port.
    pub port: u16,
    /// TCP, UDP or SCTP.
    pub protocol: String,
    /// Name of the port, possibly empty.
    pub port_name: String,
    /// Backends that are ready.
    pub ready: usize,
    /// Backends in any slice.
    pub total: usize,
    /// Whether the kernel has exactly this.
    pub programmed: bool,
    /// Why not, or who owns the address instead; null when programmed.
    pub message: Option<String>,
    /// Its backends, by address and port.
    pub backends: Vec<BackendView>,
}

/// One endpoint of a frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendView {
    /// Address.
    pub address: String,
    /// Target port.
    pub port: u16,
    /// Node it runs on.
    pub node: Option<String>,
    /// Zone it runs in.
    pub zone: Option<String>,
    /// Condition.
    pub ready: bool,
    /// Condition.
    pub serving: bool,
    /// Condition.
    pub terminating: bool,
    /// Whether new connections to this frontend, from this node, may go there.
    pub selected: bool,
}

/// One frontend, as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LbView {
    /// Address.
    pub address: String,
    /// Port; 0 stands for every port that no Service uses.
    pub port: u16,
    /// TCP, UDP, SCTP, or ANY for port 0.
    pub protocol: String,
    /// ClusterIP, NodePort, LoadBalancer, ExternalIP, Loopback or UnknownPort.
    pub kind: String,
    /// Whose traffic this row decides: internal, external or both.
    pub scope: String,
    /// "namespace/name", null where the kernel does not know.
    pub service: Option<String>,
    /// Name of the port, null where the kernel does not know.
    pub port_name: Option<String>,
    /// forward, reject or drop.
    pub verdict: String,
    /// random, round-robin, least-connections or maglev.
    pub algorithm: String,
    /// Session affinity timeout in seconds; 0 = none.
    pub affinity_seconds: u32,
    /// Where new connections go.
    pub backends: Vec<LbBackendView>,
}

/// One backend, as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LbBackendView {
    /// Address.
    pub address: String,
    /// Port.
    pub port: u16,
    /// Share of the selectable slots: how many of the run are this backend's.
    pub weight: u32,
    /// Sockets of this node connected to it now.
    pub connections: u64,
}

/// `sheave status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StatusView {
    /// Version of the agent that answered.
    pub version: String,
    /// This node's name.
    pub node: String,
    /// Whether every source has delivered its first complete list.
    pub synced: bool,
    /// Where objects come from: "kubernetes https://…" or "manifests /dir".
    pub source: String,
    /// What is wrong with the source now, one sentence each; empty when all is well.
    pub source_problems: Vec<String>,
    /// "ok", "starting" or "degraded".
    pub health: String,
    /// What `/readyz` answers: everything that was listed at first has been in the kernel. Stays true.
    #[serde(default)]
    pub ready: bool,
    /// What is wrong, one sentence each; with none here nor of the source, a node that has started is ok.
    pub problems: Vec<String>,
    /// What is not as somebody wished although all is well: objects that cannot be used, addresses that two claim.
    #[serde(default)]
    pub warnings: Vec<String>,
    /// Services known, handled or not.
    pub services: usize,
    /// Frontends wanted.
    pub frontends: usize,
    /// Of those, in the kernel.
    pub frontends_programmed: usize,
    /// Asked for by Services and not wanted: API servers or nodes' agents answer there.
    #[serde(default)]
    pub frontends_kept: usize,
    /// Backends of all services.
    pub backends: usize,
    /// How full each map is.
    pub maps: Vec<MapView>,
    /// Kernel features found and missing.
    pub features: Vec<FeatureView>,
    /// Why connections went where they went: name and count, since the maps were made.
    pub counters: std::collections::BTreeMap<String, u64>,
    /// What was taken away behind the agent's back and put back: kind and times, since the agent began.
    #[serde(default)]
    pub repairs: std::collections::BTreeMap<String, u64>,
}

/// How full a map is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapView {
    /// Name of the map.
    pub name: String,
    /// Entries in use.
    pub used: u64,
    /// Entries it can hold.
    pub capacity: u64,
    /// The flag that sets the capacity.
    pub flag: String,
}

/// A kernel feature.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FeatureView {
    /// Short name.
    pub name: String,
    /// Whether this kernel has it.
    pub available: bool,
    /// What its absence means, for people.
    pub consequence: String,
}
