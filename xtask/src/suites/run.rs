//! Running programs of tests: some side by side, and what has failed once more, alone.

use std::{
    ffi::OsStr,
    io::{BufRead as _, BufReader},
    iter,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result, anyhow};

use super::{Args, Binary, programs_of};
use crate::{
    kubernetes, root,
    tally::{SKIPPED, Tally, UNSTEADY},
};

/// How one program went.
struct Outcome<'a> {
    binary: &'a Binary,
    /// Its place among all.
    place: usize,
    tally: Tally,
    failed: Vec<String>,
}

/// Runs them, `args.jobs` at a time, and what fails again if so asked; gives what came of each, in their order.
pub fn all<'a>(binaries: &'a [Binary], args: &Args) -> Result<Vec<(&'a Binary, Tally)>> {
    let jobs = args.jobs.clamp(1, binaries.len().max(1));
    let queue = Mutex::new(binaries.iter().enumerate());
    let next = || queue.lock().ok()?.next();
    let work = || iter::from_fn(next).map(|(place, binary)| first(binary, place, args, jobs > 1)).collect();
    let ended: Vec<Result<Vec<Outcome<'_>>>> = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs).map(|_| scope.spawn(work)).collect();
        let ended = workers.into_iter().map(thread::ScopedJoinHandle::join);
        ended.map(|end| end.unwrap_or_else(|_| Err(anyhow!("a thread that runs tests has died")))).collect()
    });
    let mut outcomes: Vec<Outcome<'_>> = ended.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
    outcomes.sort_by_key(|outcome| outcome.place);
    if args.retry {
        outcomes.iter_mut().try_for_each(Outcome::again)?;
    }
    Ok(outcomes.into_iter().map(|outcome| (outcome.binary, outcome.tally)).collect())
}

fn first<'a>(binary: &'a Binary, place: usize, args: &Args, has_company: bool) -> Result<Outcome<'a>> {
    if let Err(error) = kubernetes::programs(programs_of(binary)) {
        println!("SKIP: {error:#}; tests that need it are skipped");
    }
    println!("── {}: {}", binary.suite, binary.name);
    let start = Instant::now();
    let show = if has_company { Show::Named(&binary.name) } else { Show::Plain };
    let (lines, tally) = once(binary, args.filter.as_slice(), args.threads, &show)?;
    let failed = lines.iter().filter_map(|line| failed(line)).map(str::to_owned).collect();
    Ok(Outcome { binary, place, tally: Tally { time: start.elapsed(), ..tally }, failed })
}

impl Outcome<'_> {
    /// Runs each test that failed by itself; it has passed when it holds now, and is named.
    fn again(&mut self) -> Result<()> {
        let start = Instant::now();
        let Self { binary, tally, failed, .. } = self;
        for name in failed {
            println!("── {}: {name} once more, by itself", binary.name);
            let (_, again) = once(binary, &[name, "--exact"], 1, &Show::Plain)?;
            if again.passed == 1 {
                println!("{UNSTEADY}{} {name}: failed, and held when run by itself", binary.name);
                tally.failed -= 1;
                tally.passed += 1;
            }
        }
        tally.time += start.elapsed();
        Ok(())
    }
}

/// How the lines of a program are shown.
enum Show<'a> {
    /// As they are.
    Plain,
    /// With the program's name in front, as others speak at the same time.
    Named(&'a str),
}

impl Show<'_> {
    fn line(&self, line: &str) {
        match self {
            Self::Named(name) if !line.starts_with(SKIPPED) => println!("{name:<16}│ {line}"),
            Self::Named(_) | Self::Plain => println!("{line}"),
        }
    }
}

/// The test that a line of libtest says has failed.
fn failed(line: &str) -> Option<&str> {
    line.strip_prefix("test ")?.strip_suffix(" ... FAILED")
}

/// Runs one program of tests; its output passes through and is given.
fn once<W: AsRef<OsStr>>(binary: &Binary, words: &[W], threads: usize, show: &Show) -> Result<(Vec<String>, Tally)> {
    let mut command = Command::new(&binary.path);
    command.args(words).args(["--test-threads", &threads.to_string()]);
    command.current_dir(folder(binary)).env("SHEAVE_BIN_DIR", root::target().join("debug"));
    command.env("RUST_LIB_BACKTRACE", "0"); // errors tell their story themselves
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| binary.path.display().to_string())?;
    let mut lines = Vec::new();
    for line in BufReader::new(child.stdout.take().context("a test has no stdout")?).split(b'\n') {
        let line = String::from_utf8_lossy(&line?).into_owned();
        show.line(&line);
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

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::{ExitStatus, Tally, count, failed};

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
