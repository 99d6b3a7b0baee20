//! Whether the devices of workloads have programs. Every packet of a pod pays for them, so they are there only while
//! they may have something to do: hide a client from a workload of this node, and bring the reply back.

use sheave_ebpf::meta::{MASQUERADED_FLOWS, PLAIN_FLOWS, PODS_DIAL, WORKLOAD_PROGRAMS};

use super::words::Words;

/// Decides, and tells the programs what was decided.
pub struct WorkloadWatch {
    meta: Words,
    /// Devices of workloads have programs, or get them now.
    pub is_on: bool,
    /// Clients outside the cluster have something to dial; `None` = not known yet.
    pub serves_outsiders: Option<bool>,
    /// Devices of workloads have the programs for clients: pods are to dial packet by packet, or were while flows began
    /// that still live.
    pub pods_dial: bool,
    /// They are now; `None` = not known yet.
    pub pods_are_to_dial: Option<bool>,
    /// All devices have all programs at any time.
    always: bool,
    /// A client outside dialled an address that is meant for the cluster alone. It may come again.
    was_asked: bool,
}

impl WorkloadWatch {
    /// As a predecessor left it, unless they are `always` on; `meta` is the map of that name.
    pub fn adopt(meta: Words, always: bool) -> Self {
        let is_on = always || meta.load(WORKLOAD_PROGRAMS) != 0;
        let pods_dial = meta.load(PODS_DIAL) != 0;
        Self { meta, is_on, serves_outsiders: None, pods_dial, pods_are_to_dial: None, always, was_asked: false }
    }

    /// Decides anew; says whether devices are to get or to lose programs.
    ///
    /// Off takes two looks. After the first, programs hide no client from a workload any more; by the second, a packet
    /// that was on its way has arrived.
    pub fn look(&mut self) -> bool {
        let changed = self.look_at_pods();
        let are_flows = self.meta.load(MASQUERADED_FLOWS) != 0;
        self.was_asked |= are_flows && !self.is_on;
        let wanted = self.always || are_flows || self.was_asked || self.serves_outsiders.unwrap_or(self.is_on);
        if wanted == self.is_on {
            self.tell_programs();
            return changed;
        }
        if !wanted && self.meta.load(WORKLOAD_PROGRAMS) != 0 {
            self.store(WORKLOAD_PROGRAMS, false);
            return changed;
        }
        self.is_on = wanted;
        true
    }

    /// To be called when devices have their programs.
    pub fn tell_programs(&self) {
        if self.is_on {
            self.store(WORKLOAD_PROGRAMS, true);
        }
    }

    fn look_at_pods(&mut self) -> bool {
        let are_flows = [MASQUERADED_FLOWS, PLAIN_FLOWS].iter().any(|kind| self.meta.load(*kind) != 0);
        let dial = self.pods_are_to_dial.unwrap_or(self.pods_dial) || (self.pods_dial && are_flows);
        if dial == self.pods_dial {
            return false;
        }
        self.store(PODS_DIAL, dial);
        self.pods_dial = dial;
        true
    }

    fn store(&self, word: u32, value: bool) {
        if let Err(error) = self.meta.store(word, value.into()) {
            tracing::warn!(%error, "cannot tell the programs, and a successor, of which devices they are");
        }
    }
}
