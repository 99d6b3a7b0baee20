//! Counting tests, and the last line that everything which runs tests ends with.

use std::{
    ops::AddAssign,
    time::{Duration, Instant},
};

use anyhow::Result;

/// Results of one suite, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Tests that held.
    pub passed: usize,
    /// Tests that did not.
    pub failed: usize,
    /// Tests that could not be run here.
    pub skipped: usize,
    /// What they took together.
    pub time: Duration,
}

/// Begins a line that names what failed at first and held when it was tried again. Such a fault is one still.
pub const UNSTEADY: &str = "UNSTEADY ";

/// Begins a line that names what this machine cannot run, and why.
pub const SKIPPED: &str = "SKIPPED ";

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.time += other.time;
    }
}

impl Tally {
    /// One test that is a question with one answer.
    pub fn of<T, E>(result: &Result<T, E>, start: Instant) -> Self {
        let failed = usize::from(result.is_err());
        Self { passed: 1 - failed, failed, skipped: 0, time: start.elapsed() }
    }

    /// So many tests that cannot be run here.
    pub fn skipped(skipped: usize) -> Self {
        Self { skipped, ..Self::default() }
    }

    /// The heads of the columns that `row` fills.
    pub fn heads() -> String {
        format!("{:>7} {:>7} {:>8} {:>8}", "PASSED", "FAILED", "SKIPPED", "TIME")
    }

    /// Cells of a table, with a mark where something failed.
    pub fn row(&self) -> String {
        let Self { passed, failed, skipped, time } = self;
        let mark = if *failed > 0 { "  ← failed" } else { "" };
        format!("{passed:>7} {failed:>7} {skipped:>8} {:>7.1}s{mark}", time.as_secs_f64())
    }

    /// Prints the last line; ends the process when anything failed or nothing held.
    pub fn conclude(&self) {
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        if self.failed > 0 || self.passed + self.skipped == 0 {
            std::process::exit(1); // the line above stays the last one
        }
    }
}
