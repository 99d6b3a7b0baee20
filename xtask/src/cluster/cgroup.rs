//! The cluster's cgroups: one for each node and one for the control plane, in every hierarchy of this host, because a
//! container runtime on a host with both versions uses both.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use super::process::eventually;

/// All cgroups of the cluster are called that, and no others.
const PREFIX: &str = "lab-";
/// Where a node's own programs are: with version 2, a cgroup that hands controllers on may hold no process itself.
const OWN: &str = "host";

/// As many as eight processes have.
const SHARES: &str = "8192";

/// Where cgroup v2 is mounted.
pub fn unified() -> Result<PathBuf> {
    let found = mounts("cgroup2").into_iter().next();
    found.context("cgroup v2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
}

fn mounts(kind: &str) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let words = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
    mounts
        .lines()
        .map(words)
        .filter(|words| words.get(2).is_some_and(|k| k == kind))
        .map(|w| w[1].clone().into())
        .collect()
}

/// Every hierarchy, the one of version 2 last.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let mut all = mounts("cgroup");
    all.push(unified()?);
    Ok(all)
}

/// Makes the cgroups of `lab-NAME`; the files that a process writes itself into to be there.
pub fn make(name: &str) -> Result<Vec<PathBuf>> {
    let mut own = Vec::new();
    for hierarchy in hierarchies()? {
        let folder = hierarchy.join(format!("{PREFIX}{name}"));
        fs::create_dir_all(folder.join(OWN)).with_context(|| format!("cannot make the cgroup {}", folder.display()))?;
        for file in ["cpuset.cpus", "cpuset.mems"] {
            // Version 1 starts with none, and then no process may enter.
            for folder in [&folder, &folder.join(OWN)] {
                if let (Ok(all), true) = (fs::read(hierarchy.join(file)), hierarchy != unified()?) {
                    fs::write(folder.join(file), all).with_context(|| format!("{}", folder.join(file).display()))?;
                }
            }
        }
        // A group of version 1 weighs as much as one process, whatever is in it: a node would starve on a busy host.
        let shares = folder.join("cpu.shares");
        if shares.exists() {
            fs::write(&shares, SHARES).with_context(|| shares.display().to_string())?;
        }
        own.push(folder.join(OWN).join("cgroup.procs"));
    }
    Ok(own)
}

/// Ends every process of the cluster and removes its cgroups.
pub fn clear() -> Result<()> {
    let unified = unified()?;
    for cgroup in labs(&unified)? {
        let _ = fs::write(cgroup.join("cgroup.kill"), "1"); // since Linux 5.14
        eventually(&format!("all processes in {} have ended", cgroup.display()), 30, || {
            let left = processes(&cgroup)?;
            for process in &left {
                let _ = Command::new("kill").args(["-9", process]).stderr(Stdio::null()).status(); // may have ended
            }
            ensure!(left.is_empty(), "{} are left", left.len());
            Ok(())
        })?;
    }
    for hierarchy in hierarchies()? {
        for cgroup in labs(&hierarchy)? {
            remove(&cgroup)?;
        }
    }
    Ok(())
}

fn labs(hierarchy: &Path) -> Result<Vec<PathBuf>> {
    let children = fs::read_dir(hierarchy).with_context(|| hierarchy.display().to_string())?;
    let names = children.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    Ok(names.map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}

/// Of a cgroup and all below it.
fn processes(cgroup: &Path) -> Result<Vec<String>> {
    let mut found: Vec<String> =
        fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default().lines().map(str::to_owned).collect();
    for child in children(cgroup) {
        found.extend(processes(&child)?);
    }
    Ok(found)
}

fn children(cgroup: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cgroup).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// From the leaves up; the kernel lets go of a cgroup a moment after its last process.
fn remove(cgroup: &Path) -> Result<()> {
    for child in children(cgroup) {
        remove(&child)?;
    }
    let mut tries = 0;
    while let Err(error) = fs::remove_dir(cgroup) {
        tries += 1;
        ensure!(tries < 100 && cgroup.exists(), "cannot remove the cgroup {}: {error}", cgroup.display());
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
