//! What the tables hold about clients: where they go again by session affinity, and which may come at all.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use sheave_ebpf::{
    affinity::{self, AffinityKey, CLIENT_ADDRESS},
    names::unpad,
    service::{Config, Scope, Word, config_index, word_index},
    source_range::SERVICE_BITS,
};

use super::{Choice, ReadTables, protocol};
use crate::{datapath::RangeKey, view::Items};

/// Tables with clients in them, readable.
pub trait ReadClients: ReadTables {
    /// Every entry of `AFFINITY`, in any order.
    fn affinity(&self) -> Vec<(AffinityKey, u64)>;
    /// Every entry of `SOURCE_RANGES`, in any order.
    fn source_ranges(&self) -> Vec<RangeKey>;
}

/// A port of a Service, as far as the kernel knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// "namespace/name"; null where it is not known.
    pub service: Option<String>,
    /// Name of the port, possibly empty; null where it is not known.
    pub port_name: Option<String>,
    /// TCP, UDP or SCTP; null where it is not known.
    pub protocol: Option<String>,
}

impl PortView {
    fn of(tables: &(impl ReadTables + ?Sized), service: u32) -> Self {
        let name = tables.name(service);
        Self {
            service: name.map(|n| format!("{}/{}", unpad(&n.namespace), unpad(&n.name))),
            port_name: name.map(|n| unpad(&n.port_name).to_owned()),
            protocol: name.map(|n| protocol(n.proto)),
        }
    }
}

/// A client that goes where it went before. Contract: fields may be added, never renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AffinityView {
    /// Of which port.
    #[serde(flatten)]
    pub port: PortView,
    /// An address; or `netns:` and a cookie, for the sockets of a pod or of this host.
    pub client: String,
    /// Where it goes.
    pub backend: SocketAddr,
    /// For so many seconds, unless it connects again.
    pub remaining_seconds: u32,
    /// For so many from each connection on.
    pub timeout_seconds: u32,
}

impl AffinityView {
    /// The client's address, if it is known by that.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        self.client.parse().ok()
    }
}

/// A network whose clients may come. Contract: fields may be added, never renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceRangeView {
    /// To which port.
    #[serde(flatten)]
    pub port: PortView,
    /// From where.
    pub network: IpNet,
}

/// The entries that decide where the next connection goes. Those that are over, and those whose backend takes no new
/// connections, wait to be replaced and are left out. `now` in boot-time seconds.
#[must_use]
pub fn affinity(tables: &(impl ReadClients + ?Sized), now: u32) -> Items<AffinityView> {
    let mut selectable: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let view = |(key, value): (AffinityKey, u64)| {
        let id = affinity::backend(value);
        let timeout = Config(tables.word(config_index(key.service))).affinity_timeout();
        let idle = now.saturating_sub(affinity::last_used(value));
        let takes_new = selectable.entry(key.service).or_insert_with(|| members(tables, key.service)).contains(&id);
        (timeout > 0 && idle <= timeout && takes_new).then(|| {
            let backend = tables.backend(id);
            AffinityView {
                port: PortView::of(tables, key.service),
                client: client(&key),
                backend: SocketAddr::new(backend.addr.into(), u16::from_be(backend.port)),
                remaining_seconds: timeout - idle,
                timeout_seconds: timeout,
            }
        })
    };
    let mut items: Vec<_> = tables.affinity().into_iter().filter_map(view).collect();
    items.sort_by(|a, b| (&a.port, a.address(), &a.client).cmp(&(&b.port, b.address(), &b.client)));
    Items { items }
}

/// The networks of every Service that has loadBalancerSourceRanges.
#[must_use]
pub fn source_ranges(tables: &(impl ReadClients + ?Sized)) -> Items<SourceRangeView> {
    let view = |(bits, range): RangeKey| {
        let address = IpAddr::from(range.addr);
        let mapped = if address.is_ipv4() { 96 } else { 0 };
        let prefix = u8::try_from(bits.checked_sub(SERVICE_BITS + mapped)?).ok()?;
        let port = PortView::of(tables, u32::from_be(range.service));
        Some(SourceRangeView { port, network: IpNet::new(address, prefix).ok()? })
    };
    let mut items: Vec<_> = tables.source_ranges().into_iter().filter_map(view).collect();
    items.sort_by(|a, b| (&a.port, a.network).cmp(&(&b.port, b.network)));
    Items { items }
}

/// Backends that a new connection may go to, from anywhere.
fn members(tables: &(impl ReadTables + ?Sized), service: u32) -> BTreeSet<u32> {
    let scopes = [Scope::Cluster, Scope::Inside, Scope::Outside];
    let choices = scopes.map(|scope| Choice::read(tables, Word(tables.word(word_index(service, scope)))));
    choices.into_iter().flat_map(|choice| choice.weights.into_keys()).collect()
}

fn client(key: &AffinityKey) -> String {
    let [low, high, ..] = key.client;
    match key.kind {
        CLIENT_ADDRESS => IpAddr::from(sheave_ebpf::addr::Addr { words: key.client }).to_string(),
        _ => format!("netns:{}", u64::from(high) << 32 | u64::from(low)),
    }
}
