//! All groups, and who owns an address and port that several claim.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

use sheave_ebpf::{frontend::FrontendKey, proto, service::FLAG_PODS_BY_PACKET};

use super::{
    group::{GroupKey, GroupPlan},
    kind::Kind,
};
use crate::model::ServiceName;

/// The desired state.
#[derive(Debug, Default)]
pub struct Tables {
    /// Sorted by key.
    groups: BTreeMap<ServiceName, Vec<Group>>,
    /// Who has each frontend.
    owners: HashMap<FrontendKey, Claim>,
    /// Who would like to; few, so apart from the many owners.
    losers: HashMap<FrontendKey, BTreeSet<Claim>>,
    /// Entries for unknown ports: how many groups ask for each. Nobody owns them, their value is always the same.
    unknown_ports: HashMap<FrontendKey, u32>,
    /// How many frontends are asked for that clients outside the cluster dial.
    for_outsiders: usize,
    /// How many groups judge pods by their packets.
    judging_packets: usize,
    /// How many are SCTP's.
    sctp: usize,
}

#[derive(Debug)]
struct Group {
    key: Arc<GroupKey>,
    plan: GroupPlan,
}

/// The smallest owns: the Service whose ClusterIP it is, which the API server gives to one only; then the older
/// Service, then the name, so that every node says the same.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    /// The address is a wish, not given by the cluster (CVE-2020-8554).
    is_wish: bool,
    created: i64,
    group: Arc<GroupKey>,
    kind: Kind,
}

/// What an update changed in the desired state.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Touched {
    /// Groups that are new, gone or have a new plan, or that gained or lost a contested frontend.
    pub groups: BTreeSet<Arc<GroupKey>>,
    /// Entries for unknown ports that nobody asked for before.
    pub unknown_ports_added: BTreeSet<FrontendKey>,
    /// Entries for unknown ports that nobody asks for any more.
    pub unknown_ports_removed: BTreeSet<FrontendKey>,
}

impl Touched {
    /// Nothing is different.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.unknown_ports_added.is_empty() && self.unknown_ports_removed.is_empty()
    }
}

impl Tables {
    /// Every group, in order of its Service.
    pub fn groups(&self) -> impl Iterator<Item = (&Arc<GroupKey>, &GroupPlan)> {
        self.groups.values().flatten().map(|group| (&group.key, &group.plan))
    }

    /// The groups of a Service.
    pub fn of_service(&self, service: &ServiceName) -> impl Iterator<Item = (&Arc<GroupKey>, &GroupPlan)> {
        self.groups.get(service).into_iter().flatten().map(|group| (&group.key, &group.plan))
    }

    /// One group; `None` = it should not exist.
    #[must_use]
    pub fn plan(&self, key: &GroupKey) -> Option<&GroupPlan> {
        find(self.groups.get(&key.service)?, key)
    }

    /// The frontends that a group has, with their kinds: what it asks for, less what others own, without the entries
    /// for unknown ports.
    pub fn owned(&self, key: &GroupKey) -> impl Iterator<Item = (FrontendKey, Kind)> {
        let asked = self.plan(key).into_iter().flat_map(|plan| &plan.frontends);
        let owned = |frontend: &FrontendKey| self.owner(frontend).is_some_and(|owner| *owner == *key);
        asked.copied().filter(move |(frontend, _)| owned(frontend))
    }

    /// Who has a frontend. `None` also for entries for unknown ports.
    #[must_use]
    pub fn owner(&self, frontend: &FrontendKey) -> Option<&GroupKey> {
        self.owners.get(frontend).map(|claim| &*claim.group)
    }

    /// The entries for unknown ports.
    pub fn unknown_ports(&self) -> impl Iterator<Item = FrontendKey> {
        self.unknown_ports.keys().copied()
    }

    /// Frontends that more than one group asks for.
    #[must_use]
    pub fn contested(&self) -> usize {
        self.losers.len()
    }

    /// Some Service may be dialled from outside the cluster: it has a NodePort, a load balancer's or an external
    /// address.
    #[must_use]
    pub const fn serves_outsiders(&self) -> bool {
        self.for_outsiders > 0
    }

    /// Some Service leaves it to the packet path which of this node's pods it admits.
    #[must_use]
    pub const fn judges_pods_by_packet(&self) -> bool {
        self.judging_packets > 0
    }

    /// Some Service is SCTP.
    #[must_use]
    pub const fn serves_sctp(&self) -> bool {
        self.sctp > 0
    }

    /// Replaces the groups of a Service; no plans = the Service is gone or has no frontend.
    pub fn update(&mut self, service: &ServiceName, plans: Vec<GroupPlan>) -> Touched {
        let before = self.groups.remove(service).unwrap_or_default();
        let mut touched = Touched::default();
        let mut was_owned = BTreeMap::new();

        // Keys are kept: one copy of each, however often a group changes.
        let known = |plan: &GroupPlan| Some(before[position(&before, &plan.key)?].key.clone());
        let mut after: Vec<Group> = plans
            .into_iter()
            .map(|plan| Group { key: known(&plan).unwrap_or_else(|| Arc::new(plan.key.clone())), plan })
            .collect();
        after.sort_unstable_by(|a, b| a.key.cmp(&b.key));

        self.judging_packets -= before.iter().filter(|group| group.judges_packets()).count();
        self.judging_packets += after.iter().filter(|group| group.judges_packets()).count();

        for old in &before {
            let new = find(&after, &old.key);
            if new == Some(&old.plan) {
                continue;
            }
            touched.groups.insert(old.key.clone());
            for (frontend, kind) in old.asks_for_what_is_not_in(new) {
                self.release(frontend, &old.claim(kind), &mut was_owned, &mut touched);
            }
        }
        for new in &after {
            let old = find(&before, &new.key);
            if old == Some(&new.plan) {
                continue;
            }
            touched.groups.insert(new.key.clone());
            for (frontend, kind) in new.asks_for_what_is_not_in(old) {
                self.claim(frontend, new.claim(kind), &mut was_owned, &mut touched);
            }
        }

        // What changed hands and came back in between is no change.
        for (frontend, was) in was_owned {
            let is = self.owners.get(&frontend).map(|claim| &claim.group);
            if was.as_ref() != is {
                touched.groups.extend(was.iter().chain(is).cloned());
            }
        }
        if !after.is_empty() {
            self.groups.insert(service.clone(), after);
        }
        debug_assert!(self.check());
        touched
    }

    fn claim(&mut self, frontend: FrontendKey, claim: Claim, was: &mut WasOwned, touched: &mut Touched) {
        if claim.kind == Kind::UnknownPort {
            let count = self.unknown_ports.entry(frontend).or_default();
            *count += 1;
            if *count == 1 && !touched.unknown_ports_removed.remove(&frontend) {
                touched.unknown_ports_added.insert(frontend);
            }
            return;
        }
        self.for_outsiders += usize::from(claim.kind.is_external());
        self.sctp += usize::from(frontend.proto == proto::SCTP);
        let owner = self.owners.get(&frontend);
        was.entry(frontend).or_insert_with(|| owner.map(|owner| owner.group.clone()));
        let loser = match self.owners.entry(frontend) {
            Entry::Vacant(free) => {
                free.insert(claim);
                return;
            }
            Entry::Occupied(mut owner) if claim < *owner.get() => owner.insert(claim),
            Entry::Occupied(_) => claim,
        };
        self.losers.entry(frontend).or_default().insert(loser);
    }

    fn release(&mut self, frontend: FrontendKey, claim: &Claim, was: &mut WasOwned, touched: &mut Touched) {
        if claim.kind == Kind::UnknownPort {
            if let Entry::Occupied(mut count) = self.unknown_ports.entry(frontend) {
                *count.get_mut() -= 1;
                if *count.get() == 0 {
                    count.remove();
                    touched.unknown_ports_removed.insert(frontend);
                }
            }
            return;
        }
        self.for_outsiders -= usize::from(claim.kind.is_external());
        self.sctp -= usize::from(frontend.proto == proto::SCTP);
        let owner = self.owners.get(&frontend);
        was.entry(frontend).or_insert_with(|| owner.map(|owner| owner.group.clone()));
        let owns = owner == Some(claim);
        let losers = self.losers.get_mut(&frontend);
        match (owns, losers) {
            (true, Some(losers)) => {
                if let Some(next) = losers.pop_first() {
                    self.owners.insert(frontend, next);
                }
            }
            (true, None) => {
                self.owners.remove(&frontend);
            }
            (false, Some(losers)) => {
                losers.remove(claim);
            }
            (false, None) => {}
        }
        if self.losers.get(&frontend).is_some_and(BTreeSet::is_empty) {
            self.losers.remove(&frontend);
        }
    }

    /// An owner comes before all other claims, and no claim waits for a frontend without an owner.
    fn check(&self) -> bool {
        self.losers.iter().all(|(frontend, losers)| {
            let owner = self.owners.get(frontend);
            owner.is_some_and(|owner| losers.first().is_some_and(|first| owner < first))
        })
    }
}

fn position(groups: &[Group], key: &GroupKey) -> Option<usize> {
    groups.binary_search_by(|group| (*group.key).cmp(key)).ok()
}

fn find<'a>(groups: &'a [Group], key: &GroupKey) -> Option<&'a GroupPlan> {
    position(groups, key).map(|at| &groups[at].plan)
}

/// Owner of each frontend concerned as it was before the update.
type WasOwned = BTreeMap<FrontendKey, Option<Arc<GroupKey>>>;

impl Group {
    fn claim(&self, kind: Kind) -> Claim {
        let is_wish = kind != Kind::ClusterIp;
        Claim { is_wish, created: self.plan.created, group: self.key.clone(), kind }
    }

    const fn judges_packets(&self) -> bool {
        self.plan.config.flags() & FLAG_PODS_BY_PACKET != 0
    }

    fn asks_for_what_is_not_in(&self, other: Option<&GroupPlan>) -> impl Iterator<Item = (FrontendKey, Kind)> {
        let same = other.filter(|other| other.created == self.plan.created);
        let theirs: HashSet<_> = same.into_iter().flat_map(|other| &other.frontends).collect();
        self.plan.frontends.iter().copied().filter(move |entry| !theirs.contains(entry))
    }
}

#[cfg(test)]
mod tests;
