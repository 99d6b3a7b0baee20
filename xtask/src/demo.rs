//! `cargo xtask demo`: builds, then hands over to the demo program of the tests crate, which has the network.

use std::{os::unix::process::CommandExt, process::Command};

use anyhow::{Context, Result};

use crate::{root, setup};

/// Passed on as they are.
#[derive(clap::Args)]
pub struct Args {
    /// Leave it running, and print how to explore it
    #[arg(long)]
    keep: bool,
    /// Stop what --keep left running
    #[arg(long, conflicts_with = "keep")]
    down: bool,
}

/// Becomes the demo.
pub fn run(args: &Args) -> Result<()> {
    let program = root::target().join("debug/sheave-demo");
    if !args.down || !program.exists() {
        setup::toolchain()?.build_workspace()?;
    }
    let mut command = if root::is_root() { Command::new(&program) } else { Command::new("sudo") };
    if !root::is_root() {
        println!("demo: network namespaces need root; asking sudo");
        command.arg(&program);
    }
    command.current_dir(root::workspace());
    command.args(args.keep.then_some("--keep")).args(args.down.then_some("--down"));
    Err(command.exec()).with_context(|| format!("cannot start {}", program.display()))
}
