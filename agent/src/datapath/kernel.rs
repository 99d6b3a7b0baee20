//! The tables in the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::atomic::Ordering,
};

use aya::{
    Pod,
    maps::{HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, lpm_trie},
    sys::SyscallError,
};
use ipnet::IpNet;
use sheave_ebpf::{
    addr::Addr,
    affinity::AffinityKey,
    backend::{Backend, RETIRED},
    counter::Counter,
    frontend::{Frontend, FrontendKey, KIND_UNKNOWN_PORT},
    maps,
    names::ServiceName,
    source_range::SourceRange,
};

use super::{
    Datapath, Error, Limits, RangeKey, Result, guarded,
    load::MAX_SERVICE_CIDRS,
    pins::Pins,
    words::{self, Words},
};

/// Handles of the pinned maps. Opened anew by every process: the agent to write, `lb list` to read.
pub struct Kernel {
    limits: Limits,
    frontends: HashMap<MapData, FrontendKey, Frontend>,
    names: HashMap<MapData, u32, ServiceName>,
    service_networks: LpmTrie<MapData, Addr, u32>,
    source_ranges: LpmTrie<MapData, SourceRange, u32>,
    affinity: HashMap<MapData, AffinityKey, u64>,
    services: Words,
    tables: Words,
    backends: Words,
    connections: Words,
    meta: Words,
    counters: PerCpuArray<MapData, u64>,
}

impl Kernel {
    /// Opens the pinned maps.
    ///
    /// # Errors
    /// When one is missing or is not what this build expects.
    pub fn open(pins: &Pins) -> Result<Self> {
        let open = |name: &'static str| {
            let pin = pins.map(name);
            MapData::from_pin(&pin).map_err(|e| {
                Error::Incompatible(format!("cannot open the pinned map {}: {}", pin.display(), flatten(&e)))
            })
        };
        let size = |map: &MapData| map.info().map(|i| i.max_entries()).unwrap_or_default();
        let (frontends, backends, tables) = (open(maps::FRONTENDS)?, open(maps::BACKENDS)?, open(maps::TABLES)?);
        let (source_ranges, affinity) = (open(maps::SOURCE_RANGES)?, open(maps::AFFINITY)?);
        let limits = Limits {
            frontends: size(&frontends) / 2, // see the shape in load.rs
            backends: size(&backends),
            slots: size(&tables),
            affinity: size(&affinity),
            peers: size(&open(maps::PEERS)?),
            source_ranges: size(&source_ranges),
            conntrack: size(&open(maps::CONNTRACK)?),
        };
        Ok(Self {
            limits,
            frontends: hash(maps::FRONTENDS, Map::HashMap(frontends))?,
            names: hash(maps::NAMES, Map::HashMap(open(maps::NAMES)?))?,
            source_ranges: LpmTrie::try_from(Map::LpmTrie(source_ranges))
                .map_err(|e| Error::Incompatible(format!("map {}: {}", maps::SOURCE_RANGES, flatten(&e))))?,
            service_networks: LpmTrie::try_from(Map::LpmTrie(open(maps::SERVICE_CIDRS)?))
                .map_err(|e| Error::Incompatible(format!("map {}: {}", maps::SERVICE_CIDRS, flatten(&e))))?,
            affinity: hash(maps::AFFINITY, Map::LruHashMap(affinity))?,
            services: Words::new(maps::SERVICES, &open(maps::SERVICES)?)?,
            tables: Words::new(maps::TABLES, &tables)?,
            backends: Words::new(maps::BACKENDS, &backends)?,
            connections: Words::new(maps::CONNECTIONS, &open(maps::CONNECTIONS)?)?,
            meta: Words::new(maps::META, &open(maps::META)?)?,
            counters: PerCpuArray::try_from(Map::PerCpuArray(open(maps::COUNTERS)?))
                .map_err(|e| Error::Incompatible(format!("map {}: {}", maps::COUNTERS, flatten(&e))))?,
        })
    }

    /// What the programs counted, summed over all CPUs.
    #[must_use]
    pub fn counts(&self) -> Vec<(Counter, u64)> {
        let sum = |c: Counter| self.counters.get(&(c as u32), 0).map_or(0, |per_cpu| per_cpu.iter().sum());
        Counter::ALL.iter().map(|counter| (*counter, sum(*counter))).collect()
    }
}

fn hash<K: Pod, V: Pod>(name: &str, map: Map) -> Result<HashMap<MapData, K, V>> {
    HashMap::try_from(map).map_err(|e| Error::Incompatible(format!("map {name}: {}", flatten(&e))))
}

/// The whole chain of an error in one line.
pub(super) fn flatten(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// A map error as ours. A full hash says E2BIG, a full trie ENOSPC.
pub(super) fn failed(error: MapError, map: &'static str, capacity: u32, flag: &'static str) -> Error {
    match error {
        MapError::SyscallError(SyscallError { io_error, .. })
            if matches!(io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC)) =>
        {
            Error::NoSpace { map, capacity, flag }
        }
        MapError::SyscallError(SyscallError { call, io_error }) => Error::kernel(format!("{call} on {map}"), io_error),
        other => Error::Incompatible(format!("map {map}: {}", flatten(&other))),
    }
}

/// A missing key is already removed.
pub(super) fn removed(result: std::result::Result<(), MapError>, map: &'static str) -> Result<()> {
    match result {
        Err(MapError::SyscallError(SyscallError { io_error, .. })) if io_error.kind() == io::ErrorKind::NotFound => {
            Ok(())
        }
        Err(e) => Err(failed(e, map, 0, "")),
        Ok(()) => Ok(()),
    }
}

/// Keys first, then values: deletion restarts the walk, so the keys are a hint.
fn entries<K: Pod, V: Pod>(map: &HashMap<MapData, K, V>, name: &'static str) -> Result<Vec<(K, V)>> {
    let mut found = Vec::new();
    for key in map.keys() {
        let key = key.map_err(|e| failed(e, name, 0, ""))?;
        match map.get(&key, 0) {
            Ok(value) => found.push((key, value)),
            Err(MapError::KeyNotFound) => {}
            Err(e) => return Err(failed(e, name, 0, "")),
        }
    }
    Ok(found)
}

impl Datapath for Kernel {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>> {
        entries(&self.frontends, maps::FRONTENDS)
    }

    fn put_frontend(&mut self, key: &FrontendKey, value: &Frontend) -> Result<()> {
        if value.kind == KIND_UNKNOWN_PORT {
            guarded::widen(&self.meta, &key.addr)?;
        }
        let full = |e| failed(e, maps::FRONTENDS, self.limits.frontends, "--max-frontends");
        self.frontends.insert(key, value, 0).map_err(full)
    }

    fn remove_frontend(&mut self, key: &FrontendKey) -> Result<()> {
        removed(self.frontends.remove(key), maps::FRONTENDS)
    }

    fn names(&self) -> Result<Vec<(u32, ServiceName)>> {
        entries(&self.names, maps::NAMES)
    }

    fn name(&self, service: u32) -> Option<ServiceName> {
        self.names.get(&service, 0).ok()
    }

    fn put_name(&mut self, service: u32, name: &ServiceName) -> Result<()> {
        let full = |e| failed(e, maps::NAMES, self.limits.frontends, "--max-frontends");
        self.names.insert(&service, name, 0).map_err(full)
    }

    fn remove_name(&mut self, service: u32) -> Result<()> {
        removed(self.names.remove(&service), maps::NAMES)
    }

    fn source_ranges(&self) -> Result<Vec<RangeKey>> {
        self.source_ranges
            .keys()
            .map(|key| key.map(|k| (k.prefix_len(), k.data())).map_err(|e| failed(e, maps::SOURCE_RANGES, 0, "")))
            .collect()
    }

    fn put_source_range(&mut self, (bits, range): &RangeKey) -> Result<()> {
        let full = |e| failed(e, maps::SOURCE_RANGES, self.limits.source_ranges, "--max-source-ranges");
        self.source_ranges.insert(&lpm_trie::Key::new(*bits, *range), 1, 0).map_err(full)
    }

    fn remove_source_range(&mut self, (bits, range): &RangeKey) -> Result<()> {
        removed(self.source_ranges.remove(&lpm_trie::Key::new(*bits, *range)), maps::SOURCE_RANGES)
    }

    fn set_service_networks(&mut self, networks: &BTreeMap<IpNet, bool>, complete: bool) -> Result<()> {
        let bits = |net: &IpNet| if net.addr().is_ipv4() { 96 } else { 0 } + u32::from(net.prefix_len());
        let entry = |(net, silent): (&IpNet, &bool)| ((bits(net), Addr::from(net.network())), u32::from(*silent));
        let wanted: BTreeMap<(u32, Addr), u32> = networks.iter().map(entry).collect();
        for net in networks.keys() {
            guarded::widen(&self.meta, &net.network().into())?;
            guarded::widen(&self.meta, &net.broadcast().into())?;
        }
        let name = maps::SERVICE_CIDRS;
        let present: Vec<_> = self.service_networks.keys().filter_map(std::result::Result::ok).collect();
        let known: BTreeSet<_> = present.iter().map(|key| (key.prefix_len(), key.data())).collect();
        for (entry, silent) in &wanted {
            let key = lpm_trie::Key::new(entry.0, entry.1);
            // A look-up alone would find the network around it.
            if !known.contains(entry) || self.service_networks.get(&key, 0).ok() != Some(*silent) {
                let full = |e| failed(e, name, MAX_SERVICE_CIDRS, "nothing: there are too many");
                self.service_networks.insert(&key, *silent, 0).map_err(full)?;
            }
        }
        for key in present.iter().filter(|key| complete && !wanted.contains_key(&(key.prefix_len(), key.data()))) {
            removed(self.service_networks.remove(key), name)?;
        }
        Ok(())
    }

    fn word(&self, index: u32) -> u64 {
        self.services.load(index)
    }

    fn put_word(&mut self, index: u32, word: u64) -> Result<()> {
        self.services.store(index, word)
    }

    fn slot(&self, index: u32) -> u32 {
        // Ids are below 2^32; the array is of u64 because the kernel would round u32 elements up anyway.
        self.tables.load(index) as u32
    }

    fn put_slot(&mut self, index: u32, backend: u32) -> Result<()> {
        self.tables.store(index, u64::from(backend))
    }

    fn backend(&self, id: u32) -> Backend {
        let word = |i| self.backends.get(id, i).map_or(0, |w| w.load(Ordering::Acquire)).to_ne_bytes();
        let halves =
            |w: [u8; 8]| [u32::from_ne_bytes([w[0], w[1], w[2], w[3]]), u32::from_ne_bytes([w[4], w[5], w[6], w[7]])];
        let ([a, b], [c, d], last) = (halves(word(0)), halves(word(1)), word(2));
        Backend {
            addr: Addr { words: [a, b, c, d] },
            port: u16::from_ne_bytes([last[0], last[1]]),
            proto: last[2],
            flags: last[3],
            service: halves(last)[1],
        }
    }

    fn put_backend(&mut self, id: u32, backend: &Backend) -> Result<()> {
        let Backend { addr: Addr { words: [a, b, c, d] }, port, proto, flags, service } = *backend;
        let pair = |x: u32, y: u32| {
            let (x, y) = (x.to_ne_bytes(), y.to_ne_bytes());
            u64::from_ne_bytes([x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3]])
        };
        let port = port.to_ne_bytes();
        let last = pair(u32::from_ne_bytes([port[0], port[1], proto, flags]), service);
        for (i, word) in [pair(a, b), pair(c, d), last].into_iter().enumerate() {
            self.backends.get(id, i)?.store(word, Ordering::Release);
        }
        Ok(())
    }

    fn connections(&self, id: u32) -> u64 {
        self.connections.load(id)
    }

    fn set_retired(&mut self, id: u32, retired: bool) -> Result<()> {
        let word = self.connections.get(id, 0)?;
        if retired {
            word.fetch_or(RETIRED, Ordering::AcqRel);
        } else {
            word.fetch_and(!RETIRED, Ordering::AcqRel);
        }
        Ok(())
    }

    fn reset_connections(&mut self, id: u32) -> Result<()> {
        self.connections.store(id, 0)
    }

    fn forget_clients(&mut self, services: &BTreeSet<u32>) -> Result<()> {
        // Keys first: deletion restarts the walk.
        let keys: Vec<_> = self.affinity.keys().filter_map(std::result::Result::ok).collect();
        for key in keys.iter().filter(|key| services.contains(&key.service)) {
            removed(self.affinity.remove(key), maps::AFFINITY)?;
        }
        Ok(())
    }

    fn meta(&self, index: u32) -> u64 {
        self.meta.load(index)
    }

    fn put_meta(&mut self, index: u32, value: u64) -> Result<()> {
        self.meta.store(index, value)
    }

    fn grace_period(&mut self) -> Result<()> {
        words::grace_period();
        Ok(())
    }
}
