//! Reading the programs' records (`sheave monitor`). They write records only while somebody reads, and only one reader
//! is allowed at a time: a ring buffer has a single read position.

use std::{
    fs::{File, TryLockError},
    ptr,
    time::Duration,
};

use aya::maps::{HashMap, Map, MapData, PerCpuArray, RingBuf};
use sheave_ebpf::{counter::Counter, event::Event, maps, meta, names::ServiceName};

use crate::datapath::{
    Error, Result,
    tables::{clock, pinned, pins::Pins, words::Words},
};

/// The programs stop telling so long after the last [`Watch::renew`]: a reader may be killed.
const LEASE: u64 = 3;
/// How often a reader looks and renews its wish. Nobody wakes it: that would cost whoever connects more than the record.
pub const LOOK: Duration = Duration::from_millis(50);

/// The one reader of a node.
pub struct Watch {
    ring: RingBuf<MapData>,
    names: HashMap<MapData, u32, ServiceName>,
    counters: PerCpuArray<MapData, u64>,
    meta: Words,
    began: Duration,
    lost: u64,
    _lock: File,
}

impl Watch {
    /// Opens the pinned maps and lets the programs tell.
    ///
    /// # Errors
    /// When somebody else reads, or a map is missing or not what this build expects.
    pub fn open(pins: &Pins) -> Result<Self> {
        let lock = lock(pins)?;
        let mut watch = Self {
            ring: pinned::open(pins, maps::EVENTS, Map::RingBuf)?,
            names: pinned::open(pins, maps::NAMES, Map::HashMap)?,
            counters: pinned::open(pins, maps::COUNTERS, Map::PerCpuArray)?,
            meta: pinned::words(pins, maps::META)?,
            began: clock::monotonic(),
            lost: 0,
            _lock: lock,
        };
        watch.lost = watch.all_lost();
        watch.renew()?;
        Ok(watch)
    }

    /// Lets the programs tell for three seconds more.
    ///
    /// # Errors
    /// When the word cannot be reached.
    pub fn renew(&self) -> Result<()> {
        self.meta.store(meta::WATCHED_UNTIL, clock::monotonic().as_secs() + LEASE)
    }

    /// The next record; those that a former reader left behind are skipped.
    pub fn take(&mut self) -> Option<Event> {
        let began = self.began;
        loop {
            let record = self.ring.next()?;
            if record.len() < size_of::<Event>() {
                continue;
            }
            // SAFETY: as many bytes as an `Event` has, and every value of them is one; the kernel aligns to 8.
            let event = unsafe { ptr::read_unaligned(record.as_ptr().cast::<Event>()) };
            if Duration::from_nanos(event.time) >= began {
                return Some(event);
            }
        }
    }

    /// Records that found no room since the last call.
    pub fn take_lost(&mut self) -> u64 {
        let all = self.all_lost();
        all.saturating_sub(std::mem::replace(&mut self.lost, all))
    }

    fn all_lost(&self) -> u64 {
        self.counters.get(&(Counter::EventLost as u32), 0).map_or(0, |per_cpu| per_cpu.iter().sum())
    }

    /// Who a service id is.
    #[must_use]
    pub fn name(&self, service: u32) -> Option<ServiceName> {
        self.names.get(&service, 0).ok()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.meta.store(meta::WATCHED_UNTIL, 0); // else the wish runs out
    }
}

/// The directory of the maps is locked: that holds across mount namespaces and leaves nothing behind.
fn lock(pins: &Pins) -> Result<File> {
    let directory = pins.maps();
    let failed = |e| Error::kernel(format!("opening {}", directory.display()), e);
    let file = File::open(&directory).map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(Error::Incompatible(
            "another `sheave monitor` is running on this node, and each record can be read only once; stop it first"
                .to_owned(),
        )),
        Err(TryLockError::Error(e)) => Err(failed(e)),
    }
}
