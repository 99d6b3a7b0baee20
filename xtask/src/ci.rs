//! `cargo xtask test --all`: what CI runs, stage by stage, within a time.
//!
//! Every stage is a command of its own that ends with "N passed, N failed, N skipped", as a person would run it. The
//! long builds that later stages need go on beside the earlier ones, with what those leave of the processors. A stage
//! that would not be done in time is left out, and counts as skipped.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    cluster, kubernetes, root,
    suites::Args,
    tally::{Tally, UNSTEADY},
};

/// What a stage takes on two cores when everything it needs is there, generously.
const KERNELS: Duration = Duration::from_secs(8 * 60);
const CLUSTER: Duration = Duration::from_secs(14 * 60);

/// Runs all stages and prints the table.
pub fn run(args: &Args, budget: Duration) {
    let start = Instant::now();
    let left = || budget.saturating_sub(start.elapsed());
    let mut table: Vec<(&str, Tally)> = Vec::new();

    let retry = if args.retry { " --retry" } else { "" };
    let mut unsteady = Vec::new();
    let mut stage = |name: &str, command: &str| stage(name, &format!("{command}{retry}"), &mut unsteady);

    let mut programs = Background::start("kubernetes", &programs());
    table.push(("tests", stage("tests", &format!("test --threads {}", args.threads))));
    let mut image = Background::start("image", &[]); // beside machines that wait for each other
    let kernels = if left() > KERNELS + CLUSTER { stage("kernels", "vm") } else { too_late("kernels", left()) };
    table.push(("kernels", kernels));
    let is_built = programs.wait(left().saturating_sub(CLUSTER)) & image.wait(left().saturating_sub(CLUSTER));
    let cluster = if is_built && left() > CLUSTER {
        stage("cluster", &format!("e2e --nodes 3 --down --limit {}", left().as_secs() / 60))
    } else {
        too_late("cluster", left())
    };
    table.push(("cluster", cluster));
    drop((programs, image)); // also where the process ends below

    println!();
    unsteady.iter().for_each(|line| println!("{line}"));
    println!("{:<8} {}", "STAGE", Tally::heads());
    let mut total = Tally::default();
    for (name, tally) in &table {
        println!("{name:<8} {}", tally.row());
        total += *tally;
    }
    println!("\nin {} min", start.elapsed().as_secs().div_ceil(60));
    total.conclude();
}

/// In the order in which they are needed.
fn programs() -> Vec<&'static str> {
    let mut all: Vec<&str> = kubernetes::API.to_vec();
    all.push("helm");
    for name in cluster::PROGRAMS.iter().chain(&kubernetes::E2E) {
        if !all.contains(name) {
            all.push(name);
        }
    }
    all
}

fn too_late(name: &str, left: Duration) -> Tally {
    println!("SKIPPED {name}: only {} min are left; a second run finds everything built", left.as_secs() / 60);
    Tally::skipped(1)
}

/// Runs a command of this program; what it prints passes through.
fn stage(name: &str, command: &str, unsteady: &mut Vec<String>) -> Tally {
    println!("━━ {name}: cargo xtask {command}");
    let start = Instant::now();
    let tally = watch(command, unsteady).unwrap_or_else(|error| {
        println!("{name}: {error:#}");
        Tally { failed: 1, ..Tally::default() }
    });
    Tally { time: start.elapsed(), ..tally }
}

fn watch(command: &str, unsteady: &mut Vec<String>) -> Result<Tally> {
    let mut child = Command::new(root::this_program()).args(command.split(' ')).stdout(Stdio::piped()).spawn()?;
    let mut last = String::new();
    for line in BufReader::new(child.stdout.take().context("no stdout")?).split(b'\n') {
        last = String::from_utf8_lossy(&line?).into_owned();
        println!("{last}");
        if last.starts_with(UNSTEADY) {
            unsteady.push(last.clone());
        }
    }
    let status = child.wait()?;
    let tally = last_line(&last).with_context(|| format!("it ended without a result ({status})"))?;
    // Whatever it counted: badly ended is failed.
    let failed = if status.success() { tally.failed } else { tally.failed.max(1) };
    Ok(Tally { failed, ..tally })
}

/// From "N passed, N failed, N skipped".
fn last_line(line: &str) -> Option<Tally> {
    let mut parts = line.split(", ");
    let mut number = |word: &str| parts.next()?.strip_suffix(word)?.trim().parse().ok();
    let (passed, failed, skipped) = (number("passed")?, number("failed")?, number("skipped")?);
    Some(Tally { passed, failed, skipped, time: Duration::ZERO })
}

/// A command of this program that builds something while other things happen.
struct Background {
    name: &'static str,
    child: Option<Child>,
}

impl Background {
    fn start(name: &'static str, words: &[&str]) -> Self {
        let start = || -> Result<Child> {
            let mut command = Command::new("nice");
            command
                .arg("-n10")
                .arg(root::this_program())
                .arg(name)
                .args(words)
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            command.process_group(0); // so that it ends with what it has started
            Ok(command.spawn()?)
        };
        let child = start().inspect_err(|error| println!("{name}: cannot be built beside the tests: {error:#}")).ok();
        Self { name, child }
    }

    /// Whether it has ended after so long. One that failed has, too: the stage that needs it says why it cannot be run.
    fn wait(&mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        let Some(child) = &mut self.child else { return true };
        let mut told = false;
        loop {
            match child.try_wait() {
                Ok(None) if Instant::now() < end => {}
                Ok(None) => return false,
                Ok(Some(_)) | Err(_) => return true,
            }
            if !told {
                println!("━━ waiting for `cargo xtask {}`", self.name);
                told = true;
            }
            thread::sleep(Duration::from_secs(1));
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child
            && let Ok(None) = child.try_wait()
        {
            let _ = Command::new("kill").args(["--", &format!("-{}", child.id())]).stderr(Stdio::null()).status();
            let _ = child.wait();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Duration, Tally, last_line};

    #[test]
    fn the_last_line_is_read() {
        let expected = Tally { passed: 12, failed: 0, skipped: 3, time: Duration::ZERO };
        assert_eq!(last_line("12 passed, 0 failed, 3 skipped"), Some(expected));
        for line in ["", "12 passed, 0 failed", "error: no such command", "a passed, b failed, c skipped"] {
            assert_eq!(last_line(line), None, "{line}");
        }
    }
}
