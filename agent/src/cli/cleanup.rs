//! `sheave cleanup`.

use std::{fs, path::Path};

use anyhow::{Context as _, bail};
use clap::Args;
use tokio::signal::unix::{SignalKind, signal};

use super::{block_on, host::HostArgs};
use crate::{
    datapath,
    exit::{self, Refused, Unwell},
    lifecycle::{
        lock,
        takeover::{Leftovers, MAY_HIDE, running},
    },
    options::HostPaths,
};

const EXAMPLES: &str = "\
Services stop working on this node until another proxy serves them; open connections continue. It is safe to run again \
at any time, even after it was interrupted.

Examples:
  sheave cleanup --dry-run
  sheave cleanup
  sheave cleanup --kube-proxy --dry-run   # what kube-proxy left behind; open connections outlive its rules";

/// Flags of `sheave cleanup`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CleanupArgs {
    /// Only print what would be removed
    #[arg(long)]
    dry_run: bool,
    /// Keep running afterwards, until told to stop: a DaemonSet that cleans every node is ready when all of them are
    /// clean
    #[arg(long, conflicts_with = "dry_run")]
    stay: bool,
    /// Remove what a stopped kube-proxy left on this node, and nothing of sheave's
    #[arg(long, conflicts_with = "stay")]
    kube_proxy: bool,
    #[command(flatten)]
    host: HostArgs,
}

impl CleanupArgs {
    /// Detaches, unpins, removes.
    pub fn run(self) -> anyhow::Result<()> {
        let paths = self.host.paths();
        if self.kube_proxy {
            return self.remove_kube_proxy(&paths);
        }
        let holder = lock::holder(&paths);
        if let Some(pid) = holder.filter(|_| !self.dry_run) {
            let pid = if pid == 0 { String::new() } else { format!(" (pid {pid})") };
            bail!(Refused(format!(
                "an agent{pid} is running with {} or {}; stop it first, or it would put everything back",
                paths.run_dir.display(),
                paths.bpffs.display()
            )));
        }
        let mut removed = datapath::cleanup(&paths, self.dry_run)?;
        if holder.is_none() {
            removed.extend(remove_traces(&paths, self.dry_run)?);
        }

        self.tell(&removed)?;
        if self.stay { block_on(told_to_stop()) } else { Ok(()) }
    }

    fn remove_kube_proxy(&self, paths: &HostPaths) -> anyhow::Result<()> {
        if !self.dry_run
            && let Some(running) = running::find()
        {
            bail!(Refused(format!("kube-proxy {running}; {}", running.advice())));
        }
        let leftovers = Leftovers::find(paths)?;
        if !self.dry_run {
            leftovers.remove()?;
        }
        let (lines, mut remarks) = (leftovers.lines(), leftovers.remarks());
        if !lines.is_empty() || leftovers.is_complete() {
            self.tell(&lines)?;
        }
        if !self.dry_run && !lines.is_empty() && running::may_hide() {
            remarks.push(format!("kube-proxy: {MAY_HIDE}; if it does, it puts everything back"));
        }
        exit::print(remarks.iter().map(|remark| format!("{remark}\n")).collect::<String>())?;
        if !leftovers.is_complete() {
            bail!(Unwell);
        }
        Ok(())
    }

    fn tell(&self, removed: &[String]) -> anyhow::Result<()> {
        let verb = if self.dry_run { "would remove" } else { "removed" };
        if removed.is_empty() {
            exit::print("nothing to clean up\n")?;
        } else {
            exit::print(removed.iter().map(|thing| format!("{verb} {thing}\n")).collect::<String>())?;
        }
        Ok(())
    }
}

/// The first process of a container hears no signal that it does not wait for.
async fn told_to_stop() -> anyhow::Result<()> {
    let (mut term, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    exit::print("staying until told to stop\n")?;
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// The agent's files in its run directory, and the directory when nothing else is in it.
fn remove_traces(paths: &HostPaths, dry_run: bool) -> anyhow::Result<Vec<String>> {
    let mut removed = Vec::new();
    for path in [paths.socket(), paths.lock()] {
        if path.exists() {
            if !dry_run {
                fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
            }
            removed.push(path.display().to_string());
        }
    }
    let gone = if dry_run { holds_only(&paths.run_dir, removed.len()) } else { fs::remove_dir(&paths.run_dir).is_ok() };
    if gone {
        removed.push(paths.run_dir.display().to_string());
    }
    Ok(removed)
}

fn holds_only(directory: &Path, files: usize) -> bool {
    fs::read_dir(directory).is_ok_and(|entries| entries.count() == files)
}

#[cfg(test)]
mod tests;
