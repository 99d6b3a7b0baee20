//! `cargo xtask test --all`: what CI runs, stage by stage, within a time.
//!
//! Every stage is a command of its own that ends with "N passed, N failed, N skipped", as a person would run it. What
//! the cluster needs is built beside the tests, with what those leave of the processors, and the cluster, which mostly
//! waits, is tested as soon as all of it is there. Machines compute: they boot when the tests are done. A stage that
//! would not be done in time is left out, and counts as skipped.

use std::{
    io::{BufRead as _, BufReader},
    os::unix::process::CommandExt as _,
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    cluster, kubernetes, root, setup,
    suites::Args,
    tally::{SKIPPED, Tally, UNSTEADY},
};

/// What a stage takes on two cores when everything it needs is there, generously.
const KERNELS: Duration = Duration::from_secs(8 * 60);
const CLUSTER: Duration = Duration::from_secs(14 * 60);

/// Runs all stages and prints the table.
pub fn run(args: &Args, budget: Duration) {
    let start = Instant::now();
    let left = || budget.saturating_sub(start.elapsed());
    let retry = if args.retry { " --retry" } else { "" };

    let programs = Background::start("kubernetes", &programs());
    // Before two commands would install it at the same time; what fails here, they say again.
    let _ = setup::toolchain();
    let image = Background::start("image", &[]);
    let Args { jobs, threads, .. } = args;
    let stages = thread::scope(|scope| {
        let cluster = scope.spawn(|| {
            let is_built = [&programs, &image].map(|build| build.wait(left().saturating_sub(CLUSTER))) == [true; 2];
            match left() {
                left if is_built && left > CLUSTER => {
                    let limit = left.as_secs() / 60;
                    Stage::run("cluster", &format!("e2e --nodes 3 --down --limit {limit}{retry}"))
                }
                left => Stage::too_late("cluster", left),
            }
        });
        let tests = Stage::run("tests", &format!("test --jobs {jobs} --threads {threads}{retry}"));
        programs.hurry();
        image.hurry();
        let kernels = match left() {
            left if left > KERNELS => Stage::run("kernels", &format!("vm{retry}")),
            left => Stage::too_late("kernels", left),
        };
        [tests, kernels, cluster.join().unwrap_or_else(|_| Stage::failed("cluster"))]
    });
    drop((programs, image)); // also where the process ends below

    println!();
    stages.iter().flat_map(|stage| &stage.remarks).for_each(|line| println!("{line}"));
    println!("{:<8} {}", "STAGE", Tally::heads());
    let mut total = Tally::default();
    for stage in &stages {
        println!("{:<8} {}", stage.name, stage.tally.row());
        total += stage.tally;
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

/// How a command of this program went.
struct Stage {
    name: &'static str,
    tally: Tally,
    /// What it said of tests that failed at first or were left out: nobody reads all the rest.
    remarks: Vec<String>,
}

impl Stage {
    /// Runs it; what it prints passes through, with the stage's name in front.
    fn run(name: &'static str, command: &str) -> Self {
        println!("━━ {name}: cargo xtask {command}");
        let start = Instant::now();
        let mut stage = Self { tally: Tally::default(), remarks: Vec::new(), name };
        stage.tally = stage.watch(command).unwrap_or_else(|error| {
            println!("{name}: {error:#}");
            Self::failed(name).tally
        });
        stage.tally.time = start.elapsed();
        println!("━━ {name}: done");
        stage
    }

    fn failed(name: &'static str) -> Self {
        Self { name, tally: Tally { failed: 1, ..Tally::default() }, remarks: Vec::new() }
    }

    fn too_late(name: &'static str, left: Duration) -> Self {
        let why = format!("only {} min are left; a second run finds everything built", left.as_secs() / 60);
        Self { name, tally: Tally::skipped(1), remarks: vec![format!("{SKIPPED}{name}: {why}")] }
    }

    fn watch(&mut self, command: &str) -> Result<Tally> {
        let mut child = Command::new(root::this_program()).args(command.split(' ')).stdout(Stdio::piped()).spawn()?;
        let mut last = String::new();
        for line in BufReader::new(child.stdout.take().context("no stdout")?).split(b'\n') {
            last = String::from_utf8_lossy(&line?).into_owned();
            println!("{:<8}│ {last}", self.name);
            if last.starts_with(UNSTEADY) || last.starts_with(SKIPPED) {
                self.remarks.push(last.clone());
            }
        }
        let status = child.wait()?;
        let tally = last_line(&last).with_context(|| format!("it ended without a result ({status})"))?;
        // Whatever it counted: badly ended is failed.
        let failed = if status.success() { tally.failed } else { tally.failed.max(1) };
        Ok(Tally { failed, ..tally })
    }
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
    child: Option<Mutex<Child>>,
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
        Self { name, child: child.map(Mutex::new) }
    }

    /// Its process group, while it goes on. One that has failed has ended, too: the stage that needs it says why it
    /// cannot be run.
    fn group(&self) -> Option<String> {
        let mut child = self.child.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(child.try_wait(), Ok(None)).then(|| child.id().to_string())
    }

    /// Whether it has ended after so long.
    fn wait(&self, time: Duration) -> bool {
        let end = Instant::now() + time;
        while self.group().is_some() {
            if Instant::now() >= end {
                return false;
            }
            thread::sleep(Duration::from_secs(1));
        }
        true
    }

    /// From now on somebody waits for it.
    fn hurry(&self) {
        if let Some(group) = self.group() {
            println!("━━ waiting for `cargo xtask {}`", self.name);
            let _ = Command::new("renice").args(["-n", "0", "-g", &group]).stdout(Stdio::null()).status();
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(group) = self.group() {
            let _ = Command::new("kill").args(["--", &format!("-{group}")]).stderr(Stdio::null()).status();
            self.wait(Duration::from_secs(10));
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
