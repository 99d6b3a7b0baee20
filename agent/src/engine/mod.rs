//! The core: the cluster's state, the plan that follows from it, and what the kernel has. Synchronous, owned by one
//! thread.

mod checks;
mod context;
mod networks;
mod snapshot;
mod views;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use sheave_ebpf::frontend::FrontendKey;

use crate::{
    datapath::{Datapath, Error, Stale},
    model::{Changes, Node, Noted, ServiceName, State, Update},
    observe::{health_check::HealthChecks, metrics::Pass},
    options::PodDetection,
    plan::{
        group::{self, GroupKey, GroupPlan, NodeContext, PlanOptions},
        node_ports::NodePortAddresses,
        tables::Tables,
    },
    reconcile::{Reconciler, Work},
};
use checks::Checks;
use networks::ServiceNetworks;
pub use views::StatusInput;

/// What the engine needs to know from the start.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// This node's name.
    pub node: Arc<str>,
    /// What the plan depends on.
    pub plan: PlanOptions,
    /// Where NodePorts answer.
    pub node_ports: NodePortAddresses,
    /// Networks that ClusterIPs come from, besides the ServiceCIDRs.
    pub service_cidrs: Vec<IpNet>,
}

/// State, plan and tables.
pub struct Engine<D> {
    options: EngineOptions,
    state: State,
    tables: Tables,
    reconciler: Reconciler<D>,
    /// Addresses of this host's devices.
    interfaces: Vec<IpAddr>,
    /// Where the source asks.
    api_servers: BTreeSet<SocketAddr>,
    context: NodeContext,
    checks: Checks,
    networks: ServiceNetworks,
    dirty: BTreeSet<ServiceName>,
    /// For metrics.
    noted: Noted,
    /// Everything is to be planned anew: the first time, and when the context changed.
    all_dirty: bool,
    /// The first full pass after the sources were in step is done.
    is_ready: bool,
    /// What is no longer wanted is still to be removed.
    prune_due: bool,
    /// Groups to be written: touched by the plan, or failed before.
    pending: BTreeSet<Arc<GroupKey>>,
    /// Entries for unknown ports to be written: wanted or not.
    pending_unknown_ports: BTreeMap<FrontendKey, bool>,
    /// The last pass met an error other than a full map.
    is_failing: bool,
}

impl<D: Datapath> Engine<D> {
    /// Over tables as a predecessor left them.
    pub fn new(options: EngineOptions, reconciler: Reconciler<D>) -> Self {
        Self {
            options,
            state: State::default(),
            tables: Tables::default(),
            reconciler,
            interfaces: Vec::new(),
            api_servers: BTreeSet::new(),
            context: NodeContext::default(),
            checks: Checks::default(),
            networks: ServiceNetworks::new(),
            dirty: BTreeSet::new(),
            noted: Noted::default(),
            all_dirty: true,
            is_ready: false,
            prune_due: true,
            pending: BTreeSet::new(),
            pending_unknown_ports: BTreeMap::new(),
            is_failing: false,
        }
    }

    /// Takes in an update of a source; [`flush`](Self::flush) acts on it.
    pub fn update(&mut self, update: Update) {
        let Changes { services, nodes, service_cidrs, noted } = self.state.apply(update);
        self.networks.is_dirty |= service_cidrs;
        let is_api = services.iter().any(context::is_of_the_api);
        self.dirty.extend(services);
        self.noted.add(noted);
        if nodes || is_api {
            self.refresh_context();
        }
    }

    /// What metrics count, since the last call.
    pub fn take_noted(&mut self) -> Noted {
        std::mem::take(&mut self.noted)
    }

    /// Takes in the addresses of this host's devices.
    pub fn set_interfaces(&mut self, addresses: Vec<IpAddr>) {
        self.interfaces = addresses;
        self.refresh_context();
    }

    /// Takes in where the source asks API servers: no Service gets that.
    pub fn set_api_servers(&mut self, addresses: BTreeSet<SocketAddr>) {
        self.api_servers = addresses;
        self.refresh_context();
    }

    /// Plans and writes what changed. Nothing happens before every source has delivered its first complete list: a
    /// restart must not shrink what the kernel has (invariant 3). Returns whether everything is written.
    pub fn flush(&mut self) -> bool {
        if !self.state.is_synced() {
            return true;
        }
        self.is_failing = false;
        self.plan();
        self.write();
        if self.prune_due {
            let unknown_ports = self.tables.unknown_ports().collect();
            match self.reconciler.prune(&|key| self.tables.plan(key).is_some(), &unknown_ports) {
                Ok(()) => (self.prune_due, self.is_ready) = (false, true),
                Err(error) => {
                    self.is_failing = true;
                    tracing::warn!(%error, "cannot remove what is no longer wanted; trying again");
                }
            }
        }
        !self.is_behind()
    }

    /// Something failed and is to be tried again.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        !self.pending.is_empty()
            || !self.pending_unknown_ports.is_empty()
            || (self.state.is_synced() && (self.prune_due || self.networks.is_dirty))
    }

    /// What the next [`flush`](Self::flush) has to do; `None` = nothing, or nothing yet.
    #[must_use]
    pub fn due(&self) -> Option<Pass> {
        if !self.state.is_synced() {
            return None;
        }
        let is_full = self.all_dirty || self.prune_due;
        let is_partial = !self.dirty.is_empty() || self.is_behind();
        is_full.then_some(Pass::Full).or(is_partial.then_some(Pass::Partial))
    }

    /// The last [`flush`](Self::flush) met an error that another try may mend. A full map is none: what fits works, and
    /// neither a restart of the agent nor another node would do better.
    #[must_use]
    pub const fn is_failing(&self) -> bool {
        self.is_failing
    }

    /// Every source has delivered its first complete list.
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.state.is_synced()
    }

    /// The first full pass after that is in the kernel.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// This node, as its object says; `None` = there is no object.
    #[must_use]
    pub fn node(&self) -> Option<&Node> {
        self.state.node(&self.options.node)
    }

    /// The tables are read again and compared with the plan by the next [`flush`](Self::flush).
    pub fn resync(&mut self) {
        if let Err(error) = self.reconciler.read() {
            tracing::warn!(%error, "cannot read the tables again; comparing with what was read before");
        }
        (self.prune_due, self.networks.is_dirty) = (true, true);
        self.pending.extend(self.tables.groups().map(|(key, _)| key.clone()));
        self.pending_unknown_ports.extend(self.tables.unknown_ports().map(|key| (key, true)));
    }

    /// Gives back what has rested, once every source has delivered its first complete list: until then nothing shows
    /// that a predecessor's tables were read aright (invariant 3). Returns whether something still rests.
    pub fn reclaim(&mut self) -> bool {
        if self.state.is_synced()
            && let Err(error) = self.reconciler.reclaim()
        {
            tracing::warn!(%error, "cannot release freed entries; trying again");
        }
        self.reconciler.is_resting()
    }

    /// Whether something freed rests that [`reclaim`](Self::reclaim) may give back.
    #[must_use]
    pub fn is_resting(&self) -> bool {
        self.state.is_synced() && self.reconciler.is_resting()
    }

    /// Sockets to be closed, since the last call.
    pub fn take_stale(&mut self) -> Vec<Stale> {
        self.reconciler.take_stale()
    }

    /// Networks whose addresses are pods', and whether they are this node's.
    #[must_use]
    pub fn pod_ranges(&self, detection: &PodDetection) -> BTreeMap<IpNet, bool> {
        let others = |networks: &mut dyn Iterator<Item = IpNet>| networks.map(|net| (net, false)).collect();
        let mut ranges: BTreeMap<_, _> = match detection {
            PodDetection::AllNodes => others(&mut self.state.nodes().flat_map(|node| node.pod_cidrs.iter().copied())),
            PodDetection::Within(networks) => others(&mut networks.iter().copied()),
            PodDetection::ThisNode => BTreeMap::new(),
            PodDetection::Bridge(_) | PodDetection::Prefix(_) | PodDetection::Never => return BTreeMap::new(),
        };
        ranges.extend(self.context.pod_cidrs.iter().map(|net| (*net, true)));
        ranges
    }

    /// Some Service leaves it to the packet path which of this node's pods it admits.
    #[must_use]
    pub const fn judges_pods_by_packet(&self) -> bool {
        self.tables.judges_pods_by_packet()
    }

    /// Clients outside the cluster have something to dial.
    #[must_use]
    pub const fn serves_outsiders(&self) -> bool {
        self.tables.serves_outsiders()
    }

    /// There is an SCTP Service.
    #[must_use]
    pub const fn serves_sctp(&self) -> bool {
        self.tables.serves_sctp()
    }

    /// The tables, for tests that stir them.
    pub const fn reconciler_mut(&mut self) -> &mut Reconciler<D> {
        &mut self.reconciler
    }

    /// Lets go of the tables, as a killed agent does.
    pub fn into_datapath(self) -> D {
        self.reconciler.into_datapath()
    }

    /// The tables, to read.
    pub const fn datapath(&self) -> &D {
        self.reconciler.datapath()
    }

    /// The healthCheckNodePorts to be served, if they have changed since the last call.
    pub fn take_health_checks(&mut self) -> Option<HealthChecks> {
        self.checks.take()
    }

    fn refresh_context(&mut self) {
        let context = context::of(&self.options, &self.state, &self.interfaces, &self.api_servers);
        self.checks.set_addresses(&self.options, &context.addresses, &self.interfaces);
        if context != self.context {
            self.context = context;
            self.all_dirty = true;
        }
    }

    fn plan(&mut self) {
        let dirty = std::mem::take(&mut self.dirty);
        let services: Vec<ServiceName> = if std::mem::take(&mut self.all_dirty) {
            let mut all: BTreeSet<_> = self.state.services().map(|s| s.name.clone()).collect();
            all.extend(dirty); // those that went
            all.into_iter().collect()
        } else {
            dirty.into_iter().collect()
        };
        for name in services {
            self.networks.update(&name, self.state.service(&name));
            let plans = self.state.service(&name).map_or_else(Vec::new, |service| {
                group::plan(service, self.state.slices(&name), &self.context, &self.options.plan)
            });
            self.checks.update(&name, &self.state, &self.options.node);
            self.warn_of_kept(&name, &plans);
            let touched = self.tables.update(&name, plans);
            self.pending.extend(touched.groups);
            self.pending_unknown_ports.extend(touched.unknown_ports_added.into_iter().map(|key| (key, true)));
            self.pending_unknown_ports.extend(touched.unknown_ports_removed.into_iter().map(|key| (key, false)));
        }
    }

    /// Once for each: that a Service asks for what others must keep is a mistake or an attack.
    fn warn_of_kept(&self, service: &ServiceName, plans: &[GroupPlan]) {
        let known: Vec<_> = self.tables.of_service(service).flat_map(|(_, plan)| &plan.kept).collect();
        for asked in plans.iter().flat_map(|plan| &plan.kept).filter(|asked| !known.contains(asked)) {
            let (key, _, keeper) = asked;
            let address = SocketAddr::new(key.addr.into(), u16::from_be(key.port));
            tracing::warn!(%service, %address, "the Service does not get an address that it asks for: {keeper}");
        }
    }

    fn write(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        let work: Vec<Work<'_>> = pending
            .iter()
            .map(|key| Work { key, plan: self.tables.plan(key), frontends: self.tables.owned(key).collect() })
            .collect();
        let known: BTreeMap<&GroupKey, String> =
            pending.iter().filter_map(|key| Some((&**key, self.reconciler.problem(key)?.to_owned()))).collect();
        for (key, error) in self.reconciler.apply(&work) {
            self.is_failing |= !matches!(error, Error::NoSpace { .. });
            // Once for each reason, however often it is tried again.
            if known.get(&key).is_none_or(|before| *before != error.to_string()) {
                tracing::warn!(service = %key.service, port = %key.port_name, protocol = %key.protocol, %error,
                    "cannot program a service; trying again");
            }
            self.pending.insert(Arc::new(key));
        }
        for (key, wanted) in std::mem::take(&mut self.pending_unknown_ports) {
            if let Err(error) = self.reconciler.set_unknown_port(&key, wanted) {
                self.is_failing |= !matches!(error, Error::NoSpace { .. });
                tracing::debug!(%error, "cannot write the entry for an address's unknown ports; trying again");
                self.pending_unknown_ports.insert(key, wanted);
            }
        }
        self.write_networks();
    }

    /// After the frontends, so that an address that is getting one is not dropped in between. Before the ServiceCIDRs
    /// are known, those that a predecessor knew stay.
    fn write_networks(&mut self) {
        if !self.networks.is_dirty {
            return;
        }
        let listed = self.state.service_cidrs();
        let complete = listed.is_some();
        let wanted = self.networks.wanted(&self.options.service_cidrs, listed);
        match self.reconciler.datapath_mut().set_service_networks(&wanted, complete) {
            Ok(()) => self.networks.is_dirty = false,
            Err(error) => {
                self.is_failing |= !matches!(error, Error::NoSpace { .. });
                tracing::warn!(%error, "cannot write the networks that ClusterIPs come from; trying again");
            }
        }
    }
}

#[cfg(test)]
mod tests;
