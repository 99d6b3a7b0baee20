//! What ginkgo reports, and the table made of it.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::tally::{Tally, UNSTEADY};

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Suite {
    /// Null where a process of the suite died.
    spec_reports: Option<Vec<Spec>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Spec {
    container_hierarchy_texts: Option<Vec<String>>,
    leaf_node_text: String,
    leaf_node_type: String,
    state: String,
    /// Nanoseconds.
    run_time: u64,
    /// With `--retry`, more than one where it failed at first.
    #[serde(default)]
    num_attempts: u32,
    #[serde(default)]
    failure: Failure,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Failure {
    #[serde(default)]
    message: String,
}

/// How the tests went.
pub struct Report {
    /// Name, outcome, time, and the first line of what is to be said.
    rows: Vec<(String, Outcome, Duration, String)>,
    time: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    /// At the second try.
    Unsteady,
    Failed,
    Skipped,
}

impl Report {
    /// Reads what ginkgo wrote.
    pub fn read(path: &Path, time: Duration) -> Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let suites: Vec<Suite> = serde_json::from_slice(&text).context("ginkgo's report is not as expected")?;
        let specs = suites.into_iter().filter_map(|suite| suite.spec_reports).flatten();
        Ok(Self { rows: specs.filter_map(row).collect(), time })
    }

    fn tally(&self) -> Tally {
        let count = |wanted| self.rows.iter().filter(|(_, outcome, ..)| *outcome == wanted).count();
        let passed = count(Outcome::Passed) + count(Outcome::Unsteady);
        let (failed, skipped) = (count(Outcome::Failed), count(Outcome::Skipped));
        Tally { passed, failed, skipped, time: self.time }
    }

    /// The table; failures last, where they are seen.
    pub fn print(mut self) -> Tally {
        self.rows.sort_by(|a, b| (a.1 == Outcome::Failed, &a.0).cmp(&(b.1 == Outcome::Failed, &b.0)));
        println!("\n{:<8} {:>6}  TEST", "RESULT", "TIME");
        for (name, outcome, time, reason) in &self.rows {
            let word = match outcome {
                Outcome::Passed => "ok",
                Outcome::Unsteady => UNSTEADY.trim_end(),
                Outcome::Failed => "FAILED",
                Outcome::Skipped => "skipped",
            };
            println!("{word:<8} {:>5.0}s  {name}", time.as_secs_f64());
            if !reason.is_empty() {
                println!("{:<17}{reason}", "");
            }
        }
        println!("\nin {} s", self.time.as_secs());
        self.tally()
    }
}

/// Nothing for tests that were not asked for.
fn row(spec: Spec) -> Option<(String, Outcome, Duration, String)> {
    let reason = spec.failure.message.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let outcome = match spec.state.as_str() {
        "passed" if spec.leaf_node_type == "It" && spec.num_attempts > 1 => Outcome::Unsteady,
        "passed" if spec.leaf_node_type == "It" => Outcome::Passed,
        // Those that focus and skip leave out have no reason.
        "skipped" if spec.leaf_node_type == "It" && !reason.is_empty() => Outcome::Skipped,
        "passed" | "skipped" | "pending" => return None,
        _ => Outcome::Failed, // failed, panicked, timed out, interrupted; set-up and tear-down of the suite, too
    };
    let mut words = spec.container_hierarchy_texts.unwrap_or_default();
    words.push(if spec.leaf_node_text.is_empty() { spec.leaf_node_type } else { spec.leaf_node_text });
    Some((words.join(" "), outcome, Duration::from_nanos(spec.run_time), reason.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Spec, row};

    #[test]
    fn only_what_was_asked_for_counts() {
        let spec = |kind: &str, state: &str, message: &str, attempts: u32| -> Spec {
            serde_json::from_value(serde_json::json!({
                "ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeText": "should serve",
                "LeafNodeType": kind, "State": state, "RunTime": 2_000_000_000_u64, "NumAttempts": attempts, "Failure": {"Message": message},
            }))
            .unwrap()
        };
        for (kind, state, message, attempts, expected) in [
            ("It", "passed", "", 1, Some(Outcome::Passed)),
            ("It", "passed", "", 2, Some(Outcome::Unsteady)),
            ("It", "failed", "timed out", 2, Some(Outcome::Failed)),
            ("It", "panicked", "nil", 1, Some(Outcome::Failed)),
            ("It", "interrupted", "", 1, Some(Outcome::Failed)),
            ("It", "skipped", "requires 3 nodes", 1, Some(Outcome::Skipped)),
            ("It", "skipped", "", 0, None),
            ("SynchronizedBeforeSuite", "passed", "", 1, None),
            ("SynchronizedBeforeSuite", "failed", "no nodes", 1, Some(Outcome::Failed)),
        ] {
            let found = row(spec(kind, state, message, attempts)).map(|(_, outcome, ..)| outcome);
            assert_eq!(found, expected, "{kind} {state} {message} {attempts}");
        }
    }
}
