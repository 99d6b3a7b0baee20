//! From the contents of the kernel's tables to what `lb list` says. Pure: the kernel and the fake are read alike.

pub mod clients;

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use sheave_ebpf::{
    backend::{Backend, RETIRED},
    frontend::{FROM_OUTSIDE, Frontend, FrontendKey},
    meta,
    names::{ServiceName, unpad},
    proto,
    service::{
        ALGORITHM_LEAST_CONNECTIONS, ALGORITHM_MAGLEV, ALGORITHM_RANDOM, ALGORITHM_ROUND_ROBIN, Config, Scope,
        VERDICT_DROP, VERDICT_FORWARD, VERDICT_NONE, VERDICT_REJECT, Word, config_index, word_index,
    },
};

use crate::{
    datapath::Datapath,
    plan::kind::Kind,
    view::{Items, LbBackendView, LbView},
};

/// The tables, readable. What is out of range reads as zero.
pub trait ReadTables {
    /// Every entry of `FRONTENDS`, in any order.
    fn frontends(&self) -> Vec<(FrontendKey, Frontend)>;
    /// A word of `SERVICES`.
    fn word(&self, index: u32) -> u64;
    /// A slot of `TABLES`.
    fn slot(&self, index: u32) -> u32;
    /// A backend by id.
    fn backend(&self, id: u32) -> Backend;
    /// Every backend of a slice, selectable or not.
    fn backends(&self) -> Vec<Backend>;
    /// Live connections of a backend id.
    fn connections(&self, id: u32) -> u64;
    /// Who a service id is.
    fn name(&self, service: u32) -> Option<ServiceName>;
}

/// What can be written can be read.
impl<D: Datapath> ReadTables for D {
    fn frontends(&self) -> Vec<(FrontendKey, Frontend)> {
        Datapath::frontends(self).unwrap_or_default()
    }
    fn word(&self, index: u32) -> u64 {
        Datapath::word(self, index)
    }
    fn slot(&self, index: u32) -> u32 {
        Datapath::slot(self, index)
    }
    fn backend(&self, id: u32) -> Backend {
        Datapath::backend(self, id)
    }
    fn backends(&self) -> Vec<Backend> {
        let end = u32::try_from(self.meta(meta::BACKEND_HIGH_WATER)).unwrap_or(u32::MAX).min(self.limits().backends);
        let serves = |id: &u32| Datapath::connections(self, *id) & RETIRED == 0;
        (0..end).filter(serves).map(|id| Datapath::backend(self, id)).filter(|b| *b != Backend::UNUSED).collect()
    }
    fn connections(&self, id: u32) -> u64 {
        sheave_ebpf::backend::connections(Datapath::connections(self, id))
    }
    fn name(&self, service: u32) -> Option<ServiceName> {
        Datapath::name(self, service)
    }
}

/// One row a frontend, or two where inside and outside clients are treated differently; by address, port and protocol.
#[must_use]
pub fn views(tables: &(impl ReadTables + ?Sized)) -> Items<LbView> {
    let mut frontends = tables.frontends();
    frontends.sort_by_key(|(key, _)| (IpAddr::from(key.addr), u16::from_be(key.port), key.proto));
    Items { items: frontends.into_iter().flat_map(|(key, frontend)| rows(tables, key, frontend)).collect() }
}

fn rows(tables: &(impl ReadTables + ?Sized), key: FrontendKey, frontend: Frontend) -> Vec<LbView> {
    let row = |scope: &str, choice: Choice| row(tables, key, frontend, scope, choice);
    let choice = |scope| Choice::read(tables, Word(tables.word(word_index(frontend.service, scope))));
    match Kind::of(frontend.kind) {
        Some(Kind::UnknownPort) if key.proto == FROM_OUTSIDE => {
            vec![row("external", Choice { verdict: VERDICT_REJECT, weights: BTreeMap::new() })]
        }
        Some(Kind::UnknownPort) if key.proto != 0 => {
            let ping = row("both", Choice { verdict: VERDICT_NONE, weights: BTreeMap::new() });
            vec![LbView { kind: "Ping".to_owned(), verdict: "answer".to_owned(), ..ping }]
        }
        Some(Kind::UnknownPort) => vec![row("both", Choice { verdict: VERDICT_REJECT, weights: BTreeMap::new() })],
        Some(Kind::ClusterIp) => vec![row("both", choice(Scope::Cluster))],
        Some(Kind::Loopback) => vec![row("internal", choice(Scope::Inside))],
        Some(Kind::NodePort | Kind::LoadBalancer | Kind::ExternalIp) | None => {
            match (choice(Scope::Inside), choice(Scope::Outside)) {
                (inside, outside) if inside == outside => vec![row("both", inside)],
                (inside, outside) => vec![row("internal", inside), row("external", outside)],
            }
        }
    }
}

/// What one scope does, whatever slots it happens to own.
#[derive(PartialEq, Eq)]
struct Choice {
    verdict: u8,
    /// Backend id → slots.
    weights: BTreeMap<u32, u32>,
}

impl Choice {
    fn read(tables: &(impl ReadTables + ?Sized), word: Word) -> Self {
        let mut weights = BTreeMap::new();
        if word.verdict() == VERDICT_FORWARD {
            for slot in word.offset()..word.offset().saturating_add(word.length()) {
                *weights.entry(tables.slot(slot)).or_default() += 1;
            }
        }
        Self { verdict: word.verdict(), weights }
    }
}

fn row(
    tables: &(impl ReadTables + ?Sized),
    key: FrontendKey,
    frontend: Frontend,
    scope: &str,
    choice: Choice,
) -> LbView {
    let is_a_services = Kind::of(frontend.kind) != Some(Kind::UnknownPort);
    let named = is_a_services.then(|| tables.name(frontend.service)).flatten();
    let config = if is_a_services { Config(tables.word(config_index(frontend.service))) } else { Config::default() };
    let mut backends: Vec<(SocketAddr, u32, u32)> = choice
        .weights
        .into_iter()
        .map(|(id, weight)| {
            let backend = tables.backend(id);
            (SocketAddr::new(backend.addr.into(), u16::from_be(backend.port)), weight, id)
        })
        .collect();
    backends.sort_unstable();
    LbView {
        address: IpAddr::from(key.addr).to_string(),
        port: u16::from_be(key.port),
        protocol: protocol(key.proto),
        kind: text(Kind::of(frontend.kind).map(Kind::name), frontend.kind),
        scope: scope.to_owned(),
        service: named.map(|n| format!("{}/{}", unpad(&n.namespace), unpad(&n.name))),
        port_name: named.map(|n| unpad(&n.port_name).to_owned()),
        verdict: verdict(choice.verdict),
        algorithm: algorithm(config.algorithm()),
        affinity_seconds: config.affinity_timeout(),
        backends: backends
            .into_iter()
            .map(|(target, weight, id)| LbBackendView {
                address: target.ip().to_string(),
                port: target.port(),
                weight,
                connections: tables.connections(id),
            })
            .collect(),
    }
}

/// A number this version does not know is shown as it is: the maps may be a newer agent's.
fn text(known: Option<&str>, number: u32) -> String {
    known.map_or_else(|| number.to_string(), str::to_owned)
}

/// A protocol as people write it.
#[must_use]
pub fn protocol(number: u8) -> String {
    let known = match number {
        proto::TCP => Some("TCP"),
        proto::UDP => Some("UDP"),
        proto::SCTP => Some("SCTP"),
        proto::ICMP => Some("ICMP"),
        proto::ICMPV6 => Some("ICMPv6"),
        0 | FROM_OUTSIDE => Some("ANY"),
        _ => None,
    };
    text(known, number.into())
}

fn verdict(number: u8) -> String {
    let known = match number {
        VERDICT_NONE => Some("none"),
        VERDICT_FORWARD => Some("forward"),
        VERDICT_REJECT => Some("reject"),
        VERDICT_DROP => Some("drop"),
        _ => None,
    };
    text(known, number.into())
}

fn algorithm(number: u8) -> String {
    let known = match number {
        ALGORITHM_RANDOM => Some("random"),
        ALGORITHM_ROUND_ROBIN => Some("round-robin"),
        ALGORITHM_LEAST_CONNECTIONS => Some("least-connections"),
        ALGORITHM_MAGLEV => Some("maglev"),
        _ => None,
    };
    text(known, number.into())
}

#[cfg(test)]
mod tests;
