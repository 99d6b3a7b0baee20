//! The event loop: whatever happens wakes the engine's thread, which plans, writes, and tells others.
//!
//! The engine is the only writer of the tables. Sources, the API socket and netlink run on the main thread and reach it
//! through channels. Every wake-up is one arm of one `select!`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use crate::{
    api::Request,
    datapath::{
        Datapath, Stale,
        programs::packets::{Control, Orders},
        tables::{filling::Filling, kernel::Kernel},
    },
    engine::{Engine, StatusInput},
    lifecycle::upkeep::Upkeep,
    model::Family,
    observe::{
        health::{Moment, SharedHealth},
        health_check::HealthChecks,
        metrics::Meter,
    },
    options::PodDetection,
    source::{SourceEvent, SourceState},
    timers::Timers,
    view::FeatureView,
};

/// What the engine's thread owns.
pub struct EventLoop {
    /// What is wanted, and what the kernel has.
    pub engine: Engine<Kernel>,
    /// What sources tell.
    pub told: mpsc::UnboundedReceiver<SourceEvent>,
    /// What the agent's socket and scrapers ask.
    pub asked: mpsc::Receiver<Request>,
    /// This host's addresses.
    pub interfaces: watch::Receiver<Vec<IpAddr>>,
    /// Ends the loop.
    pub stopped: oneshot::Receiver<()>,
    /// Counts the turns, for those who watch.
    pub bump: watch::Sender<u64>,
    /// How the source is.
    pub source: SourceState,
    /// What is wrong with objects, by object.
    pub problems: BTreeMap<String, String>,
    /// What is wrong with this host, a sentence each.
    pub warnings: Vec<String>,
    /// Closes sockets whose peer is gone.
    pub closer: std::sync::mpsc::Sender<Vec<Stale>>,
    /// What this kernel has.
    pub features: Vec<FeatureView>,
    /// Of the packet path, if there is one.
    pub packets: Option<Control>,
    /// Who counts as a pod.
    pub detection: PodDetection,
    /// Pods reach SCTP Services packet by packet.
    pub sctp_by_packet: bool,
    /// What kubelets and load balancers see.
    pub health: SharedHealth,
    /// What was detached or unpinned.
    pub upkeep: Upkeep,
    /// How full maps are.
    pub filling: Filling,
    /// What is measured.
    pub meter: Meter,
    /// The healthCheckNodePorts to be served.
    pub health_checks: watch::Sender<HealthChecks>,
    /// Whether a missing Node object makes this node unhealthy: in a cluster it does, with manifests it is normal.
    pub needs_node: bool,
}

impl EventLoop {
    /// Until it is told to stop, or the source ends.
    pub fn run(mut self) {
        match tokio::runtime::Builder::new_current_thread().enable_time().build() {
            Ok(runtime) => runtime.block_on(self.events()),
            Err(error) => tracing::error!(%error, "cannot start the engine's timers"),
        }
    }

    async fn events(&mut self) {
        let addresses = self.interfaces.borrow_and_update().clone();
        self.engine.set_interfaces(addresses);
        let mut timers = Timers::new(Instant::now());
        loop {
            tokio::select! {
                _ = &mut self.stopped => return,
                event = self.told.recv() => {
                    let Some(event) = event else { return tracing::error!("the source ended, which is a bug") };
                    self.take(event);
                    // What came together is planned together.
                    while let Ok(event) = self.told.try_recv() {
                        self.take(event);
                    }
                }
                changed = self.interfaces.changed(), if self.interfaces.has_changed().is_ok() => {
                    if changed.is_ok() {
                        let addresses = self.interfaces.borrow_and_update().clone();
                        self.engine.set_interfaces(addresses);
                    }
                }
                Some(request) = self.asked.recv() => {
                    self.answer(request);
                    continue;
                }
                () = sleep_until(timers.next()) => {}
            }
            self.health.with(|health| health.requested(&Family::ALL, Moment::now()));
            self.meter.requested();
            self.meter.noted(&self.engine.take_noted());
            let now = Instant::now();
            if timers.is_full_pass_due(now) {
                self.engine.resync();
            }
            if timers.is_rest_over(now) {
                self.engine.reclaim();
            }
            let (due, began) = (self.engine.due(), Instant::now());
            let done = self.engine.flush();
            if let Some(pass) = due {
                self.meter.passed(pass, began.elapsed(), !self.engine.is_failing());
            }
            timers.passed(now, done, self.engine.is_resting());
            let stale = self.engine.take_stale();
            if !stale.is_empty() {
                drop(self.closer.send(stale)); // the closer ends only when this loop does
            }
            if let Some(packets) = &mut self.packets
                && self.engine.is_synced()
            {
                let pods = self.engine.pod_ranges(&self.detection);
                let by_packet = self.sctp_by_packet && self.engine.serves_sctp();
                let node = self.engine.node().map_or_else(BTreeSet::new, |n| n.addresses.iter().copied().collect());
                let orders = Orders {
                    pods,
                    node,
                    serves_outsiders: self.engine.serves_outsiders(),
                    pods_dial: self.engine.judges_pods_by_packet() || by_packet,
                };
                packets.order(orders).await;
            }
            if let Some(checks) = self.engine.take_health_checks() {
                self.health_checks.send_replace(checks);
            }
            self.tell_health();
            self.bump.send_modify(|version| *version += 1);
        }
    }

    /// Both families are written together. Before the first complete lists nothing is, so nothing is finished.
    fn tell_health(&self) {
        let eligible = self.engine.node().map_or(!self.needs_node, |node| !node.going_away);
        self.health.with(|health| {
            health.set_eligible(eligible);
            if self.engine.is_ready() {
                health.set_ready();
            }
            if self.engine.is_synced() && !self.engine.is_failing() {
                health.finished(&Family::ALL, Moment::now());
            }
        });
    }

    fn take(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Update(update) => self.engine.update(update),
            SourceEvent::ApiServers(addresses) => self.engine.set_api_servers(addresses),
            SourceEvent::Problem { object, message } => {
                tracing::warn!(object, "{message}");
                self.problems.insert(object, message);
            }
            SourceEvent::Resolved { object } => {
                tracing::info!(object, "the object is valid again, or gone");
                self.problems.remove(&object);
            }
            SourceEvent::State(state) => {
                if state.problems.is_empty() {
                    tracing::info!(source = state.source, "the source is up to date");
                }
                for problem in state.problems.iter().filter(|p| !self.source.problems.contains(p)) {
                    tracing::warn!(source = state.source, "{problem}");
                }
                self.source = state;
            }
        }
    }

    /// The asker may have gone away, which does not matter.
    fn answer(&self, request: Request) {
        match request {
            Request::Services { complete: true, .. } if !self.engine.is_synced() => {}
            Request::Services { complete: _, reply } => drop(reply.send(self.engine.services())),
            Request::Status(reply) => drop(reply.send(self.engine.status(self.status()))),
            Request::Metrics { series, reply } => drop(reply.send(self.engine.snapshot(self.status(), series))),
        }
    }

    /// What the engine does not know.
    fn status(&self) -> StatusInput {
        let counts = self.engine.datapath().counts().into_iter();
        let counters = counts.map(|(counter, count)| (counter.name().to_owned(), count)).collect();
        StatusInput {
            source: self.source.source.clone(),
            source_problems: self.source.problems.clone(),
            warnings: self.warnings.iter().chain(self.problems.values()).cloned().collect(),
            losses: self.upkeep.problems(),
            filling: self.filling.views(&self.engine.datapath().limits()),
            repairs: self.upkeep.repairs(),
            features: self.features.clone(),
            counters,
        }
    }
}
