//! When the engine's thread wakes up by itself: to try again what failed, to give back what has rested, and once an
//! hour to compare everything, as kube-proxy does.
//!
//! Unlike kube-proxy's runner it keeps no minimum gap between two passes: a pass costs what changed, and what came
//! together is planned together.

use std::time::Duration;

use tokio::time::Instant;

/// After a failed pass, how long until it is tried again; doubled up to [`LONGEST_RETRY`].
const FIRST_RETRY: Duration = Duration::from_millis(100);
const LONGEST_RETRY: Duration = Duration::from_secs(5);
/// Freed entries rest at least so long: long enough that a burst of changes costs one grace period.
const REST: Duration = Duration::from_secs(1);
/// Everything is compared again so often.
const FULL: Duration = Duration::from_secs(3600);
const _: () = assert!(FIRST_RETRY.as_millis() < LONGEST_RETRY.as_millis() && LONGEST_RETRY.as_secs() < FULL.as_secs());

/// The wake-ups to come.
#[derive(Debug)]
pub struct Timers {
    retry: Option<Instant>,
    /// Until the next retry but one.
    pause: Duration,
    rest: Option<Instant>,
    full: Instant,
}

impl Timers {
    /// Nothing has failed, nothing rests.
    pub fn new(now: Instant) -> Self {
        Self { retry: None, pause: FIRST_RETRY, rest: None, full: now + FULL }
    }

    /// When to wake up, unless something happens before.
    pub fn next(&self) -> Instant {
        [self.retry, self.rest].into_iter().flatten().fold(self.full, Instant::min)
    }

    /// Whether everything is to be compared now.
    pub fn is_full_pass_due(&mut self, now: Instant) -> bool {
        let is_due = self.full <= now;
        if is_due {
            self.full = now + FULL;
        }
        is_due
    }

    /// Whether what rested is to be given back now.
    pub fn is_rest_over(&mut self, now: Instant) -> bool {
        self.rest.take_if(|at| *at <= now).is_some()
    }

    /// A pass is over: whether everything is `done`, or some is to be tried again; whether something rests.
    pub fn passed(&mut self, now: Instant, done: bool, rests: bool) {
        if done {
            (self.retry, self.pause) = (None, FIRST_RETRY);
        } else if self.retry.is_none_or(|at| at <= now) {
            self.retry = Some(now + self.pause);
            self.pause = (self.pause * 2).min(LONGEST_RETRY);
        }
        if rests {
            self.rest.get_or_insert(now + REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds after the start at which a pass begins, when the passes asked for are at `requests` and those at
    /// `fails` fail. `resting` says until when something rests.
    fn passes(requests: &[u64], fails: &dyn Fn(u64) -> bool, resting: u64, until: u64) -> Vec<u64> {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let (mut timers, mut requests, mut passes) =
            (Timers::new(start), requests.iter().copied().peekable(), Vec::new());
        loop {
            let timer = (timers.next() - start).as_millis() as u64;
            let now = requests.next_if(|request| *request <= timer).unwrap_or(timer);
            if now > until {
                return passes;
            }
            timers.is_full_pass_due(at(now));
            timers.is_rest_over(at(now));
            timers.passed(at(now), !fails(now), now < resting);
            passes.push(now);
        }
    }

    /// What it is about; requests; which passes fail; until when something rests; until when to look; passes.
    type Row<'a> = (&'a str, &'a [u64], &'a dyn Fn(u64) -> bool, u64, u64, &'a [u64]);

    #[test]
    fn passes_follow_requests_at_once_and_failures_after_a_while() {
        let never = |_| false;
        let always = |_| true;
        let at_first = |now| now == 0;
        let hour = 3_600_000;
        let rows: [Row<'_>; 12] = [
            ("RUN-1 a request", &[0], &never, 0, 999, &[0]),
            ("RUN-2 more within a second: no gap is kept", &[0, 500, 999], &never, 0, 2000, &[0, 500, 999]),
            ("RUN-3 right after a pass", &[0, 0, 1], &never, 0, 2000, &[0, 0, 1]),
            ("RUN-4 no request", &[0], &never, 0, 10_000, &[0]),
            ("RUN-5 the periodic pass", &[0], &never, 0, hour, &[0, hour]),
            ("RUN-6 a request after it", &[hour + 1], &never, 0, hour + 1000, &[hour, hour + 1]),
            ("RUN-7 a failure", &[0], &at_first, 0, 1000, &[0, 100]),
            ("RUN-8 a request succeeds before the retry", &[0, 50], &at_first, 0, 1000, &[0, 50]),
            ("RUN-9 then only the periodic pass", &[0, 50], &at_first, 0, hour, &[0, 50, hour]),
            (
                "RUN-10 failure after failure",
                &[0],
                &always,
                0,
                16_300,
                &[0, 100, 300, 700, 1500, 3100, 6300, 11_300, 16_300],
            ),
            ("a request that fails too moves no retry", &[0, 50], &|now| now < 100, 0, 1000, &[0, 50, 100]),
            ("what rests", &[0], &never, 1500, 10_000, &[0, 1000, 2000]),
        ];
        for (id, requests, fails, resting, until, expected) in rows {
            assert_eq!(passes(requests, fails, resting, until), expected, "{id}");
        }
    }
}
