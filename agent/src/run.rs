//! Wiring and the event loop.
//!
//! The engine lives in a thread of its own and is the only writer; sources, the API socket and netlink run on the
//! main thread and reach it through channels. Every wake-up is one arm of one `select!`.

use std::{collections::BTreeMap, io, net::IpAddr, path::Path, thread};

use anyhow::Context as _;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
    time::{Instant, sleep_until},
};

use crate::{
    api::{self, ApiHandle, Request},
    config,
    datapath::{
        Datapath, Stale,
        host::{addresses, discard, sockets::Closer},
        programs::{
            load::{self, Features, Switches},
            packets::{Control, Orders},
        },
        tables::{
            filling::{self, Filling},
            kernel::Kernel,
            migrate::{Legacy, Tables},
            pins::Pins,
        },
    },
    engine::{Engine, EngineOptions, StatusInput},
    exit::Refused,
    lifecycle::{
        hooks::{HookOptions, Hooks},
        preflight::{Ready, preflight},
        privileges,
        traces::Traces,
        upkeep::Upkeep,
    },
    model::Family,
    observe::{
        events::{self, Event},
        health::{Moment, SharedHealth},
        health_check::{self, HealthChecks, Http},
        metrics::{Meter, Metrics},
        server::{self, metrics::Exporter, slis::Slis},
    },
    options::{AgentOptions, FromPods, PodDetection, SourceOptions},
    reconcile::Reconciler,
    source::{self, SourceEvent, SourceState, convert::ConvertOptions},
    timers::Timers,
    view::FeatureView,
};

/// Runs the agent until it is told to stop. What is attached stays.
///
/// # Errors
/// [`Refused`] when this host cannot run the agent; else what broke.
pub fn run(options: AgentOptions) -> anyhow::Result<()> {
    let host = preflight(&options)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start tokio")?;
    runtime.block_on(serve(options, host))
}

async fn serve(options: AgentOptions, host: Ready) -> anyhow::Result<()> {
    let Ready { locks: _locks, traces, cgroup_root, mut warnings } = host;
    let (mut term, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let silence = discard::ensure().await;
    if let Err(error) = &silence {
        let meaning = "connections that should be dropped silently fail with ETIMEDOUT";
        warnings.push(format!("cannot make the discard device, so {meaning}: {error:#}"));
    }
    let running = match start(&options, &cgroup_root, traces, silence.is_ok(), warnings).await {
        Ok(running) => running,
        Err(error) => {
            if silence.is_ok_and(|made| made) {
                let _ = discard::remove(discard::DEVICE, false).await; // the refusal is what matters
            }
            return Err(Refused::because(&error).into());
        }
    };
    let bpffs = options.paths.bpffs.display();
    tracing::info!(node = options.node_name, cgroup = %cgroup_root.display(), %bpffs, "sheave is running");

    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        error = running.late.attach() => return Err(error),
        ended = running.api => tracing::error!(?ended, "the agent's socket failed"),
    }
    drop(running.stop);
    if running.engine.join().is_err() {
        anyhow::bail!("the engine crashed, which is a bug; the kernel keeps what it has");
    }
    tracing::info!("sheave is stopping; the kernel keeps forwarding");
    Ok(())
}

/// What [`serve`] waits for and ends.
struct Running {
    api: JoinHandle<io::Result<()>>,
    engine: thread::JoinHandle<()>,
    stop: oneshot::Sender<()>,
    late: Late,
}

/// Programs that are attached once the tables are filled, if there are any.
struct Late {
    hooks: Option<Hooks>,
    version: watch::Receiver<u64>,
    health: SharedHealth,
}

/// Everything that may be refused comes first: up to the attaching, all that is made can be taken back.
async fn start(
    options: &AgentOptions,
    cgroup_root: &Path,
    mut traces: Traces,
    has_discard: bool,
    mut warnings: Vec<String>,
) -> anyhow::Result<Running> {
    let features = Features::probe(has_discard);
    let pins = Pins::below(&options.paths.bpffs);
    let switches = Switches {
        host_only: options.host_sockets_only,
        loopback_node_ports: options.plan.loopback_node_ports,
        bind_protection: options.bind_protection,
        track_tcp: options.close_tcp,
        packets: options.packets.switches,
    };
    let legacy = Legacy::find(&pins)?;
    let tables = legacy.take_maps(&pins, &options.limits)?;
    let loaded = load::load(&pins, &options.limits, switches, features)?;
    let (metrics, upkeep) = (Metrics::default(), Upkeep::default());
    let takes_over = !legacy.is_empty();
    let hooks = HookOptions {
        legacy,
        cgroup_root: cgroup_root.to_owned(),
        pins: pins.clone(),
        bind_protection: options.bind_protection,
        has_discard,
        packets: options.packets.clone(),
        metrics: metrics.clone(),
        series: options.max_metrics_series,
        upkeep: upkeep.clone(),
    };
    let (hooks, packets) = Hooks::load(loaded, hooks)?;
    // Before there are other threads: each has capabilities of its own.
    if let Err(error) = privileges::give_up() {
        tracing::warn!(%error, "cannot give up privileges that are no longer needed");
    }
    let reconciler = Reconciler::adopt(Kernel::open(&pins)?)?;
    metrics.set_flow_capacity(reconciler.datapath().limits().conntrack);
    let closer = start_closer(Closer::open(&pins, cgroup_root, options.close_tcp)?, metrics.clone())?;
    let interfaces = addresses::follow().await.context("cannot follow this host's addresses")?;
    let socket = options.paths.socket();
    let listener = api::bind(&socket)
        .with_context(|| format!("cannot open the agent's socket {}; see --run-dir", socket.display()))?;
    let (source_events, told) = mpsc::unbounded_channel();
    let (warn, warned) = events::channel();
    start_source(options, source_events, warned, metrics.clone()).await?;

    if takes_over {
        traces.keep(); // links of another version become ours: nothing of that may be taken back
    }
    let late = match tables {
        Tables::Valid => {
            warnings.extend(hooks.attach().await?);
            None
        }
        Tables::Afresh => Some(hooks),
    };
    for warning in &warnings {
        tracing::warn!("{warning}");
    }

    let mut plan = options.plan.clone();
    plan.judge_pods_by_packet &= packets.is_some();
    // Bind protection knows a wildcard bind by the NodePort's loopback entry; the programs serve it only when asked.
    plan.loopback_node_ports |= options.bind_protection;
    let engine = Engine::new(
        EngineOptions {
            node: options.node_name.as_str().into(),
            plan,
            node_ports: options.node_port_addresses.clone(),
            service_cidrs: options.service_cidrs.clone(),
        },
        reconciler,
    );
    let (health_checks, checks_told) = watch::channel(HealthChecks::default());
    let (requests, asked) = mpsc::channel(16);
    let (bump, version) = watch::channel(0);
    let (stop, stopped) = oneshot::channel();
    let health = SharedHealth::default();
    let filling = Filling::default();
    filling::start(&pins, filling.clone()).context("cannot count the entries of maps")?;
    let core = Core {
        engine,
        told,
        asked,
        interfaces,
        stopped,
        bump,
        source: SourceState::default(),
        problems: BTreeMap::new(),
        warnings,
        packets,
        detection: options.packets.detection.clone(),
        sctp_by_packet: options.packets.from_pods == FromPods::Sctp,
        closer,
        features: features.views(),
        health: health.clone(),
        upkeep: upkeep.clone(),
        filling: filling.clone(),
        meter: Meter::new(metrics.clone()),
        health_checks,
        needs_node: matches!(options.source, SourceOptions::Kubernetes { .. }),
    };
    let engine = thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || core.run())
        .context("cannot start the engine")?;

    let handle = ApiHandle { requests: requests.clone(), version: version.clone() };
    let api = tokio::spawn(api::keep(socket, listener, handle, upkeep));
    warn.send(Event::starting());
    if let Some(address) = options.healthz_bind_address {
        let router = server::health::router(&health, &metrics);
        tokio::spawn(server::serve(server::HEALTH, address, router, warn.clone()));
    }
    if let Some(address) = options.metrics_bind_address {
        let exporter = Exporter {
            metrics,
            requests,
            series: options.max_metrics_series,
            configuration: config::json(&options.effective).to_string(),
            slis: Slis::default(),
        };
        tokio::spawn(server::serve(server::METRICS, address, server::metrics::router(exporter), warn.clone()));
    }
    if let Some(sysctls) = options.conntrack.clone() {
        tokio::spawn(sysctls.apply_when_there());
    }
    tokio::spawn(health_check::follow(Http { health: health.clone() }, checks_told, warn));
    traces.keep();
    Ok(Running { api, engine, stop, late: Late { hooks: late, version, health } })
}

impl Late {
    /// Ends only when attaching fails.
    async fn attach(mut self) -> anyhow::Error {
        if let Some(hooks) = self.hooks {
            while !self.health.with(|health| health.is_ready()) && self.version.changed().await.is_ok() {}
            match hooks.attach().await {
                Ok(warnings) => warnings.iter().for_each(|warning| tracing::warn!("{warning}")),
                Err(error) => {
                    return error.context("cannot attach the programs; those of the previous version keep running");
                }
            }
        }
        std::future::pending().await
    }
}

/// Closing sockets means entering every network namespace, so it has a thread of its own.
fn start_closer(mut closer: Closer, metrics: Metrics) -> anyhow::Result<std::sync::mpsc::Sender<Vec<Stale>>> {
    let (send, receive) = std::sync::mpsc::channel::<Vec<Stale>>();
    let work = move || {
        while let Ok(mut stale) = receive.recv() {
            stale.extend(receive.try_iter().flatten()); // one look for all that came meanwhile
            let closed = closer.close(&stale);
            metrics.closed_sockets(closed.sockets as u64);
            if closed.sockets > 0 {
                tracing::info!(sockets = closed.sockets, "closed sockets whose backend is gone");
            }
            if closed.unreachable > 0 {
                tracing::warn!(
                    namespaces = closed.unreachable,
                    "cannot close sockets in some network namespaces: that needs CAP_SYS_ADMIN"
                );
            }
        }
    };
    thread::Builder::new().name("closer".to_owned()).spawn(work).context("cannot start the closer")?;
    Ok(send)
}

async fn start_source(
    options: &AgentOptions,
    events: source::Sender,
    told: mpsc::UnboundedReceiver<Event>,
    metrics: Metrics,
) -> anyhow::Result<()> {
    let convert = ConvertOptions { proxy_name: None, skip: options.skip_services.clone() };
    match &options.source {
        SourceOptions::Manifests(directory) => source::manifests::start(directory, convert, events),
        SourceOptions::Kubernetes { kubeconfig, api_servers } => {
            let access = source::kube::Access { kubeconfig: kubeconfig.clone(), servers: api_servers.clone(), metrics };
            let cluster = source::kube::start(access, &convert, events).await?;
            tokio::spawn(source::events::post(cluster, options.node_name.clone(), told));
            Ok(())
        }
    }
}

/// What the engine's thread owns.
struct Core<D> {
    engine: Engine<D>,
    told: mpsc::UnboundedReceiver<SourceEvent>,
    asked: mpsc::Receiver<Request>,
    interfaces: watch::Receiver<Vec<IpAddr>>,
    stopped: oneshot::Receiver<()>,
    bump: watch::Sender<u64>,
    source: SourceState,
    /// By object.
    problems: BTreeMap<String, String>,
    warnings: Vec<String>,
    closer: std::sync::mpsc::Sender<Vec<Stale>>,
    features: Vec<FeatureView>,
    /// Of the packet path, if there is one.
    packets: Option<Control>,
    detection: PodDetection,
    /// Pods reach SCTP Services packet by packet.
    sctp_by_packet: bool,
    health: SharedHealth,
    upkeep: Upkeep,
    filling: Filling,
    meter: Meter,
    /// The healthCheckNodePorts to be served.
    health_checks: watch::Sender<HealthChecks>,
    /// Whether a missing Node object makes this node unhealthy: in a cluster it does, with manifests it is normal.
    needs_node: bool,
}

impl<D: Datapath + Counters> Core<D> {
    fn run(mut self) {
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
                Some(event) = self.told.recv() => {
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
                let orders = Orders {
                    pods,
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
        StatusInput {
            source: self.source.source.clone(),
            source_problems: self.source.problems.clone(),
            warnings: self.warnings.iter().chain(self.problems.values()).cloned().collect(),
            losses: self.upkeep.problems(),
            filling: self.filling.views(&self.engine.datapath().limits()),
            repairs: self.upkeep.repairs(),
            features: self.features.clone(),
            counters: self.engine.datapath().counters(),
        }
    }
}

/// What the programs counted.
pub trait Counters {
    /// Sums over all CPUs, by name.
    fn counters(&self) -> BTreeMap<String, u64>;
}

impl Counters for Kernel {
    fn counters(&self) -> BTreeMap<String, u64> {
        self.counts().into_iter().map(|(counter, count)| (counter.name().to_owned(), count)).collect()
    }
}
