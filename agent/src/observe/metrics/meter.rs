//! What the engine's loop tells the metrics.

use std::time::{Duration, UNIX_EPOCH};

use super::{Metrics, Triggers, ip_family, unix_seconds};
use crate::model::{Family, Noted};

/// How far a pass went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Over everything.
    Full,
    /// Over what changed.
    Partial,
}

/// Keeps the metrics of the loop. Both families are written together, so both are told the same.
#[derive(Debug)]
pub struct Meter {
    metrics: Metrics,
    triggers: Triggers,
}

impl Meter {
    /// From now on.
    #[must_use]
    pub fn new(metrics: Metrics) -> Self {
        let now = UNIX_EPOCH.elapsed().unwrap_or_default();
        Self { metrics, triggers: Triggers::new(now.as_nanos() as i128) }
    }

    /// Objects changed.
    pub fn noted(&mut self, noted: &Noted) {
        let Noted { services, slices } = noted;
        self.metrics.service_changes.inc_by(*services as u64);
        self.metrics.service_changes_pending.inc_by(*services as i64);
        self.metrics.endpoint_changes.inc_by(slices.len() as u64);
        self.metrics.endpoint_changes_pending.inc_by(slices.len() as i64);
        for slice in slices {
            self.triggers.record(slice);
        }
    }

    /// There is something to do.
    pub fn requested(&self) {
        for family in Family::ALL {
            self.metrics.last_requested.get_or_create(&ip_family(family)).set(unix_seconds());
        }
    }

    /// It was tried.
    pub fn passed(&mut self, pass: Pass, took: Duration, is_good: bool) {
        self.metrics.reconcile.observe(took.as_secs_f64());
        self.metrics.service_changes_pending.set(0);
        self.metrics.endpoint_changes_pending.set(0);
        let by_extent = match pass {
            Pass::Full => &self.metrics.sync_full,
            Pass::Partial => &self.metrics.sync_partial,
        };
        for family in Family::ALL {
            let label = ip_family(family);
            for histogram in [&self.metrics.sync, by_extent] {
                histogram.get_or_create(&label).observe(took.as_secs_f64());
            }
            if is_good {
                self.metrics.last_finished.get_or_create(&label).set(unix_seconds());
            }
        }
        if is_good {
            let now = unix_seconds();
            for (family, time) in self.triggers.take().into_values().flatten() {
                let waited = now - time as f64 / 1e9;
                self.metrics.programming.get_or_create(&ip_family(family)).observe(waited.max(0.0));
            }
        }
    }
}
