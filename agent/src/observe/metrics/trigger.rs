//! How long ago the changes that are being programmed were made.

use std::collections::BTreeMap;

use crate::model::{Family, ServiceName, SliceChange};

/// Trigger times of changes that are not in the kernel yet.
#[derive(Clone, Debug, Default)]
pub struct Triggers {
    /// Older ones are not ours to answer for: what the first lists bring was programmed by a predecessor.
    since: i128,
    pending: BTreeMap<ServiceName, Vec<(Family, i128)>>,
}

impl Triggers {
    /// Counts what is triggered after `since`, Unix nanoseconds.
    #[must_use]
    pub const fn new(since: i128) -> Self {
        Self { since, pending: BTreeMap::new() }
    }

    /// Takes in a change. One that removes a slice makes it impossible to say what the Service still waits for.
    pub fn record(&mut self, change: &SliceChange) {
        if change.removed {
            if let Some(times) = self.pending.get_mut(&change.service) {
                times.retain(|(family, _)| *family != change.family);
            }
        } else if let Some(time) = change.trigger_time.filter(|time| *time > self.since) {
            self.pending.entry(change.service.clone()).or_default().push((change.family, time));
        }
    }

    /// What has been programmed now, by Service.
    pub fn take(&mut self) -> BTreeMap<ServiceName, Vec<(Family, i128)>> {
        let mut taken = std::mem::take(&mut self.pending);
        taken.retain(|_, times| !times.is_empty());
        taken
    }
}
