//! `cargo xtask test`: runs every suite, then says in one table and one last line how it went.

use std::{
    ffi::OsStr,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    ci, kubernetes, lint, root,
    setup::{self, Toolchain},
    tally::{SKIPPED, Tally, UNSTEADY},
};

/// What to test.
#[derive(clap::Args)]
pub struct Args {
    /// lint, unit, load, netns, api, helm …, or the name of one file in tests/tests [default: everything]
    suite: Option<String>,
    /// Run only tests whose names contain this
    filter: Option<String>,
    /// How many tests of one file run at the same time
    #[arg(long, default_value_t = 3)] // most of them wait most of the time
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
        for binary in
            binaries(&toolchain, kinds(args.suite.as_deref()))?.into_iter().filter(|b| wanted(&b.suite, &b.name))
        {
            if let Err(error) = kubernetes::programs(programs_of(&binary)) {
                println!("SKIP: {error:#}; tests that need it are skipped");
            }
            let tally = run_tests(&binary, args)?;
            table.push((binary.suite, binary.name, tally));
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

/// Runs one program of tests, and what fails by itself again if so asked.
fn run_tests(binary: &Binary, args: &Args) -> Result<Tally> {
    println!("── {}: {}", binary.suite, binary.name);
    let start = Instant::now();
    let (lines, mut tally) = once(binary, args.filter.as_slice(), args.threads)?;
    for name in lines.iter().filter_map(|line| failed(line)).filter(|_| args.retry) {
        println!("── {}: {name} once more, by itself", binary.name);
        let (_, again) = once(binary, &[name, "--exact"], 1)?;
        if again.passed == 1 {
            println!("{UNSTEADY}{} {name}: failed, and held when run by itself", binary.name);
            tally.failed -= 1;
            tally.passed += 1;
        }
    }
    Ok(Tally { time: start.elapsed(), ..tally })
}

/// The test that a line of libtest says has failed.
fn failed(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

/// Runs one program of tests; its output passes through and is given.
fn once<W: AsRef<OsStr>>(binary: &Binary, words: &[W], threads: usize) -> Result<(Vec<String>, Tally)> {
    let mut command = Command::new(&binary.path);
    command.args(words).args(["--test-threads", &threads.to_string()]);
    command.current_dir(folder(binary)).env("SHEAVE_BIN_DIR", root::target().join("debug"));
    command.env("RUST_LIB_BACKTRACE", "0"); // errors tell their story themselves
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| binary.path.display().to_string())?;
    let mut lines = Vec::new();
    for line in BufReader::new(child.stdout.take().context("a test has no stdout")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        println!("{line}");
        lines.push(line);
    }
    let tally = count(&lines, child.wait()?);
    Ok((lines, tally))
}

/// Where cargo would run it: in the folder of its crate.
fn folder(binary: &Binary) -> PathBuf {
    let folder = match binary.name.as_str() {
        "sheave_agent" | "sheave" => "agent",
        "sheave_ebpf" => "ebpf",
        "xtask" => "xtask",
        _ => "tests",
    };
    root::workspace().join(Path::new(folder))
}

/// Counts from what the program said. One that ends without a result line, or badly after a good one, has failed.
fn count(lines: &[String], status: ExitStatus) -> Tally {
    let number = |line: &str, word: &str| -> Option<usize> {
        line.split([';', '.']).find_map(|part| part.trim().strip_suffix(word)?.trim().parse().ok())
    };
    let mut tally = Tally::default();
    for line in lines {
        if let Some(result) = line.strip_prefix("test result: ") {
            tally.passed += number(result, "passed").unwrap_or(0);
            tally.failed += number(result, "failed").unwrap_or(0);
            tally.skipped += number(result, "ignored").unwrap_or(0);
        }
    }
    let skipped = lines.iter().filter(|line| line.starts_with(SKIPPED)).count().min(tally.passed);
    tally.passed -= skipped; // libtest knows no skipping at run time: such a test "passed"
    tally.skipped += skipped;
    if !status.success() && tally.failed == 0 {
        tally.failed = 1;
    }
    tally
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
    use std::os::unix::process::ExitStatusExt;

    use super::{ExitStatus, Tally, count, executable, failed, programs_of};

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

    #[test]
    fn failed_tests_are_known_by_name() {
        for (line, expected) in [
            ("test a::b ... FAILED", Some("a::b")),
            ("test a::b ... ok", None),
            ("test result: FAILED. 4 passed; 1 failed", None),
        ] {
            assert_eq!(failed(line), expected, "{line}");
        }
    }

    #[test]
    fn skipped_and_crashed_tests_are_not_passed_ones() {
        let result = "test result: ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s";
        let failed = "test result: FAILED. 4 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out";
        let cases: [(&str, &[&str], i32, [usize; 3]); 4] = [
            ("all well", &["test a ... ok", result], 0, [5, 0, 1]),
            ("two skipped", &["SKIPPED a: no root", "SKIPPED b: no root", result], 0, [3, 0, 3]),
            ("one failed", &[failed], 101 << 8, [4, 1, 0]),
            ("killed before its result", &["test a ... ok"], 9, [0, 1, 0]),
        ];
        for (name, lines, status, [passed, failed, skipped]) in cases {
            let lines: Vec<_> = lines.iter().map(ToString::to_string).collect();
            let expected = Tally { passed, failed, skipped, ..Tally::default() };
            assert_eq!(count(&lines, ExitStatus::from_raw(status)), expected, "{name}");
        }
    }
}
