//! What is no longer named rests before it is used again: a running program may still hold it, a connection count on
//! it.

use std::collections::BTreeSet;

use sheave_ebpf::{backend, backend::Backend};

use super::Reconciler;
use crate::datapath::{Datapath, Result};

/// Freed things by age.
#[derive(Debug, Default)]
pub(super) struct Resting {
    /// Since the last grace period.
    fresh: Things,
    /// A grace period is over for these.
    aged: Things,
}

#[derive(Debug, Default)]
struct Things {
    runs: Vec<(u32, u32)>,
    backends: Vec<u32>,
    services: Vec<u32>,
}

impl Resting {
    pub(super) fn run(&mut self, offset: u32, length: u32) {
        self.fresh.runs.push((offset, length));
    }

    pub(super) fn backend(&mut self, id: u32) {
        self.fresh.backends.push(id);
    }

    pub(super) fn service(&mut self, id: u32) {
        self.fresh.services.push(id);
    }

    /// Service ids, backend ids, slots.
    pub(super) fn counts(&self) -> [usize; 3] {
        let both = [&self.fresh, &self.aged];
        let sum = |count: fn(&Things) -> usize| both.into_iter().map(count).sum();
        [
            sum(|t| t.services.len()),
            sum(|t| t.backends.len()),
            sum(|t| t.runs.iter().map(|(_, length)| *length as usize).sum()),
        ]
    }

    const fn has_fresh(&self) -> bool {
        !(self.fresh.runs.is_empty() && self.fresh.backends.is_empty() && self.fresh.services.is_empty())
    }

    /// Something could be given back, now or when its connections end.
    const fn is_empty(&self) -> bool {
        !self.has_fresh() && self.aged.backends.is_empty() && self.aged.services.is_empty()
    }
}

impl<D: Datapath> Reconciler<D> {
    /// Whether [`reclaim`](Self::reclaim) may have something to do.
    #[must_use]
    pub const fn is_resting(&self) -> bool {
        !self.resting.is_empty()
    }

    /// Gives back what has rested long enough. Waits for a grace period when something fresh rests.
    ///
    /// # Errors
    /// When there can be no grace period. What the kernel refuses to free keeps resting.
    pub fn reclaim(&mut self) -> Result<()> {
        if self.resting.has_fresh() {
            self.grace()?;
        }
        for (offset, length) in std::mem::take(&mut self.resting.aged.runs) {
            self.runs.release(offset, length);
        }
        // A backend with connections stays: their close counts down on its id.
        let mut busy_services = BTreeSet::new();
        let mut resting = Vec::new();
        while let Some(id) = self.resting.aged.backends.pop() {
            let is_busy = backend::connections(self.datapath.connections(id)) > 0;
            if is_busy || self.free_backend(id).is_err() {
                busy_services.insert(self.datapath.backend(id).service);
                resting.push(id);
            }
        }
        self.resting.aged.backends = resting;
        let mut resting = Vec::new();
        while let Some(id) = self.resting.aged.services.pop() {
            if busy_services.contains(&id) || self.datapath.remove_name(id).is_err() {
                resting.push(id);
            } else {
                self.services.release(id);
            }
        }
        self.resting.aged.services = resting;
        Ok(())
    }

    fn free_backend(&mut self, id: u32) -> Result<()> {
        self.datapath.reset_connections(id)?;
        self.datapath.put_backend(id, &Backend::UNUSED)?;
        self.backends.release(id);
        Ok(())
    }

    /// Waits until nothing read before can still be in a program's hands.
    pub(super) fn grace(&mut self) -> Result<()> {
        self.datapath.grace_period()?;
        self.deleted = false;
        let fresh = std::mem::take(&mut self.resting.fresh);
        self.resting.aged.runs.extend(fresh.runs);
        self.resting.aged.backends.extend(fresh.backends);
        self.resting.aged.services.extend(fresh.services);
        Ok(())
    }
}
