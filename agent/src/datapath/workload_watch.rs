//! Whether the devices of workloads have programs. Every packet of a pod pays for them, so they are there only while
//! they may have something to do: hide a client from a workload of this node, and bring the reply back.

use sheave_ebpf::meta::{MASQUERADED_FLOWS, WORKLOAD_PROGRAMS};

use super::words::Words;

/// Decides, and tells the programs what was decided.
pub struct WorkloadWatch {
    meta: Words,
    /// Devices of workloads have programs, or get them now.
    pub is_on: bool,
    /// Clients outside the cluster have something to dial; `None` = not known yet.
    pub serves_outsiders: Option<bool>,
    /// All devices have all programs at any time.
    always: bool,
    /// A client outside dialled an address that is meant for the cluster alone. It may come again.
    was_asked: bool,
}

impl WorkloadWatch {
    /// As a predecessor left it, unless they are `always` on; `meta` is the map of that name.
    pub fn adopt(meta: Words, always: bool) -> Self {
        let is_on = always || meta.load(WORKLOAD_PROGRAMS) != 0;
        Self { meta, is_on, serves_outsiders: None, always, was_asked: false }
    }

    /// Decides anew; says whether devices are to get or to lose programs.
    ///
    /// Off takes two looks. After the first, programs hide no client from a workload any more; by the second, a packet
    /// that was on its way has arrived.
    pub fn look(&mut self) -> bool {
        let are_flows = self.meta.load(MASQUERADED_FLOWS) != 0;
        self.was_asked |= are_flows && !self.is_on;
        let wanted = self.always || are_flows || self.was_asked || self.serves_outsiders.unwrap_or(self.is_on);
        if wanted == self.is_on {
            self.tell_programs();
            return false;
        }
        if !wanted && self.meta.load(WORKLOAD_PROGRAMS) != 0 {
            self.store(false);
            return false;
        }
        self.is_on = wanted;
        true
    }

    /// To be called when devices have their programs.
    pub fn tell_programs(&self) {
        if self.is_on {
            self.store(true);
        }
    }

    fn store(&self, value: bool) {
        if let Err(error) = self.meta.store(WORKLOAD_PROGRAMS, value.into()) {
            tracing::warn!(%error, "cannot tell the programs of which devices they are");
        }
    }
}
