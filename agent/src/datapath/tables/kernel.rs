//! The tables in the kernel.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
};

use aya::{
    Pod,
    maps::{HashMap, LpmTrie, Map, MapData, MapError, PerCpuArray, lpm_trie},
};
use ipnet::IpNet;
use sheave_ebpf::{
    addr::Addr,
    affinity::AffinityKey,
    backend::{Backend, RETIRED},
    counter::Counter,
    frontend::{Frontend, FrontendKey, KIND_NODE_PORT, KIND_UNKNOWN_PORT},
    maps,
    names::ServiceName,
    proto,
    source_range::SourceRange,
};

use crate::lb::clients::ReadClients;

use crate::datapath::{
    Datapath, Limits, RangeKey, Result, prefix_bits,
    programs::load::MAX_SERVICE_CIDRS,
    tables::{
        guarded,
        pinned::{self, failed, removed},
        pins::Pins,
        words::{self, Words},
    },
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
        let size = |name| pinned::size(pins, name);
        let limits = Limits {
            frontends: size(maps::FRONTENDS)? / 2, // see the shape in load.rs
            backends: size(maps::BACKENDS)?,
            slots: size(maps::TABLES)?,
            affinity: size(maps::AFFINITY)?,
            peers: size(maps::PEERS)?,
            source_ranges: size(maps::SOURCE_RANGES)?,
            conntrack: size(maps::CONNTRACK)?,
        };
        Ok(Self {
            limits,
            frontends: pinned::open(pins, maps::FRONTENDS, Map::HashMap)?,
            names: pinned::open(pins, maps::NAMES, Map::HashMap)?,
            source_ranges: pinned::open(pins, maps::SOURCE_RANGES, Map::LpmTrie)?,
            service_networks: pinned::open(pins, maps::SERVICE_CIDRS, Map::LpmTrie)?,
            affinity: pinned::open(pins, maps::AFFINITY, Map::LruHashMap)?,
            services: pinned::words(pins, maps::SERVICES)?,
            tables: pinned::words(pins, maps::TABLES)?,
            backends: pinned::words(pins, maps::BACKENDS)?,
            connections: pinned::words(pins, maps::CONNECTIONS)?,
            meta: pinned::words(pins, maps::META)?,
            counters: pinned::open(pins, maps::COUNTERS, Map::PerCpuArray)?,
        })
    }

    /// What the programs counted, summed over all CPUs.
    #[must_use]
    pub fn counts(&self) -> Vec<(Counter, u64)> {
        let sum = |c: Counter| self.counters.get(&(c as u32), 0).map_or(0, |per_cpu| per_cpu.iter().sum());
        Counter::ALL.iter().map(|counter| (*counter, sum(*counter))).collect()
    }
}

/// Keys first, then values: deletion restarts the walk, so the keys are a hint.
fn entries<K: Pod, V: Pod>(map: &HashMap<MapData, K, V>, name: &'static str) -> Result<Vec<(K, V)>> {
    let mut found = Vec::new();
    for key in map.keys() {
        let key = key.map_err(|e| failed(e, name, 0, None))?;
        match map.get(&key, 0) {
            Ok(value) => found.push((key, value)),
            Err(MapError::KeyNotFound) => {}
            Err(e) => return Err(failed(e, name, 0, None)),
        }
    }
    Ok(found)
}

impl ReadClients for Kernel {
    fn affinity(&self) -> Vec<(AffinityKey, u64)> {
        entries(&self.affinity, maps::AFFINITY).unwrap_or_default()
    }

    fn source_ranges(&self) -> Vec<RangeKey> {
        Datapath::source_ranges(self).unwrap_or_default()
    }
}

impl Datapath for Kernel {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>> {
        entries(&self.frontends, maps::FRONTENDS)
    }

    fn put_frontend(&mut self, key: &FrontendKey, value: &Frontend) -> Result<()> {
        match value.kind {
            KIND_UNKNOWN_PORT => guarded::widen_for(&self.meta, key)?,
            KIND_NODE_PORT if key.proto == proto::UDP => guarded::widen_node_ports(&self.meta, u16::from_be(key.port))?,
            _ => {}
        }
        let full = |e| failed(e, maps::FRONTENDS, self.limits.frontends, Some("--max-frontends"));
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
        let full = |e| failed(e, maps::NAMES, self.limits.frontends, Some("--max-frontends"));
        self.names.insert(&service, name, 0).map_err(full)
    }

    fn remove_name(&mut self, service: u32) -> Result<()> {
        removed(self.names.remove(&service), maps::NAMES)
    }

    fn source_ranges(&self) -> Result<Vec<RangeKey>> {
        self.source_ranges
            .keys()
            .map(|key| key.map(|k| (k.prefix_len(), k.data())).map_err(|e| failed(e, maps::SOURCE_RANGES, 0, None)))
            .collect()
    }

    fn put_source_range(&mut self, (bits, range): &RangeKey) -> Result<()> {
        let full = |e| failed(e, maps::SOURCE_RANGES, self.limits.source_ranges, Some("--max-source-ranges"));
        self.source_ranges.insert(&lpm_trie::Key::new(*bits, *range), 1, 0).map_err(full)
    }

    fn remove_source_range(&mut self, (bits, range): &RangeKey) -> Result<()> {
        removed(self.source_ranges.remove(&lpm_trie::Key::new(*bits, *range)), maps::SOURCE_RANGES)
    }

    fn set_service_networks(&mut self, networks: &BTreeMap<IpNet, bool>, complete: bool) -> Result<()> {
        let entry =
            |(net, silent): (&IpNet, &bool)| ((prefix_bits(net), Addr::from(net.network())), u32::from(*silent));
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
                let full = |e| failed(e, name, MAX_SERVICE_CIDRS, None);
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
