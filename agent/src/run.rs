//! Wiring: what the agent consists of, in the order in which it may be refused.

use std::{collections::BTreeMap, io, path::Path, thread};

use anyhow::{Context as _, bail};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, oneshot, watch},
    task::JoinHandle,
};

use crate::{
    api::{self, ApiHandle},
    config,
    datapath::{
        Datapath, Stale,
        host::{addresses, discard, sockets::Closer},
        programs::{
            features::Features,
            load::{self, Switches},
        },
        tables::{
            filling::{self, Filling},
            kernel::Kernel,
            migrate::{Legacy, Tables},
            pins::Pins,
        },
    },
    engine::{Engine, EngineOptions},
    event_loop::EventLoop,
    exit::Refused,
    lifecycle::{
        descriptors,
        hooks::{HookOptions, Hooks},
        panics,
        preflight::{Ready, preflight},
        privileges,
        traces::Traces,
        upkeep::Upkeep,
    },
    observe::{
        events::{self, Event},
        health::SharedHealth,
        health_check::{self, HealthChecks, Http},
        metrics::{Meter, Metrics},
        server::{self, metrics::Exporter, slis::Slis},
    },
    options::{AgentOptions, FromPods, SourceOptions},
    reconcile::Reconciler,
    source::{self, SourceState, convert::ConvertOptions},
};

/// Runs the agent until it is told to stop. What is attached stays.
///
/// # Errors
/// [`Refused`] when this host cannot run the agent; else what broke.
pub fn run(options: AgentOptions) -> anyhow::Result<()> {
    if let Err(error) = descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let host = preflight(&options)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start tokio")?;
    runtime.block_on(serve(options, host))
}

async fn serve(options: AgentOptions, host: Ready) -> anyhow::Result<()> {
    let Ready { locks: _locks, traces, cgroup_root, mut warnings } = host;
    let mut panics = panics::follow();
    let (mut term, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let silence = discard::ensure().await;
    if let Err(error) = &silence {
        let meaning = "connections that should be dropped silently fail with ETIMEDOUT";
        warnings.push(format!("cannot make the discard device, so {meaning}: {error:#}"));
    }
    let running = match start(&options, &cgroup_root, traces, silence.is_ok(), warnings).await {
        Ok(running) => running,
        Err(error) => {
            if silence.is_ok_and(|found| found == discard::Found::Missing) {
                let _ = discard::remove(discard::DEVICE, false).await; // the refusal is what matters
            }
            return Err(Refused::because(&error).into());
        }
    };
    let bpffs = options.paths.bpffs.display();
    tracing::info!(node = options.node_name, cgroup = %cgroup_root.display(), %bpffs, "sheave is running");

    tokio::select! {
        biased;
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
        Some(panic) = panics.recv() => bail!("{panic}; that is a bug, and the kernel keeps what it has"),
        error = running.late.attach() => return Err(error),
        _ = running.ended => bail!("the engine ended by itself; the kernel keeps what it has"),
        ended = running.api => bail!("the agent's socket failed: {ended:?}"),
    }
    drop(running.stop);
    if running.engine.join().is_err() {
        bail!("the engine crashed, which is a bug; the kernel keeps what it has");
    }
    tracing::info!("sheave is stopping; the kernel keeps forwarding");
    Ok(())
}

/// What [`serve`] waits for and ends.
struct Running {
    api: JoinHandle<io::Result<()>>,
    engine: thread::JoinHandle<()>,
    /// Closed when the engine has ended.
    ended: oneshot::Receiver<()>,
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
    let closer = Closer::open(&pins, cgroup_root, options.close_tcp, options.host_sockets_only)?;
    let closer = start_closer(closer, metrics.clone())?;
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
    let events = EventLoop {
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
    let (alive, ended) = oneshot::channel();
    let work = move || {
        events.run();
        drop(alive);
    };
    let engine = thread::Builder::new().name("engine".to_owned()).spawn(work).context("cannot start the engine")?;

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
    Ok(Running { api, engine, ended, stop, late: Late { hooks: late, version, health } })
}

impl Late {
    /// Ends only when attaching fails.
    async fn attach(mut self) -> anyhow::Error {
        if let Some(hooks) = self.hooks {
            while !self.health.with(|health| health.is_ready()) {
                if self.version.changed().await.is_err() {
                    // The engine has ended. Programs over tables that it did not fill would serve nobody.
                    return std::future::pending().await;
                }
            }
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
