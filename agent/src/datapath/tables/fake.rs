//! The tables in memory, with seeded faults: what every scenario runs on without a kernel.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    rc::Rc,
};

use ipnet::IpNet;
use sheave_ebpf::{
    backend::{Backend, RETIRED},
    frontend::{Frontend, FrontendKey},
    names::ServiceName,
};

use crate::datapath::{Datapath, Error, Limits, RangeKey, Result};

/// What a write meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// One write in so many fails and does nothing.
    OneIn(u64),
    /// This write and all later ones fail: the agent was killed here.
    DeadAfter(u64),
}

/// Looks at the tables between two writes.
type Watcher = Rc<dyn Fn(&Fake)>;

/// In-memory tables.
pub struct Fake {
    /// Sizes.
    pub limits: Limits,
    /// What writes meet.
    pub fault: Fault,
    /// Reading whole maps fails.
    pub unreadable: bool,
    /// Writes so far, failed ones included.
    pub writes: u64,
    /// Grace periods so far.
    pub graces: u64,
    /// Called after every write that succeeded: where an invariant is checked.
    pub after_write: Option<Watcher>,
    seed: u64,
    frontends: BTreeMap<FrontendKey, Frontend>,
    names: BTreeMap<u32, ServiceName>,
    source_ranges: BTreeMap<RangeKey, ()>,
    /// Networks, and whether their addresses are dropped silently.
    pub service_networks: BTreeMap<IpNet, bool>,
    words: HashMap<u32, u64>,
    slots: HashMap<u32, u32>,
    backends: HashMap<u32, Backend>,
    connections: HashMap<u32, u64>,
    meta: HashMap<u32, u64>,
    /// Services that remember a client.
    clients: BTreeSet<u32>,
}

impl Fake {
    /// Empty tables.
    #[must_use]
    pub fn new(limits: Limits, seed: u64, fault: Fault) -> Self {
        Self {
            limits,
            fault,
            unreadable: false,
            writes: 0,
            graces: 0,
            after_write: None,
            seed: seed | 1,
            frontends: BTreeMap::new(),
            names: BTreeMap::new(),
            source_ranges: BTreeMap::new(),
            service_networks: BTreeMap::new(),
            words: HashMap::new(),
            slots: HashMap::new(),
            backends: HashMap::new(),
            connections: HashMap::new(),
            meta: HashMap::new(),
            clients: BTreeSet::new(),
        }
    }

    /// A program opens or closes connections to a backend.
    pub fn connect(&mut self, id: u32, by: i64) {
        let word = self.connections.entry(id).or_default();
        *word = word.wrapping_add_signed(by);
    }

    /// A client of a service is remembered.
    pub fn remember_client(&mut self, service: u32) {
        self.clients.insert(service);
    }

    /// Whether a service remembers a client.
    #[must_use]
    pub fn remembers_clients(&self, service: u32) -> bool {
        self.clients.contains(&service)
    }

    /// A whole map, if that can be read.
    fn whole<K: Copy, V: Copy>(&self, map: &BTreeMap<K, V>) -> Result<Vec<(K, V)>> {
        if self.unreadable { Err(seeded_fault()) } else { Ok(map.iter().map(|(k, v)| (*k, *v)).collect()) }
    }

    /// One write: fails by the plan of faults, else happens.
    fn write(&mut self, change: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.writes += 1;
        // xorshift64: faults must be the same for the same seed, and need no more than that.
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        let fails = match self.fault {
            Fault::None => false,
            Fault::OneIn(n) => self.seed.is_multiple_of(n),
            Fault::DeadAfter(n) => self.writes > n,
        };
        if fails {
            return Err(seeded_fault());
        }
        change(self)?;
        if let Some(check) = self.after_write.clone() {
            check(self);
        }
        Ok(())
    }
}

fn seeded_fault() -> Error {
    Error::kernel("a seeded fault", std::io::Error::from_raw_os_error(libc::EIO))
}

impl Datapath for Fake {
    fn limits(&self) -> Limits {
        self.limits
    }

    fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>> {
        self.whole(&self.frontends)
    }

    fn put_frontend(&mut self, key: &FrontendKey, value: &Frontend) -> Result<()> {
        self.write(|fake| {
            let capacity = fake.limits.frontends;
            if fake.frontends.len() >= 2 * capacity as usize && !fake.frontends.contains_key(key) {
                return Err(Error::NoSpace { map: "FRONTENDS", capacity, flag: Some("--max-frontends") });
            }
            fake.frontends.insert(*key, *value);
            Ok(())
        })
    }

    fn remove_frontend(&mut self, key: &FrontendKey) -> Result<()> {
        self.write(|fake| {
            fake.frontends.remove(key);
            Ok(())
        })
    }

    fn names(&self) -> Result<Vec<(u32, ServiceName)>> {
        self.whole(&self.names)
    }

    fn name(&self, service: u32) -> Option<ServiceName> {
        self.names.get(&service).copied()
    }

    fn put_name(&mut self, service: u32, name: &ServiceName) -> Result<()> {
        self.write(|fake| {
            fake.names.insert(service, *name);
            Ok(())
        })
    }

    fn remove_name(&mut self, service: u32) -> Result<()> {
        self.write(|fake| {
            fake.names.remove(&service);
            Ok(())
        })
    }

    fn source_ranges(&self) -> Result<Vec<RangeKey>> {
        Ok(self.whole(&self.source_ranges)?.into_iter().map(|(range, ())| range).collect())
    }

    fn put_source_range(&mut self, range: &RangeKey) -> Result<()> {
        self.write(|fake| {
            let capacity = fake.limits.source_ranges;
            if fake.source_ranges.len() >= capacity as usize && !fake.source_ranges.contains_key(range) {
                return Err(Error::NoSpace { map: "SOURCE_RANGES", capacity, flag: Some("--max-source-ranges") });
            }
            fake.source_ranges.insert(*range, ());
            Ok(())
        })
    }

    fn remove_source_range(&mut self, range: &RangeKey) -> Result<()> {
        self.write(|fake| {
            fake.source_ranges.remove(range);
            Ok(())
        })
    }

    fn set_service_networks(&mut self, networks: &BTreeMap<IpNet, bool>, complete: bool) -> Result<()> {
        let mut wanted = if complete { BTreeMap::new() } else { self.service_networks.clone() };
        wanted.extend(networks);
        if wanted == self.service_networks {
            return Ok(());
        }
        self.write(|fake| {
            fake.service_networks = wanted;
            Ok(())
        })
    }

    fn word(&self, index: u32) -> u64 {
        self.words.get(&index).copied().unwrap_or_default()
    }

    fn put_word(&mut self, index: u32, word: u64) -> Result<()> {
        self.write(|fake| {
            fake.words.insert(index, word);
            Ok(())
        })
    }

    fn slot(&self, index: u32) -> u32 {
        self.slots.get(&index).copied().unwrap_or_default()
    }

    fn put_slot(&mut self, index: u32, backend: u32) -> Result<()> {
        self.write(|fake| {
            fake.slots.insert(index, backend);
            Ok(())
        })
    }

    fn backend(&self, id: u32) -> Backend {
        self.backends.get(&id).copied().unwrap_or(Backend::UNUSED)
    }

    fn put_backend(&mut self, id: u32, backend: &Backend) -> Result<()> {
        self.write(|fake| {
            fake.backends.insert(id, *backend);
            Ok(())
        })
    }

    fn connections(&self, id: u32) -> u64 {
        self.connections.get(&id).copied().unwrap_or_default()
    }

    fn set_retired(&mut self, id: u32, retired: bool) -> Result<()> {
        self.write(|fake| {
            let word = fake.connections.entry(id).or_default();
            *word = if retired { *word | RETIRED } else { *word & !RETIRED };
            Ok(())
        })
    }

    fn reset_connections(&mut self, id: u32) -> Result<()> {
        self.write(|fake| {
            fake.connections.insert(id, 0);
            Ok(())
        })
    }

    fn forget_clients(&mut self, services: &BTreeSet<u32>) -> Result<()> {
        self.write(|fake| {
            fake.clients.retain(|service| !services.contains(service));
            Ok(())
        })
    }

    fn meta(&self, index: u32) -> u64 {
        self.meta.get(&index).copied().unwrap_or_default()
    }

    fn put_meta(&mut self, index: u32, value: u64) -> Result<()> {
        self.write(|fake| {
            fake.meta.insert(index, value);
            Ok(())
        })
    }

    fn grace_period(&mut self) -> Result<()> {
        self.graces += 1;
        Ok(())
    }
}
