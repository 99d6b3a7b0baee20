//! `sheave-enter NETNS PROCS DIES PROGRAM ARGS…`: becomes a program in a network namespace and a cgroup.
//!
//! A program of its own, since between fork and exec a child holds whatever its parent has open, listening sockets of
//! other tests among it, and to change the cgroup may take that child a second on a busy host.

use std::{
    env,
    ffi::OsString,
    fs::{self, File},
    os::unix::process::CommandExt as _,
    process::{Command, ExitCode},
};

use anyhow::{Context as _, Result, bail};
use nix::{
    sched::{CloneFlags, setns},
    sys::{prctl, signal::Signal},
};
use sheave_tests::place::DIES_WITH_ITS_PARENT;

fn main() -> ExitCode {
    let Err(error) = enter(env::args_os().skip(1));
    eprintln!("{error:#}");
    ExitCode::from(127) // what a shell says where there is no such program
}

fn enter(mut args: impl Iterator<Item = OsString>) -> Result<std::convert::Infallible> {
    let mut next = |what| args.next().with_context(|| format!("{what} is missing"));
    let (netns, procs, dies, program) = (next("NETNS")?, next("PROCS")?, next("DIES")?, next("PROGRAM")?);
    if dies == DIES_WITH_ITS_PARENT {
        prctl::set_pdeathsig(Signal::SIGKILL)?;
    }
    let netns = File::open(&netns).with_context(|| format!("no network namespace {}", netns.display()))?;
    setns(netns, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")?;
    fs::write(&procs, "0").with_context(|| format!("cannot enter a cgroup: {}", procs.display()))?; // 0 = the writer
    let error = Command::new(&program).args(args).exec();
    bail!("cannot start {}: {error}", program.display())
}
