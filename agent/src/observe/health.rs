//! Whether this node forwards as told: `/healthz`, `/livez` and `/readyz`.
//!
//! Judged by the age of requested work that is not finished, so that a stuck engine is noticed without asking it. Pure:
//! the clock is the caller's.

mod answer;

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

pub use answer::{Answer, Probe};

use crate::model::Family;

/// Work this old makes the node unhealthy: twice kube-proxy's syncPeriod.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Why an agent is not ready.
pub const NOT_READY: &str = "not everything that was listed is in the kernel yet";

/// One reading of both clocks: ages come from the one that nobody sets, texts from the one that people read.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// For ages.
    pub monotonic: Instant,
    /// For texts.
    pub wall: SystemTime,
}

impl Moment {
    /// This one.
    #[must_use]
    pub fn now() -> Self {
        Self { monotonic: Instant::now(), wall: SystemTime::now() }
    }
}

/// What is known of the agent's work, by family.
#[derive(Clone, Debug)]
pub struct Health {
    timeout: Duration,
    families: [Work; 2],
    eligible: bool,
    ready: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Work {
    /// The last finished pass.
    finished: Option<Moment>,
    /// The first request since then.
    requested: Option<Moment>,
}

impl Work {
    /// A family that never finished a pass is not judged.
    fn is_healthy(self, timeout: Duration, now: Moment) -> bool {
        let age = |since: Moment| now.monotonic.saturating_duration_since(since.monotonic);
        self.finished.is_none() || self.requested.is_none_or(|since| age(since) < timeout)
    }
}

impl Health {
    /// Nothing asked for, nothing done, the Node not seen yet.
    #[must_use]
    pub fn new(timeout: Duration) -> Self {
        Self { timeout, families: [Work::default(); 2], eligible: false, ready: false }
    }

    /// Work was asked for. Counts from the first time since the last pass.
    pub fn requested(&mut self, families: &[Family], now: Moment) {
        for family in families {
            self.families[*family as usize].requested.get_or_insert(now);
        }
    }

    /// All that was asked for is done.
    pub fn finished(&mut self, families: &[Family], now: Moment) {
        for family in families {
            self.families[*family as usize] = Work { finished: Some(now), requested: None };
        }
    }

    /// Whether load balancers should send new connections to this node, as its Node object says.
    pub fn set_eligible(&mut self, eligible: bool) {
        self.eligible = eligible;
    }

    /// The first full pass is in the kernel.
    pub fn set_ready(&mut self) {
        self.ready = true;
    }

    /// Whether it is.
    #[must_use]
    pub const fn is_ready(&self) -> bool {
        self.ready
    }

    /// Whether no family has work that is too old.
    #[must_use]
    pub fn is_healthy(&self, now: Moment) -> bool {
        self.families.iter().all(|work| work.is_healthy(self.timeout, now))
    }
}

/// The one [`Health`] of an agent: the engine writes, servers read.
#[derive(Clone, Debug)]
pub struct SharedHealth(Arc<Mutex<Health>>);

impl Default for SharedHealth {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Health::new(TIMEOUT))))
    }
}

impl SharedHealth {
    /// Looks at it, or changes it. A panic elsewhere cannot have spoilt it: it is whole after every statement.
    pub fn with<T>(&self, look: impl FnOnce(&mut Health) -> T) -> T {
        look(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests;
