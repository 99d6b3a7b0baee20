//! How full the hashes are that the programs fill. The kernel does not count the elements of an LRU hash, and silently
//! evicts old ones when it is full; so we count them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use aya::{Pod, maps::MapData};
use sheave_ebpf::{
    affinity::AffinityKey,
    conntrack::{Flow, Tuple},
    maps,
    socket::{Peer, PeerKey},
};

use crate::datapath::{
    Error, Limits, Result,
    tables::{batch, pinned, pins::Pins},
};
use crate::view::MapView;

/// Between two counts.
const PAUSE: Duration = Duration::from_secs(30);
/// The pause is at least so many times as long as the count before: large tables cost two percent of one CPU.
const REST: u32 = 50;

/// What was counted last. A clone shows the same.
#[derive(Clone, Debug, Default)]
pub struct Filling(Arc<[AtomicU64; 3]>);

impl Filling {
    /// As `status` and metrics show it.
    #[must_use]
    pub fn views(&self, limits: &Limits) -> Vec<MapView> {
        let maps = [
            (maps::AFFINITY, limits.affinity, "--max-affinity"),
            (maps::PEERS, limits.peers, "--max-peers"),
            (maps::CONNTRACK, limits.conntrack, "--max-conntrack"),
        ];
        let view = |((name, capacity, flag), used): ((&str, u32, &str), &AtomicU64)| MapView {
            name: name.to_owned(),
            used: used.load(Ordering::Relaxed),
            capacity: capacity.into(),
            flag: flag.to_owned(),
        };
        maps.into_iter().zip(&*self.0).map(view).collect()
    }
}

/// Counts again and again, in a thread of its own, for as long as the agent lives.
///
/// # Errors
/// When a map is not there, or no thread can be started.
pub fn start(pins: &Pins, filling: Filling) -> anyhow::Result<()> {
    let open = |name| pinned::bare(pins, name);
    let (affinity, peers, conntrack) = (open(maps::AFFINITY)?, open(maps::PEERS)?, open(maps::CONNTRACK)?);
    let work = move || {
        loop {
            let began = Instant::now();
            let counts = [
                count::<AffinityKey, u64>(&affinity),
                count::<PeerKey, Peer>(&peers),
                count::<Tuple, Flow>(&conntrack),
            ];
            for (shown, counted) in filling.0.iter().zip(counts) {
                match counted {
                    Ok(entries) => shown.store(entries, Ordering::Relaxed),
                    Err(error) => tracing::debug!(%error, "cannot count the entries of a map"),
                }
            }
            thread::sleep(PAUSE.max(began.elapsed() * REST));
        }
    };
    thread::Builder::new().name("filling".to_owned()).spawn(work)?;
    Ok(())
}

fn count<K: Pod, V: Pod>(map: &MapData) -> Result<u64> {
    let mut entries = 0;
    batch::walk(map, |batch: &[(K, V)]| entries += batch.len() as u64)
        .map_err(|e| Error::kernel("counting entries".to_owned(), e))?;
    Ok(entries)
}
