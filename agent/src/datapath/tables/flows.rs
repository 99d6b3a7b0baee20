//! The flow table in the kernel: reading it, and removing flows that have ended.

use std::{
    collections::BTreeMap,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use aya::maps::{HashMap, Map, MapData, PerCpuArray};
use sheave_ebpf::{
    addr::Addr,
    conntrack::{Flow, ROLE_DIAL, ROLE_RETURN, Tuple},
    counter::Counter,
    maps, meta,
    names::ServiceName,
};

use crate::conntrack::{FlowView, Kinds, ReadFlows, sweep, views};
use crate::datapath::{
    Error, Result,
    tables::{batch, clock, pinned, pins::Pins, words::Words},
};

/// A pass comes this often; in a [crowded](Flows::is_crowded) table, so often.
const PAUSE: Duration = Duration::from_secs(10);
const CROWDED_PAUSE: Duration = Duration::from_secs(1);
/// The pause is at least so many times as long as the pass before: a large table costs two percent of one CPU, one that
/// would otherwise be too small, a sixth.
const REST: u32 = 50;
const CROWDED_REST: u32 = 5;
/// Entries that a flow has at most.
const ENTRIES: u64 = 4;

/// Handles of the pinned maps.
pub struct Flows {
    table: MapData,
    entries: HashMap<MapData, Tuple, Flow>,
    addresses: HashMap<MapData, Addr, u32>,
    names: HashMap<MapData, u32, ServiceName>,
    counters: PerCpuArray<MapData, u64>,
    meta: Words,
    capacity: u64,
}

/// What a pass did.
#[derive(Clone, Debug, Default)]
pub struct Collected {
    /// Entries that stay.
    pub kept: usize,
    /// Entries that are gone, of IPv4 and of IPv6.
    pub removed: [usize; 2],
    /// Flows whose client is hidden behind a port of this node.
    pub hidden: usize,
    /// Flows to each Service port that has some.
    pub services: Vec<(ServiceName, u64)>,
    /// How long it took.
    pub took: Duration,
}

impl ReadFlows for Flows {
    fn flow(&self, tuple: &Tuple) -> Option<Flow> {
        self.entries.get(tuple, 0).ok()
    }
}

impl Flows {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// When one is missing or is not what this build expects.
    pub fn open(pins: &Pins) -> Result<Self> {
        Ok(Self {
            table: pinned::bare(pins, maps::CONNTRACK)?,
            entries: pinned::open(pins, maps::CONNTRACK, Map::LruHashMap)?,
            addresses: pinned::open(pins, maps::NODE_ADDRESSES, Map::HashMap)?,
            names: pinned::open(pins, maps::NAMES, Map::HashMap)?,
            counters: pinned::open(pins, maps::COUNTERS, Map::PerCpuArray)?,
            meta: pinned::words(pins, maps::META)?,
            capacity: pinned::size(pins, maps::CONNTRACK)?.into(),
        })
    }

    /// How many flows were ever made.
    fn opened(&self) -> u64 {
        self.counters.get(&(Counter::PacketForward as u32), 0).map_or(0, |cpus| cpus.iter().sum())
    }

    /// Whether three quarters of the table may be full, given what a pass left and how many flows there had been before it. A full
    /// one pushes out whatever is idle, and that is open connections, while closed ones wait for a pass.
    fn is_crowded(&self, kept: usize, opened: u64) -> bool {
        kept as u64 + ENTRIES * self.opened().saturating_sub(opened) > self.capacity / 4 * 3
    }

    /// One pass over the table, which may be crowded: then what is dispensable goes as well.
    ///
    /// # Errors
    /// What the kernel refused; the next pass does it again.
    pub fn collect(&self, is_crowded: bool) -> Result<Collected> {
        let failed = |what: &str| {
            let what = format!("{what} {}", maps::CONNTRACK);
            move |e| Error::kernel(what, e)
        };
        let began = clock::seconds();
        let own: Vec<Addr> = self.addresses.keys().filter_map(std::result::Result::ok).collect();
        let announced = [meta::MASQUERADED_FLOWS, meta::PLAIN_FLOWS].map(|kind| (kind, self.meta.load(kind)));
        let (mut kinds, mut collected) = (Kinds::default(), Collected::default());
        let mut outcome = Ok(());
        let mut services = BTreeMap::<u32, u64>::new();
        batch::walk(&self.table, |entries: &[(Tuple, Flow)]| {
            for (tuple, flow) in entries {
                let gone = sweep(began, is_crowded, tuple, flow, self);
                if !gone.is_empty() {
                    collected.removed[usize::from(!tuple.src.is_v4())] += gone.len();
                    // Each flow by itself: what lies between judging and deleting is a system call, not a batch.
                    if let Err(e) = batch::delete(&self.table, &gone) {
                        outcome = Err(e);
                    }
                    continue;
                }
                collected.kept += 1;
                kinds.add(flow, |addr| own.contains(addr));
                match flow.role() {
                    ROLE_DIAL => *services.entry(flow.service).or_default() += 1,
                    ROLE_RETURN => collected.hidden += 1,
                    _ => {}
                }
            }
        })
        .map_err(failed("reading"))?;
        outcome.map_err(failed("deleting from"))?;
        for ((kind, word), is_there) in announced.into_iter().zip([kinds.masqueraded, kinds.plain]) {
            // A program announces a flow after it has made it: one that was announced just now may have been missed.
            let is_old = word != 0 && word + 2 < u64::from(began);
            if is_old
                && !is_there
                && let Ok(place) = self.meta.get(kind, 0)
            {
                // Should a program have announced another one meanwhile, its word stands.
                let _ = place.compare_exchange(word, 0, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        // The id is a hint: of a Service that is gone there is no name, and its flows soon are gone, too.
        let named = services.into_iter().filter_map(|(id, count)| Some((self.names.get(&id, 0).ok()?, count)));
        collected.services = named.collect();
        Ok(collected)
    }

    /// Every flow there is.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn list(&self) -> Result<Vec<FlowView>> {
        let mut entries = Vec::new();
        batch::walk(&self.table, |batch: &[(Tuple, Flow)]| entries.extend_from_slice(batch))
            .map_err(|e| Error::kernel(format!("reading {}", maps::CONNTRACK), e))?;
        Ok(views(clock::seconds(), &entries, self, &|service| self.names.get(&service, 0).ok()))
    }
}

/// Starts a thread that makes passes for as long as the agent lives, and reports what each did.
///
/// # Errors
/// When no thread can be started.
pub fn start(flows: Flows, tell: impl Fn(Collected) + Send + 'static) -> std::io::Result<()> {
    let work = move || {
        let (mut kept, mut is_crowded) = (0, false);
        loop {
            let (begun, opened) = (Instant::now(), flows.opened());
            match flows.collect(is_crowded) {
                Ok(collected) => {
                    kept = collected.kept;
                    tell(Collected { took: begun.elapsed(), ..collected });
                }
                Err(error) => tracing::warn!(%error, "cannot clean up the flow table"),
            }
            let took = begun.elapsed();
            let due = Instant::now() + PAUSE.max(took * REST);
            is_crowded = loop {
                thread::sleep(CROWDED_PAUSE.max(took * CROWDED_REST));
                let is_crowded = flows.is_crowded(kept, opened);
                if is_crowded || Instant::now() >= due {
                    break is_crowded;
                }
            };
        }
    };
    thread::Builder::new().name("conntrack".to_owned()).spawn(work).map(drop)
}
