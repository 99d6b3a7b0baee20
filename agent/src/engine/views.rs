//! What `svc list` and `status` say.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
};

use sheave_ebpf::frontend::FrontendKey;

use super::Engine;
use crate::{
    datapath::Datapath,
    model::{
        Service,
        endpoint::{Offers, PortEndpoint},
    },
    plan::{
        group::{GroupPlan, ScopePlan},
        kind::Kind,
    },
    view::{BackendView, FeatureView, FrontendView, Items, MapView, ServiceView, StatusView},
};

/// What the engine itself does not know of the status.
#[derive(Clone, Debug, Default)]
pub struct StatusInput {
    /// Where objects come from.
    pub source: String,
    /// What is wrong with the source.
    pub source_problems: Vec<String>,
    /// What is not as somebody wished: objects that cannot be used, features that are missing.
    pub warnings: Vec<String>,
    /// Kernel features.
    pub features: Vec<FeatureView>,
    /// Counters by name.
    pub counters: BTreeMap<String, u64>,
    /// How full the maps are that the programs fill.
    pub filling: Vec<MapView>,
    /// What is missing of the agent's own things and cannot be put back.
    pub losses: Vec<String>,
    /// How often what was taken away was put back, by kind.
    pub repairs: BTreeMap<String, u64>,
}

impl<D: Datapath> Engine<D> {
    /// Every Service, as wanted.
    #[must_use]
    pub fn services(&self) -> Items<ServiceView> {
        Items { items: self.state.services().map(|service| self.service(service)).collect() }
    }

    fn service(&self, service: &Service) -> ServiceView {
        let offers = Offers::of(self.state.slices(&service.name));
        let plans = self.tables.of_service(&service.name);
        let mut frontends: Vec<FrontendView> = plans.flat_map(|(_, plan)| self.frontends(plan, &offers)).collect();
        frontends.sort_by_cached_key(|f| {
            (kind_order(&f.kind), f.address.parse::<IpAddr>().ok(), f.port, f.protocol.clone())
        });
        ServiceView {
            namespace: service.name.namespace.to_string(),
            name: service.name.name.to_string(),
            kind: service.kind.name().to_owned(),
            cluster_ips: service.cluster_ips.iter().map(ToString::to_string).collect(),
            reason: service.no_frontend.as_ref().map(ToString::to_string),
            labels: service.labels.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
            frontends,
        }
    }

    fn frontends(&self, plan: &GroupPlan, offers: &Offers<'_>) -> Vec<FrontendView> {
        let endpoints = offers.endpoints(&plan.key.port_name, plan.key.protocol, plan.key.family);
        let served = plan.frontends.iter().map(|(key, kind)| (key, *kind, None));
        let kept = plan.kept.iter().map(|(key, kind, keeper)| (key, *kind, Some(keeper)));
        let shown = served.chain(kept).filter_map(|(key, kind, keeper)| Some((key, kind, keeper, kind_name(kind)?)));
        shown
            .map(|(key, kind, keeper, name)| {
                let scope = usize::from(kind != Kind::ClusterIp); // what a client on this node gets
                let selected = selected(plan, scope);
                FrontendView {
                    kind: name.to_owned(),
                    address: IpAddr::from(key.addr).to_string(),
                    port: u16::from_be(key.port),
                    protocol: plan.key.protocol.to_string(),
                    port_name: plan.key.port_name.to_string(),
                    ready: endpoints.iter().filter(|e| e.endpoint.ready).count(),
                    total: endpoints.len(),
                    programmed: keeper.is_none() && self.reconciler.has_frontend(&plan.key, key),
                    message: keeper.map_or_else(|| self.message(plan, key), |keeper| Some(keeper.to_string())),
                    backends: endpoints.iter().map(|e| backend(e, selected.contains(&e.target))).collect(),
                }
            })
            .collect()
    }

    /// Why a frontend is not in the kernel as wanted.
    fn message(&self, plan: &GroupPlan, key: &FrontendKey) -> Option<String> {
        match self.tables.owner(key) {
            Some(owner) if owner.service == plan.key.service && *owner != plan.key => {
                Some(format!("the address and port belong to another port of this Service, {:?}", owner.port_name))
            }
            Some(owner) if *owner != plan.key => {
                let is_older = self.tables.plan(owner).is_some_and(|theirs| theirs.created < plan.created);
                let why = if is_older { "older" } else { "as old but first by name" };
                Some(format!("the address and port belong to the Service {}, which is {why}", owner.service))
            }
            Some(_) | None => match self.reconciler.problem(&plan.key) {
                Some(problem) => Some(problem.to_owned()),
                None => (!self.reconciler.has_frontend(&plan.key, key)).then(|| "not yet written".to_owned()),
            },
        }
    }

    /// How the agent is.
    #[must_use]
    pub fn status(&self, input: StatusInput) -> StatusView {
        let StatusInput { source, source_problems, mut warnings, features, counters, filling, losses, repairs } = input;
        let mut problems = losses;
        let wanted: Vec<(bool, bool)> = self
            .tables
            .groups()
            .flat_map(|(key, plan)| plan.frontends.iter().map(move |(frontend, kind)| (key, frontend, *kind)))
            .filter(|(_, _, kind)| kind_name(*kind).is_some())
            .map(|(key, frontend, _)| {
                (self.tables.owner(frontend) == Some(&**key), self.reconciler.has_frontend(key, frontend))
            })
            .collect();
        let programmed = wanted.iter().filter(|(_, programmed)| *programmed).count();
        let missing = wanted.iter().filter(|(owned, programmed)| *owned && !programmed).count();
        let contested = wanted.iter().filter(|(owned, _)| !owned).count();
        if missing > 0 && self.is_ready {
            let why = self.reconciler.first_problem().unwrap_or("they are being written");
            problems.push(format!("{missing} frontends are not in the kernel: {why}"));
        }
        if contested > 0 {
            warnings.push(format!(
                "{contested} frontends belong to another Service that also claims them and is older, or first by name; \
                 see `sheave svc list`"
            ));
        }
        let kept: usize = self.tables.groups().map(|(_, plan)| plan.kept.len()).sum();
        if kept > 0 {
            warnings.push(format!(
                "Services ask for {kept} addresses and ports of API servers or of nodes' agents and do not get them; \
                 see `sheave svc list`"
            ));
        }
        let health = if !self.is_ready {
            "starting"
        } else if problems.is_empty() && source_problems.is_empty() {
            "ok"
        } else {
            "degraded"
        };
        StatusView {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            node: self.options.node.to_string(),
            synced: self.state.is_synced(),
            source,
            source_problems,
            health: health.to_owned(),
            ready: self.is_ready,
            problems,
            warnings,
            services: self.state.services().count(),
            frontends: wanted.len(),
            frontends_programmed: programmed,
            frontends_kept: kept,
            backends: self.tables.groups().map(|(_, plan)| plan.backends.len()).sum(),
            maps: self.maps().into_iter().chain(filling).collect(),
            features,
            counters,
            repairs,
        }
    }

    fn maps(&self) -> Vec<MapView> {
        let (usage, limits) = (self.reconciler.usage(), self.reconciler.datapath().limits());
        let map = |name: &str, used: usize, capacity: u32, flag: &str| MapView {
            name: name.to_owned(),
            used: used as u64,
            capacity: u64::from(capacity),
            flag: flag.to_owned(),
        };
        vec![
            map("FRONTENDS", usage.frontends, limits.frontends, "--max-frontends"),
            map("SERVICES", usage.services, limits.frontends, "--max-frontends"),
            map("BACKENDS", usage.backends, limits.backends, "--max-backends"),
            map("TABLES", usage.slots, limits.slots, "--max-table-slots"),
            map("SOURCE_RANGES", usage.source_ranges, limits.source_ranges, "--max-source-ranges"),
        ]
    }
}

fn selected(plan: &GroupPlan, scope: usize) -> std::collections::BTreeSet<SocketAddr> {
    match &plan.scopes[scope] {
        ScopePlan::Forward(slots) => slots
            .iter()
            .filter_map(|index| plan.backends.get(*index as usize))
            .map(|b| SocketAddr::new(b.addr.into(), b.port))
            .collect(),
        ScopePlan::Unused | ScopePlan::Reject | ScopePlan::Drop => std::collections::BTreeSet::new(),
    }
}

fn backend(endpoint: &PortEndpoint<'_>, selected: bool) -> BackendView {
    let text = |name: &Option<std::sync::Arc<str>>| name.as_deref().map(ToOwned::to_owned);
    BackendView {
        address: endpoint.target.ip().to_string(),
        port: endpoint.target.port(),
        node: text(&endpoint.endpoint.node),
        zone: text(&endpoint.endpoint.zone),
        ready: endpoint.endpoint.ready,
        serving: endpoint.endpoint.serving,
        terminating: endpoint.endpoint.terminating,
        selected,
    }
}

/// `None` for what is no frontend of its own to people: the loopback side of a NodePort, the entry for unknown ports.
const fn kind_name(kind: Kind) -> Option<&'static str> {
    match kind {
        Kind::ClusterIp | Kind::NodePort | Kind::LoadBalancer | Kind::ExternalIp => Some(kind.name()),
        Kind::Loopback | Kind::UnknownPort => None,
    }
}

fn kind_order(kind: &str) -> usize {
    ["ClusterIP", "NodePort", "LoadBalancer", "ExternalIP"].iter().position(|k| *k == kind).unwrap_or(usize::MAX)
}
