//! What the machines said, as a table of kernels and scenarios.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;

use super::machine::Run;
use crate::tally::{SKIPPED, Tally, UNSTEADY};

/// Shown of the console of a machine in which something failed.
const TAIL: usize = 120;

/// How a scenario went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// How a machine went.
pub struct Report {
    /// Name in the matrix.
    pub kernel: String,
    /// By "command" or "command: test".
    outcomes: BTreeMap<String, Outcome>,
    failure: Option<String>,
    time: Duration,
    lines: Vec<String>,
    log: PathBuf,
}

impl Report {
    /// Reads what a machine said.
    pub fn new(kernel: &str, run: Result<Run>, log: &Path) -> Self {
        let (kernel, log) = (kernel.to_owned(), log.to_owned());
        match run {
            Ok(Run { lines, failure, time }) => Self { kernel, outcomes: outcomes(&lines), failure, time, lines, log },
            Err(error) => Self {
                kernel,
                outcomes: BTreeMap::new(),
                failure: Some(format!("it could not be run: {error:#}")),
                time: Duration::ZERO,
                lines: Vec::new(),
                log,
            },
        }
    }

    /// Boots, and tells; once more if that is wanted where something failed.
    pub fn of(retry: bool, boot: impl Fn() -> Self) -> Self {
        let first = boot();
        first.tell();
        if !retry || first.is_fine() {
            return first;
        }
        let second = boot();
        second.tell();
        if second.is_fine() {
            println!("{UNSTEADY}vm {}: failed, and held when booted again", second.kernel);
        }
        second
    }

    fn is_fine(&self) -> bool {
        self.failure.is_none() && self.count(Outcome::Failed) == 0
    }

    fn count(&self, outcome: Outcome) -> usize {
        self.outcomes.values().filter(|found| **found == outcome).count()
    }

    /// A line for the terminal, and the end of the console when something failed.
    fn tell(&self) {
        let (passed, failed) = (self.count(Outcome::Passed), self.count(Outcome::Failed));
        let Self { kernel, time, failure, .. } = self;
        if !self.is_fine() {
            let tail = &self.lines[self.lines.len().saturating_sub(TAIL)..];
            println!("── console of {kernel} (all of it: {})\n{}", self.log.display(), tail.join("\n"));
        }
        let ending = failure.as_ref().map(|failure| format!("; {failure}")).unwrap_or_default();
        println!("vm: {kernel}: {passed} passed, {failed} failed in {:.0} s{ending}", time.as_secs_f64());
    }
}

/// What a machine runs that is no program of tests: it passes by ending well.
const COMMANDS: [&str; 1] = ["check"];

/// From the console's lines; see `tests/src/bin/init.rs`.
fn outcomes(lines: &[String]) -> BTreeMap<String, Outcome> {
    let mut all = BTreeMap::new();
    let (mut command, mut skipped) = (None, Vec::new());
    for line in lines {
        if let Some(name) = line.strip_prefix("== begin ") {
            command = Some(name);
            all.insert(name.to_owned(), Outcome::Failed); // until it has ended well
        } else if let Some(words) = line.strip_prefix("== end ") {
            let mut words = words.split(' ');
            if let (Some(name), Some("0")) = (words.next(), words.next()) {
                // Its tests speak for it. Without any, a filter has matched nothing: a test may have another name now.
                if COMMANDS.contains(&name) {
                    all.insert(name.to_owned(), Outcome::Passed);
                } else if all.keys().any(|key| key.strip_prefix(name).is_some_and(|rest| rest.starts_with(": "))) {
                    all.remove(name);
                }
            }
            command = None;
        } else if let Some(test) = line.strip_prefix(SKIPPED).and_then(|rest| rest.split(':').next()) {
            skipped.push(test);
        } else if let (Some(command), Some((test, result))) =
            (command, line.strip_prefix("test ").and_then(|rest| rest.split_once(" ... ")))
        {
            let outcome = match result {
                "ok" if skipped.contains(&test) => Outcome::Skipped,
                "ok" => Outcome::Passed,
                "ignored" => Outcome::Skipped,
                _ => Outcome::Failed,
            };
            all.insert(format!("{command}: {}", test.replace('_', " ")), outcome);
        }
    }
    all
}

/// The table, and its sums.
pub fn print(reports: &[Report]) -> Tally {
    let mut scenarios: Vec<&String> = reports.iter().flat_map(|report| report.outcomes.keys()).collect();
    scenarios.sort();
    scenarios.dedup();
    let width = scenarios.iter().map(|scenario| scenario.len()).max().unwrap_or(0).max("SCENARIO".len());
    let row = |first: &str, cells: Vec<String>| {
        let cells: String = cells.iter().map(|cell| format!(" {cell:>8}")).collect();
        println!("{first:<width$}{cells}");
    };
    println!();
    row("SCENARIO", reports.iter().map(|report| report.kernel.clone()).collect());
    for scenario in scenarios {
        let cell = |report: &Report| match report.outcomes.get(scenario) {
            Some(Outcome::Passed) => "ok",
            Some(Outcome::Failed) => "FAILED",
            Some(Outcome::Skipped) => "skipped",
            None => "-",
        };
        row(scenario, reports.iter().map(|report| cell(report).to_owned()).collect());
    }
    row("time", reports.iter().map(|report| format!("{:.0} s", report.time.as_secs_f64())).collect());
    println!();
    let total = |outcome| reports.iter().map(|report| report.count(outcome)).sum::<usize>();
    let (passed, skipped) = (total(Outcome::Passed), total(Outcome::Skipped));
    let dead = reports.iter().filter(|report| report.failure.is_some()).count();
    let failed = total(Outcome::Failed).max(dead);
    let time = reports.iter().map(|report| report.time).sum();
    Tally { passed, failed, skipped, time }
}

#[cfg(test)]
mod tests {
    use super::{Outcome, outcomes};

    #[test]
    fn a_console_is_read() {
        let console = "\
[    0.5] Linux\n\
== begin check\nBPF ok\n== end check 0 31\n\
== begin load\nSKIPPED b_two: no root\ntest a_one ... ok\ntest b_two ... ok\ntest c ... FAILED\n== end load 101 900\n\
== begin harness\ntest e ... ok\n== end harness 0 10\n\
== begin renamed\ntest result: ok. 0 passed\n== end renamed 0 10\n\
== begin kernels\ntest d ... ok\n[   9.0] Kernel panic";
        let lines: Vec<String> = console.lines().map(str::to_owned).collect();
        let expected: [(&str, Outcome); 9] = [
            ("check", Outcome::Passed),
            ("harness: e", Outcome::Passed),
            ("kernels", Outcome::Failed),
            ("kernels: d", Outcome::Passed),
            ("load", Outcome::Failed),
            ("load: a one", Outcome::Passed),
            ("load: b two", Outcome::Skipped),
            ("load: c", Outcome::Failed),
            ("renamed", Outcome::Failed),
        ];
        let found: Vec<_> = outcomes(&lines).into_iter().collect();
        assert_eq!(found, expected.map(|(name, outcome)| (name.to_owned(), outcome)));
    }
}
