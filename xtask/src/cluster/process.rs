//! Processes that outlive this program, and waiting for what they bring about.

use std::{
    fs::File,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

/// Starts a program that enters cgroups first; its output goes to `log`. The program is given by its command line, not
/// by a `Command`, because something else has to run before it.
pub fn start(cgroups: &[PathBuf], words: &[String], log: &Path) -> Result<()> {
    let output = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    // The shell becomes the program: no moment in which a child of it could be elsewhere.
    let enter: String = cgroups.iter().map(|file| format!("echo $$ > '{}' && ", file.display())).collect();
    let mut shell = Command::new("setsid");
    shell.args(["sh", "-c", &format!("{enter}exec \"$@\""), "sh"]).args(words).process_group(0);
    shell.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    shell.spawn().with_context(|| format!("cannot start {}", words.join(" "))).map(drop)
}

/// Waits until an attempt succeeds, at most so many seconds; else its last error.
pub fn eventually<T>(what: &str, seconds: u64, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > end => {
                return Err(error.context(format!("waited {seconds} s in vain until {what}")));
            }
            Err(_) => thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// Runs to the end; what it printed, or an error with what it complained of.
pub fn said(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {command:?}"))?;
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
    let complaint = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "`{}` failed: {}", words.join(" "), complaint.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
