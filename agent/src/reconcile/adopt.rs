//! Reading back what the kernel has.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use sheave_ebpf::{
    backend::{Backend, FLAG_LOCAL},
    frontend::{Frontend, FrontendKey, KIND_UNKNOWN_PORT},
    meta,
    names::{ServiceName as NameRecord, unpad},
    service::{Config, Scope, VERDICT_FORWARD, Word, config_index, word_index},
};

use super::{Identity, Programmed, Reconciler, rest::Resting};
use crate::{
    datapath::{Datapath, Result},
    model::{Family, Protocol, ServiceName},
    plan::{
        group::GroupKey,
        ids::{Ids, Runs},
    },
};

/// The scopes in order of their words.
pub(super) const SCOPES: [Scope; 3] = [Scope::Cluster, Scope::Inside, Scope::Outside];

impl<D: Datapath> Reconciler<D> {
    /// Takes over the tables, whichever agent wrote them and wherever it stopped.
    ///
    /// # Errors
    /// When a map cannot be read.
    pub fn adopt(datapath: D) -> Result<Self> {
        let limits = datapath.limits();
        let mut reconciler = Self {
            services: Ids::new(limits.frontends),
            backends: Ids::new(limits.backends),
            runs: Runs::new(limits.slots),
            groups: BTreeMap::new(),
            problems: BTreeMap::new(),
            frontends: HashMap::new(),
            unknown_ports: 0,
            deleted: false,
            resting: Resting::default(),
            stale: Vec::new(),
            forgetful: BTreeSet::new(),
            datapath,
        };
        reconciler.read()?;
        Ok(reconciler)
    }

    /// Forgets what it knows and reads the tables again: what somebody else changed is corrected by the next pass.
    ///
    /// # Errors
    /// When a map cannot be read; what was known before stays.
    pub fn read(&mut self) -> Result<()> {
        let (mut names, frontends) = (self.datapath.names()?, self.datapath.frontends()?);
        let ranges = self.datapath.source_ranges()?;
        // What rested is free from here on, and what somebody deleted just now is in no program's hands any more.
        self.grace()?;

        let limits = self.datapath.limits();
        self.services = Ids::new(limits.frontends);
        self.backends = Ids::new(limits.backends);
        self.runs = Runs::new(limits.slots);
        self.groups.clear();
        self.resting = Resting::default();

        // A Service that came back while connections to its former life lasted has two ids of one name. That which
        // frontends lead to comes first and is the Service; the other goes on resting.
        let leading = frontends.iter().filter(|(_, frontend)| frontend.kind != KIND_UNKNOWN_PORT);
        let dialled: HashSet<u32> = leading.map(|(_, frontend)| frontend.service).collect();
        names.sort_by_key(|(id, _)| (!dialled.contains(id), *id));
        let mut known: HashMap<u32, GroupKey> = HashMap::new();
        for (id, record) in names {
            if !self.services.reserve(id) {
                continue;
            }
            match group_key(&record) {
                Some(key) if !self.groups.contains_key(&key) => {
                    let group = self.read_group(id);
                    self.groups.insert(key.clone(), group);
                    known.insert(id, key);
                }
                Some(_) | None => self.resting.service(id),
            }
        }
        self.read_backends(&known);
        self.read_frontends(frontends, &known);
        for range in ranges {
            if let Some(group) = known.get(&u32::from_be(range.1.service)).and_then(|k| self.groups.get_mut(k)) {
                group.ranges.insert(range);
            }
        }
        Ok(())
    }

    fn read_group(&mut self, id: u32) -> Programmed {
        let words = SCOPES.map(|scope| Word(self.datapath.word(word_index(id, scope))));
        let runs: BTreeSet<(u32, u32)> = words.iter().filter_map(|word| self.run_of(*word)).collect();
        for (offset, length) in runs {
            self.runs.reserve(offset, length);
        }
        Programmed { id, words, config: Config(self.datapath.word(config_index(id))), ..Programmed::default() }
    }

    /// The slots that a word holds: offset and length, a Maglev run's members included.
    pub(super) fn run_of(&self, word: Word) -> Option<(u32, u32)> {
        if word.verdict() != VERDICT_FORWARD {
            return None;
        }
        let members = if word.is_maglev() { 1 + self.datapath.slot(word.offset() + word.length()) } else { 0 };
        Some((word.offset(), word.length() + members))
    }

    fn read_backends(&mut self, names: &HashMap<u32, GroupKey>) {
        let high = self.datapath.meta(meta::BACKEND_HIGH_WATER);
        for id in 0..u32::try_from(high).unwrap_or(u32::MAX).min(self.datapath.limits().backends) {
            let backend = self.datapath.backend(id);
            if backend == Backend::UNUSED || !self.backends.reserve(id) {
                continue;
            }
            let Backend { addr, port, proto: _, flags, service } = backend;
            let identity = Identity { addr, port, local: flags & FLAG_LOCAL != 0 };
            let group = names.get(&service).filter(|key| self.is_kept(key, &identity, id));
            let displaced = match group.and_then(|key| self.groups.get_mut(key)) {
                Some(group) => group.backends.insert(identity, id),
                None => Some(id),
            };
            if let Some(id) = displaced {
                self.resting.backend(id);
            }
        }
    }

    /// An endpoint that came back while connections to its former life lasted has two ids. The group keeps that which
    /// its words lead to, one at most; the other goes on resting.
    fn is_kept(&self, group: &GroupKey, identity: &Identity, id: u32) -> bool {
        self.groups.get(group).is_some_and(|group| {
            !group.backends.contains_key(identity) || group.words.iter().any(|word| self.leads_to(*word, id))
        })
    }

    /// Whether a word's run has this backend.
    fn leads_to(&self, word: Word, id: u32) -> bool {
        self.run_of(word).is_some_and(|(offset, total)| {
            // A Maglev run ends with its members; its table need not be searched.
            let before = if word.is_maglev() { word.length() + 1 } else { 0 };
            (offset + before..offset + total).any(|slot| self.datapath.slot(slot) == id)
        })
    }

    fn read_frontends(&mut self, frontends: Vec<(FrontendKey, Frontend)>, names: &HashMap<u32, GroupKey>) {
        self.unknown_ports = 0;
        for (key, frontend) in &frontends {
            if frontend.kind == KIND_UNKNOWN_PORT {
                self.unknown_ports += 1;
                continue; // its owner finds it by the key
            }
            if let Some(group) = names.get(&frontend.service).and_then(|k| self.groups.get_mut(k)) {
                group.frontends.insert(*key);
            }
        }
        self.frontends = frontends.into_iter().collect();
    }
}

/// The name of a group as a record.
pub(super) fn name_record(key: &GroupKey) -> Option<NameRecord> {
    use sheave_ebpf::names::pad;
    Some(NameRecord {
        namespace: pad(&key.service.namespace)?,
        name: pad(&key.service.name)?,
        port_name: pad(&key.port_name)?,
        proto: key.protocol.number(),
        family: match key.family {
            Family::V4 => 4,
            Family::V6 => 6,
        },
        zero: [0; 6],
    })
}

/// Who a record stands for; `None` when it is none of ours.
#[must_use]
pub fn group_key(record: &NameRecord) -> Option<GroupKey> {
    let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp].into_iter().find(|p| p.number() == record.proto)?;
    let family = match record.family {
        4 => Family::V4,
        6 => Family::V6,
        _ => return None,
    };
    let (namespace, name) = (unpad(&record.namespace), unpad(&record.name));
    if namespace.is_empty() || name.is_empty() {
        return None;
    }
    let service = ServiceName::new(namespace, name);
    Some(GroupKey { service, port_name: unpad(&record.port_name).into(), protocol, family })
}
