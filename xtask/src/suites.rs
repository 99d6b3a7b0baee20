//! `cargo xtask test`: runs every suite, then says in one table and one last line how it went.

mod run;

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    ci, kubernetes, lint, root,
    setup::{self, Toolchain},
    tally::Tally,
};

/// What to test.
#[derive(clap::Args)]
pub struct Args {
    /// lint, unit, load, netns, api, helm …, or the name of one file in tests/tests [default: everything]
    suite: Option<String>,
    /// Run only tests whose names contain this
    filter: Option<String>,
    /// How many files of tests run at the same time
    #[arg(long, default_value_t = 2)] // so that the last test of one does not leave the machine idle
    pub jobs: usize,
    /// How many tests of one file run at the same time
    #[arg(long, default_value_t = 2)] // most of them wait most of the time
    pub threads: usize,
    /// Run a test that has failed once more, by itself: one that holds then has passed, and is named as unsteady
    #[arg(long)]
    pub retry: bool,
    /// Everything that CI runs: also the tests on other kernels, and Kubernetes' own tests on a cluster
    #[arg(long, conflicts_with_all = ["suite", "filter"])]
    all: bool,
    /// With --all: leave out stages that would not finish within this time
    #[arg(long, default_value_t = 70, value_name = "MINUTES")]
    budget: u64,
}

/// A program full of tests.
#[derive(Debug, PartialEq, Eq)]
pub struct Binary {
    /// Its level.
    pub suite: String,
    /// Name of its file, or of its crate.
    pub name: String,
    /// Where it is.
    pub path: PathBuf,
}

/// Runs what is asked for; the last line says how it went, the exit status too.
pub fn run(args: &Args) -> Result<()> {
    if args.all {
        ci::run(args, Duration::from_secs(args.budget * 60));
    } else {
        tally(args)?.conclude();
    }
    Ok(())
}

/// Runs what is asked for and prints the table.
pub fn tally(args: &Args) -> Result<Tally> {
    let toolchain = setup::toolchain()?;
    let wanted = |suite: &str, name: &str| args.suite.as_deref().is_none_or(|s| s == suite || s == name);
    let mut table = Vec::new();
    if args.filter.is_none() {
        for check in lint::CHECKS.iter().filter(|check| wanted("lint", check.name)) {
            table.push(("lint".into(), check.name.to_owned(), run_check(check, &toolchain)));
        }
    }
    if args.suite.as_deref() != Some("lint") {
        toolchain.build_workspace()?;
        let mut chosen = binaries(&toolchain, kinds(args.suite.as_deref()))?;
        chosen.retain(|binary| wanted(&binary.suite, &binary.name));
        for (binary, tally) in run::all(&chosen, args)? {
            table.push((binary.suite.clone(), binary.name.clone(), tally));
        }
    }
    let total = print(&table);
    if total == (Tally { time: total.time, ..Tally::default() }) {
        bail!("no test matches; `cargo xtask test` without a suite runs all of them");
    }
    Ok(total)
}

fn run_check(check: &lint::Check, toolchain: &Toolchain) -> Tally {
    println!("── lint: {}", check.name);
    let start = Instant::now();
    let result = (check.run)(toolchain);
    if let Err(error) = &result {
        println!("{error:#}");
    }
    Tally::of(&result, start)
}

/// What cargo has to build for a suite.
fn kinds(suite: Option<&str>) -> &'static [&'static str] {
    match suite {
        None => &[],
        Some("unit") => &["--lib", "--bins"],
        Some(_) => &["--test", "*"],
    }
}

/// Builds programs of tests and asks cargo where they are. `kinds` are cargo's words for which.
pub fn binaries(toolchain: &Toolchain, kinds: &[&str]) -> Result<Vec<Binary>> {
    println!("── building the tests");
    let mut cargo = toolchain.cargo(&["test", "--workspace", "--no-run"]);
    let mut child = cargo.args(kinds).stderr(Stdio::piped()).spawn()?;
    let mut found = Vec::new();
    for line in BufReader::new(child.stderr.take().context("cargo has no stderr")?).lines() {
        let line = line?;
        match executable(&line) {
            Some(binary) => found.push(binary),
            None => eprintln!("{line}"),
        }
    }
    if !child.wait()?.success() {
        bail!("the tests do not compile");
    }
    found.sort_by_key(|b| (rank(&b.suite), b.suite.clone(), b.name.clone()));
    Ok(found)
}

/// Reads cargo's "Executable unittests src/lib.rs (target/debug/deps/name-hash)".
fn executable(line: &str) -> Option<Binary> {
    let (source, path) = line.trim_start().strip_prefix("Executable ")?.strip_suffix(')')?.split_once(" (")?;
    let source = source.strip_prefix("unittests ").unwrap_or(source);
    let path = PathBuf::from(path);
    let krate = path.file_name()?.to_str()?.rsplit_once('-')?.0.to_owned();
    let (suite, name) = match source.strip_prefix("tests/") {
        None => ("unit".to_owned(), krate),
        Some(_) => (suite_of(&krate).to_owned(), krate),
    };
    Some(Binary { suite, name, path: root::workspace().join(path) })
}

/// The level a file of tests/tests belongs to; what is not named here talks over network namespaces.
fn suite_of(file: &str) -> &str {
    match file {
        "load" => "load",
        "scripts" | "manifests" => "script",
        "api_server" | "watch" => "api",
        "helm" => "helm",
        _ => "netns",
    }
}

/// What has to be built from Go modules for a level, and for the one file that needs more than its level.
fn programs_of(binary: &Binary) -> &'static [&'static str] {
    match (binary.suite.as_str(), binary.name.as_str()) {
        ("api", _) => &kubernetes::API,
        ("helm", _) => &["helm"],
        (_, "takeover") => &kubernetes::TAKEOVER,
        _ => &[],
    }
}

/// Cheap levels first: the first failure is then the simplest one.
fn rank(suite: &str) -> usize {
    ["unit", "script", "load", "netns", "api", "helm"].iter().position(|s| *s == suite).unwrap_or(usize::MAX)
}

/// The table; gives the sum.
fn print(table: &[(String, String, Tally)]) -> Tally {
    println!("\n{:<8} {:<24} {}", "SUITE", "NAME", Tally::heads());
    let mut total = Tally::default();
    for (suite, name, tally) in table {
        println!("{suite:<8} {name:<24} {}", tally.row());
        total += *tally;
    }
    println!();
    total
}

#[cfg(test)]
mod tests {
    use super::{executable, programs_of};

    #[test]
    fn cargo_names_the_programs_and_their_suites() {
        for (line, expected) in [
            ("  Executable unittests src/lib.rs (target/debug/deps/sheave_agent-0a1b)", Some(("unit", "sheave_agent"))),
            ("  Executable tests/load.rs (target/debug/deps/load-0a1b)", Some(("load", "load"))),
            ("  Executable tests/node_port.rs (target/debug/deps/node_port-0a1b)", Some(("netns", "node_port"))),
            ("   Compiling sheave-tests v0.1.0 (/somewhere/tests)", None),
        ] {
            let found = executable(line);
            assert_eq!(found.as_ref().map(|b| (b.suite.as_str(), b.name.as_str())), expected, "{line}");
        }
    }

    #[test]
    fn programs_are_built_for_those_who_run_them() {
        for (line, needs) in [
            ("Executable tests/takeover.rs (target/debug/deps/takeover-0a1b)", Some("kube-proxy")),
            ("Executable tests/watch.rs (target/debug/deps/watch-0a1b)", Some("kube-apiserver")),
            ("Executable tests/helm.rs (target/debug/deps/helm-0a1b)", Some("helm")),
            ("Executable tests/sockets.rs (target/debug/deps/sockets-0a1b)", None),
        ] {
            let programs = programs_of(&executable(line).unwrap());
            assert!(needs.map_or(programs.is_empty(), |name| programs.contains(&name)), "{line}: {programs:?}");
        }
    }
}
