//! Where things are, and how commands are run from there.

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

/// The workspace.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask is a folder of the workspace")
}

/// Where cargo puts what it builds.
pub fn target() -> PathBuf {
    env::var_os("CARGO_TARGET_DIR").map_or_else(|| workspace().join("target"), PathBuf::from)
}

/// What was built or downloaded once and is kept over clones: `$SHEAVE_CACHE`, else `~/.cache/sheave`.
pub fn cache() -> Result<PathBuf> {
    if let Some(path) = env::var_os("SHEAVE_CACHE") {
        return Ok(path.into());
    }
    let home = env::var_os("HOME").context("neither SHEAVE_CACHE nor HOME is set: say where to keep what is built")?;
    Ok(PathBuf::from(home).join(".cache/sheave"))
}

/// A command that runs in the workspace.
pub fn command(program: &str, args: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(workspace());
    command
}

/// Runs to the end; its output goes to the terminal.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed: {status}");
    }
    Ok(())
}

/// What it prints, or `None` when it cannot be started or fails.
pub fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = command(program, args).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Whether the effective user is root.
pub fn is_root() -> bool {
    output("id", &["-u"]).as_deref() == Some("0")
}

/// The command line, for messages.
fn shown(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// This program, to be started again. Its file may be another one by now: building the workspace builds it anew. The
/// kernel keeps what runs.
pub fn this_program() -> PathBuf {
    PathBuf::from(format!("/proc/{}/exe", std::process::id()))
}
