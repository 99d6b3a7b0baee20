//! How often a request is tried: at most about once a second, and at least every five.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

use tokio::time::Instant;

/// Shortest time from one try to the next.
const SHORTEST: Duration = Duration::from_secs(1);
/// Longest wait before jitter; with it, five seconds.
const LONGEST: Duration = Duration::from_secs(4);

/// The rhythm of one kind of request.
#[derive(Default)]
pub struct Pace {
    last: Option<Instant>,
    failures: u32,
}

impl Pace {
    /// Waits for the next turn. The first comes at once.
    pub async fn turn(&mut self) {
        if let Some(last) = self.last {
            tokio::time::sleep_until(last + self.wait()).await;
        }
        self.last = Some(Instant::now());
    }

    /// The last try did what it should.
    pub const fn succeeded(&mut self) {
        self.failures = 0;
    }

    /// It did not. The wait counts from now, so that a server that answers slowly is not asked more often.
    pub fn failed(&mut self) {
        self.failures += 1;
        self.last = Some(Instant::now());
    }

    fn wait(&self) -> Duration {
        let doubled = SHORTEST * 2_u32.pow(self.failures.saturating_sub(1).min(8));
        jitter(doubled.min(LONGEST), 4)
    }
}

/// `time` and up to its `part`th more, at random, so that the nodes of a cluster do not ask in step.
pub fn jitter(time: Duration, part: u32) -> Duration {
    let random = RandomState::new().hash_one(()) % 1024;
    time + time / part * random as u32 / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_from_one_second_to_at_most_five() {
        for (failures, least, most) in [(0, 1.0, 1.25), (1, 1.0, 1.25), (2, 2.0, 2.5), (3, 4.0, 5.0), (1000, 4.0, 5.0)]
        {
            let wait = Pace { last: None, failures }.wait().as_secs_f64();
            assert!((least..=most).contains(&wait), "{failures} failures: {wait} s");
        }
    }
}
