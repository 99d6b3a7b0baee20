//! What metrics are read from.

use std::collections::BTreeMap;

use sheave_ebpf::service::Scope;

use super::{Engine, StatusInput};
use crate::{
    datapath::Datapath,
    model::Family,
    observe::metrics::{Connections, NoLocal, Snapshot},
    plan::group::{GroupPlan, ScopePlan},
};

impl<D: Datapath> Engine<D> {
    /// How things are; connections of at most `series` services and backends, the busiest ones.
    #[must_use]
    pub fn snapshot(&self, input: StatusInput, series: usize) -> Snapshot {
        let usage = self.reconciler.usage();
        let live = self.reconciler.connections().map(|(group, address, count)| (group.clone(), address, count));
        Snapshot {
            status: self.status(input),
            is_ready: self.is_ready,
            no_local: no_local(self.tables.groups().map(|(_, plan)| plan)),
            resting: [
                ("service", usage.resting_services),
                ("backend", usage.resting_backends),
                ("slot", usage.resting_slots),
            ],
            connections: Connections::of(live, series),
        }
    }
}

/// Silence in a scope means that a Local policy found none here while there are endpoints elsewhere.
fn no_local<'a>(plans: impl Iterator<Item = &'a GroupPlan>) -> BTreeMap<Family, NoLocal> {
    let mut counts = BTreeMap::from(Family::ALL.map(|family| (family, NoLocal::default())));
    for plan in plans {
        let count = counts.entry(plan.key.family).or_default();
        count.internal += usize::from(plan.scopes[Scope::Cluster as usize] == ScopePlan::Drop);
        count.external += usize::from(plan.scopes[Scope::Outside as usize] == ScopePlan::Drop);
    }
    counts
}

#[cfg(test)]
mod tests;
