//! `cargo xtask bench`: builds as it is shipped, then hands over to the bench program of the tests crate.

use std::{ffi::OsString, os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::{root, setup};

/// Passed on as they are, `--help` too.
#[derive(clap::Args)]
pub struct Args {
    /// See `sheave_tests`, `src/bin/bench.rs`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

/// Becomes the bench.
pub fn run(args: &Args) -> Result<()> {
    let build = ["build", "--release", "--bins", "-p", "sheave-agent", "-p", "sheave-tests"];
    root::run(&mut setup::toolchain()?.cargo(&build))?;
    let program = root::target().join("release/sheave-bench");
    let mut command = if root::is_root() { Command::new(&program) } else { Command::new("sudo") };
    if !root::is_root() {
        println!("bench: network namespaces need root; asking sudo");
        command.arg(&program);
    }
    Err(command.args(&args.args).exec()).with_context(|| format!("cannot start {}", program.display()))
}
