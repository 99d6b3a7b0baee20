//! `/healthz` and `/livez` as kube-proxy 1.36 answers them: timing, the Node's part in it, bodies.

use std::time::{Duration, Instant, SystemTime};

use super::{Health, Moment, Probe};
use crate::model::Family::{self, V4, V6};

/// A clock that goes when told.
#[derive(Clone, Copy)]
struct Clock {
    start: Moment,
    seconds: u64,
}

impl Clock {
    /// 2026-09-01 10:00:00 UTC, and half a second.
    fn new() -> Self {
        let wall = SystemTime::UNIX_EPOCH + Duration::new(1_788_256_800, 500_000_000);
        Self { start: Moment { monotonic: Instant::now(), wall }, seconds: 0 }
    }

    fn now(self) -> Moment {
        self.at(self.seconds)
    }

    fn at(self, seconds: u64) -> Moment {
        let passed = Duration::from_secs(seconds);
        Moment { monotonic: self.start.monotonic + passed, wall: self.start.wall + passed }
    }
}

enum Step {
    Ask(&'static [Family]),
    Done(&'static [Family]),
    Wait(u64),
}
use Step::{Ask, Done, Wait};

/// Healthy as a whole; IPv4 and IPv6, `None` where not judged yet.
type Healths = (bool, Option<bool>, Option<bool>);

const ALL: Healths = (true, Some(true), Some(true));
const NO_V4: Healths = (false, Some(false), Some(true));
const NO_V6: Healths = (false, Some(true), Some(false));
const NONE: Healths = (false, Some(false), Some(false));
const BOTH: &[Family] = &[V4, V6];

/// Row, steps, state then, and the second that lastUpdated shows; `None` = now.
type Row = (&'static str, &'static [Step], Healths, Option<u64>);

/// One server lives through all of these, a row after the other.
const ROWS: &[Row] = &[
    ("NH-1", &[], (true, None, None), None),
    ("NH-2", &[Done(BOTH)], ALL, None),
    ("NH-3", &[Wait(25)], ALL, None),
    ("NH-4", &[Ask(&[V4]), Wait(25)], NO_V4, Some(0)),
    ("NH-5", &[Done(BOTH), Wait(5)], ALL, None),
    ("NH-6", &[Ask(&[V6]), Wait(25)], NO_V6, Some(50)),
    ("NH-7", &[Done(BOTH), Wait(5)], ALL, None),
    ("NH-8", &[Ask(BOTH), Wait(25)], NONE, Some(80)),
    ("NH-9", &[Done(BOTH), Wait(5)], ALL, None),
    ("NH-10, not yet", &[Ask(&[V6]), Wait(25)], NO_V6, Some(110)),
    ("NH-10", &[Done(&[V4])], NO_V6, Some(140)),
    ("NH-11", &[Done(&[V6])], ALL, None),
    ("NH-12, not yet", &[Ask(BOTH), Wait(25)], NONE, Some(140)),
    ("NH-12", &[Done(BOTH)], ALL, None),
    ("NH-14", &[Ask(&[V4]), Wait(5), Ask(&[V4]), Wait(5)], NO_V4, Some(165)),
];

/// A server of its own.
const FRESH: &[Row] = &[("NH-13", &[Ask(&[V4]), Wait(25)], (true, None, None), None)];

#[test]
fn work_that_is_asked_for_and_not_finished_makes_the_node_unhealthy() {
    for rows in [ROWS, FRESH] {
        let (mut health, mut clock) = (Health::new(Duration::from_secs(10)), Clock::new());
        health.set_eligible(true);
        for (row, steps, expected, last_updated) in rows {
            for step in *steps {
                match step {
                    Ask(families) => health.requested(families, clock.now()),
                    Done(families) => health.finished(families, clock.now()),
                    Wait(seconds) => clock.seconds += seconds,
                }
            }
            for probe in [Probe::Healthz, Probe::Livez] {
                let answer = health.answer(probe, clock.now());
                let body: serde_json::Value = serde_json::from_str(&answer.body).unwrap();
                let part = |family: &str| body["status"][family]["healthy"].as_bool();
                let found = (body["healthy"] == true, part("IPv4"), part("IPv6"));
                assert_eq!((answer.is_well, found), (expected.0, *expected), "{row} {probe:?}");
                let at = clock.at(last_updated.unwrap_or(clock.seconds));
                assert_eq!(body["lastUpdated"], super::answer::text(at), "{row} {probe:?}");
                assert_eq!(body["currentTime"], super::answer::text(clock.now()), "{row} {probe:?}");
            }
        }
    }
}

#[test]
fn a_node_that_goes_away_is_drained_but_lives() {
    // NE-2 is NE-1 to this module, and NE-3 is NE-4: `source::convert` reads taints and deletion.
    for (row, told, eligible) in
        [("NE-1, NE-2", Some(true), true), ("NE-3, NE-4", Some(false), false), ("NE-5", None, false)]
    {
        let (mut health, clock) = (Health::new(Duration::from_secs(10)), Clock::new());
        if let Some(eligible) = told {
            health.set_eligible(eligible);
        }
        let healthz = health.answer(Probe::Healthz, clock.now());
        let livez = health.answer(Probe::Livez, clock.now());
        assert_eq!((healthz.is_well, livez.is_well), (eligible, true), "{row}");
        assert!(healthz.body.contains(&format!(r#""nodeEligible":{eligible},"healthy":true"#)), "{row}: {healthz:?}");
        assert!(!livez.body.contains("nodeEligible"), "{row}: {livez:?}");
    }
}

#[test]
fn the_bodies_are_those_of_kube_proxy() {
    let (mut health, mut clock) = (Health::new(Duration::from_secs(10)), Clock::new());
    health.set_eligible(true);
    let body = |health: &Health, probe, clock: Clock| health.answer(probe, clock.now()).body;
    let nothing_yet = r#"{"lastUpdated":"2026-09-01T10:00:00.5Z","currentTime":"2026-09-01T10:00:00.5Z","#;
    assert_eq!(body(&health, Probe::Healthz, clock), format!(r#"{nothing_yet}"nodeEligible":true,"healthy":true}}"#));
    assert_eq!(body(&health, Probe::Livez, clock), format!(r#"{nothing_yet}"healthy":true}}"#));

    health.finished(BOTH, clock.now());
    health.requested(&[V6], clock.now());
    clock.seconds = 10;
    let unhealthy = concat!(
        r#"{"lastUpdated":"2026-09-01T10:00:00.5Z","currentTime":"2026-09-01T10:00:10.5Z","nodeEligible":true,"#,
        r#""healthy":false,"status":{"IPv4":{"lastUpdated":"2026-09-01T10:00:10.5Z","healthy":true},"#,
        r#""IPv6":{"lastUpdated":"2026-09-01T10:00:00.5Z","healthy":false}}}"#,
    );
    assert_eq!(body(&health, Probe::Healthz, clock), unhealthy);
}

#[test]
fn it_is_ready_once_the_first_full_pass_is_in_the_kernel() {
    let (mut health, clock) = (Health::new(Duration::from_secs(10)), Clock::new());
    assert!(!health.answer(Probe::Readyz, clock.now()).is_well);
    health.set_ready();
    let ready = health.answer(Probe::Readyz, clock.now());
    assert!(ready.is_well && ready.body == "ok");
}
