//! Brings the tables in line with the plan, in an order in which a program never sees half a service.
//!
//! | step | write | why then |
//! |---|---|---|
//! | 1 | name of a new service id | a killed agent's successor knows what the rest belongs to |
//! | 2 | new backends | nothing names them yet |
//! | 3 | source ranges to add, configuration | each readable on its own |
//! | 4 | the new run, into free room | nothing names it yet |
//! | 5 | **the service word** | one store switches from one complete set to the next |
//! | 6 | new frontends | all they lead to is there |
//! | 7 | frontends to remove, of all services of the batch | moved ones have their new owner already |
//! | 8 | words of removed scopes, ranges to remove | nothing leads there any more |
//! | 9 | old runs, backends and ids **rest** | until a grace period is over and no connection is left |
//!
//! The kernel is the memory: [`Reconciler::adopt`] reads everything back, so start, restart and repair are one code.

mod adopt;
mod program;
mod rest;
mod runs;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    net::SocketAddr,
};

use sheave_ebpf::{
    addr::Addr,
    backend,
    frontend::{Frontend, FrontendKey, KIND_UNKNOWN_PORT},
    service::{Config, Word},
};

use crate::{
    datapath::{Datapath, Error, RangeKey, Result, Stale},
    plan::{
        group::{GroupKey, GroupPlan},
        ids::{Ids, Runs},
        kind::Kind,
    },
};
use rest::Resting;

/// The entry for unknown ports; it has no owner.
const UNKNOWN_PORT: Frontend = Frontend { service: 0, kind: KIND_UNKNOWN_PORT };

/// What tells backends of one service apart; any change is another backend, since an id in use is never rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Identity {
    addr: Addr,
    /// Network order.
    port: u16,
    local: bool,
}

/// What the kernel has of a group.
#[derive(Clone, Debug, Default)]
struct Programmed {
    id: u32,
    backends: BTreeMap<Identity, u32>,
    words: [Word; 3],
    config: Config,
    ranges: BTreeSet<RangeKey>,
    frontends: BTreeSet<FrontendKey>,
}

/// One group to bring in line.
pub struct Work<'a> {
    /// Who.
    pub key: &'a GroupKey,
    /// What is wanted; `None` = nothing, it is gone.
    pub plan: Option<&'a GroupPlan>,
    /// The frontends that it owns, with their kinds.
    pub frontends: Vec<(FrontendKey, Kind)>,
}

/// How full the tables are: entries in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Frontends, without the entries for unknown ports.
    pub frontends: usize,
    /// Service ids.
    pub services: usize,
    /// `BACKENDS`.
    pub backends: usize,
    /// `TABLES`.
    pub slots: usize,
    /// `SOURCE_RANGES`.
    pub source_ranges: usize,
    /// Service ids that rest.
    pub resting_services: usize,
    /// Backend ids that rest.
    pub resting_backends: usize,
    /// Slots that rest.
    pub resting_slots: usize,
}

/// The writer of the tables; there is one.
pub struct Reconciler<D> {
    datapath: D,
    services: Ids,
    backends: Ids,
    runs: Runs,
    groups: BTreeMap<GroupKey, Programmed>,
    /// Why the kernel does not have what is wanted, for groups that failed.
    problems: BTreeMap<GroupKey, String>,
    /// `FRONTENDS` as it is.
    frontends: HashMap<FrontendKey, Frontend>,
    /// How many of them stand for the unknown ports of an address.
    unknown_ports: usize,
    /// A frontend was deleted or moved since the last grace period: its element may not be used again before the next.
    deleted: bool,
    resting: Resting,
    stale: Vec<Stale>,
    /// Service ids whose affinity ended: their clients are to be forgotten.
    forgetful: BTreeSet<u32>,
}

impl<D: Datapath> Reconciler<D> {
    /// Brings groups in line; returns those that could not be, with the reason. They keep what they had, as far as
    /// it is still wanted.
    pub fn apply(&mut self, work: &[Work<'_>]) -> Vec<(GroupKey, Error)> {
        let mut failed = Vec::new();
        for group in work {
            self.problems.remove(group.key);
            if let Some(Err(error)) = group.plan.map(|plan| self.build(plan, &group.frontends)) {
                failed.push((group.key.clone(), error));
            }
        }
        // A frontend whose new owner is to be tried again stays with the old one: better the former pods than none.
        let is_transient = |error: &Error| !matches!(error, Error::NoSpace { .. });
        let retried: BTreeSet<GroupKey> =
            failed.iter().filter(|(_, error)| is_transient(error)).map(|(key, _)| key.clone()).collect();
        let awaited: BTreeSet<FrontendKey> = work
            .iter()
            .filter(|group| retried.contains(group.key))
            .flat_map(|group| group.frontends.iter().map(|(key, _)| *key))
            .collect();
        for group in work.iter().filter(|group| !retried.contains(group.key)) {
            let is_awaited = self.groups.get(group.key).is_some_and(|g| !g.frontends.is_disjoint(&awaited));
            let result = if is_awaited { Err(Error::Awaited) } else { self.clear(group) };
            if let Err(error) = result {
                failed.push((group.key.clone(), error));
            }
        }
        self.forget_clients();
        self.problems.extend(failed.iter().map(|(key, error)| (key.clone(), error.to_string())));
        failed
    }

    /// One walk for all of a batch. Should it fail, the next batch does it.
    fn forget_clients(&mut self) {
        if !self.forgetful.is_empty() && self.datapath.forget_clients(&self.forgetful).is_ok() {
            self.forgetful.clear();
        }
    }

    /// Adds or removes the entry that stands for the unknown ports of an address.
    ///
    /// # Errors
    /// What the kernel refused; calling again is right.
    pub fn set_unknown_port(&mut self, key: &FrontendKey, wanted: bool) -> Result<()> {
        match (wanted, self.frontends.get(key)) {
            (true, Some(actual)) if *actual == UNKNOWN_PORT => Ok(()),
            (true, _) => self.write_frontend(key, UNKNOWN_PORT),
            (false, Some(_)) => self.remove_frontend(key),
            (false, None) => Ok(()),
        }
    }

    /// Removes what is no longer wanted: groups and entries for unknown ports that are not wanted, frontends and ranges
    /// without an owner. Only to be called once every source has delivered its first complete list (invariant 3).
    ///
    /// # Errors
    /// What the kernel refused; calling again goes on.
    pub fn prune(&mut self, wanted: &dyn Fn(&GroupKey) -> bool, unknown_ports: &BTreeSet<FrontendKey>) -> Result<()> {
        let gone: Vec<GroupKey> = self.groups.keys().filter(|key| !wanted(key)).cloned().collect();
        for key in &gone {
            self.clear(&Work { key, plan: None, frontends: Vec::new() })?;
        }
        let owned: BTreeSet<&FrontendKey> = self.groups.values().flat_map(|g| &g.frontends).collect();
        let is_orphan = |key: &&FrontendKey| !owned.contains(key) && !unknown_ports.contains(key);
        let orphans: Vec<FrontendKey> = self.frontends.keys().filter(is_orphan).copied().collect();
        for key in orphans {
            self.remove_frontend(&key)?;
        }
        let ids: BTreeSet<u32> = self.groups.values().map(|g| g.id).collect();
        for range in self.datapath.source_ranges()? {
            if !ids.contains(&u32::from_be(range.1.service)) {
                self.datapath.remove_source_range(&range)?;
            }
        }
        Ok(())
    }

    /// Why a group is not in the kernel as wanted; `None` when it is, or is unknown.
    #[must_use]
    pub fn problem(&self, key: &GroupKey) -> Option<&str> {
        self.problems.get(key).map(String::as_str)
    }

    /// Any of the problems, to show an example.
    #[must_use]
    pub fn first_problem(&self) -> Option<&str> {
        self.problems.values().next().map(String::as_str)
    }

    /// Whether the kernel has this frontend for this group.
    #[must_use]
    pub fn has_frontend(&self, key: &GroupKey, frontend: &FrontendKey) -> bool {
        self.groups.get(key).is_some_and(|g| g.frontends.contains(frontend)) && !self.problems.contains_key(key)
    }

    /// Sockets to be closed, since the last call.
    pub fn take_stale(&mut self) -> Vec<Stale> {
        std::mem::take(&mut self.stale)
    }

    /// Live connections of each backend in any slice.
    pub fn connections(&self) -> impl Iterator<Item = (&GroupKey, SocketAddr, u64)> {
        let backends = self.groups.iter().flat_map(|(key, group)| group.backends.iter().map(move |b| (key, b)));
        backends.map(|(key, (identity, id))| {
            let address = SocketAddr::new(identity.addr.into(), u16::from_be(identity.port));
            (key, address, backend::connections(self.datapath.connections(*id)))
        })
    }

    /// How full the tables are.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let [resting_services, resting_backends, resting_slots] = self.resting.counts();
        Usage {
            frontends: self.frontends.len() - self.unknown_ports,
            services: self.services.used(),
            backends: self.backends.used(),
            slots: self.runs.used() as usize,
            source_ranges: self.groups.values().map(|g| g.ranges.len()).sum(),
            resting_services,
            resting_backends,
            resting_slots,
        }
    }

    /// The tables, to read.
    pub const fn datapath(&self) -> &D {
        &self.datapath
    }

    /// Lets go of the tables, as a killed agent does.
    pub fn into_datapath(self) -> D {
        self.datapath
    }

    /// The tables.
    pub const fn datapath_mut(&mut self) -> &mut D {
        &mut self.datapath
    }
}
