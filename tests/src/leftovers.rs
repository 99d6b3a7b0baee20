//! Removing what a lab made: by its name, so that it works for the lab of a process that was killed, too.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use nix::{
    mount::{MntFlags, umount2},
    sys::signal::{self, Signal},
    unistd::Pid,
};

use crate::{
    place,
    wait::{SOON, eventually},
};

/// Where labs keep manifests, logs, API sockets and pins.
#[must_use]
pub fn folder(lab: &str) -> PathBuf {
    std::env::temp_dir().join(lab)
}

/// Mount point of the cgroup v2 tree; on hybrid hosts it is not `/sys/fs/cgroup`.
#[must_use]
pub fn cgroup_root() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").ok()?;
    mounts.lines().find_map(|line| {
        let mut fields = line.split(' ').skip(1);
        let (path, kind) = (fields.next()?, fields.next()?);
        (kind == "cgroup2").then(|| path.into())
    })
}

/// Ends every process of a lab, removes its cgroups, pins, namespaces and files. What is not there is not missed.
pub fn remove(lab: &str) {
    if let Some(root) = cgroup_root() {
        remove_cgroup(&root.join(lab));
    }
    let folder = folder(lab);
    for mount in mounts_under(&folder) {
        let _ = umount2(&mount, MntFlags::MNT_DETACH);
    }
    let _ = fs::remove_dir_all(&folder);
    for netns in names("/run/netns").filter(|name| name.strip_prefix(lab).is_some_and(|rest| rest.starts_with('-'))) {
        let _ = place::ip(&["netns", "del", &netns]);
    }
}

/// Removes the labs of test processes that are no more.
pub fn sweep() {
    let cgroups = cgroup_root().into_iter().flat_map(|root| names(&root).collect::<Vec<_>>());
    let folders = names(std::env::temp_dir());
    let mut labs: Vec<String> =
        names("/run/netns").chain(cgroups).chain(folders).filter_map(|name| dead_owner(&name)).collect();
    labs.sort();
    labs.dedup();
    for lab in labs {
        remove(&lab);
    }
}

/// The lab in "sheave-PID-NUMBER[-…]", when no process PID runs any more.
fn dead_owner(name: &str) -> Option<String> {
    let mut parts = name.strip_prefix("sheave-")?.split('-');
    let pid: u32 = parts.next()?.parse().ok()?;
    let number: u32 = parts.next()?.parse().ok()?;
    (!Path::new(&format!("/proc/{pid}")).exists()).then(|| format!("sheave-{pid}-{number}"))
}

/// Kills what runs in a cgroup and below it, then removes it from the leaves up.
pub(crate) fn remove_cgroup(path: &Path) {
    if !path.exists() {
        return;
    }
    let is_killed = fs::write(path.join("cgroup.kill"), "1").is_ok(); // Linux ≥ 5.14
    let gone = eventually("cgroup is removed", SOON, || Ok(remove_folders(path, !is_killed)?));
    if let Err(error) = gone {
        eprintln!("left behind: {}: {error:#}", path.display());
    }
}

fn remove_folders(path: &Path, kill: bool) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_folders(&entry.path(), kill)?;
        }
    }
    if kill {
        for pid in fs::read_to_string(path.join("cgroup.procs"))?.lines().filter_map(|line| line.parse().ok()) {
            let _ = signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    fs::remove_dir(path)
}

fn names(folder: impl AsRef<Path>) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

fn mounts_under(folder: &Path) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let paths = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(PathBuf::from);
    paths.filter(|path| path.starts_with(folder)).collect()
}

#[cfg(test)]
mod tests {
    use super::dead_owner;

    #[test]
    fn only_labs_of_dead_processes_are_swept() {
        let own = std::process::id();
        for (name, expected) in [
            ("sheave-4000000-0-n1", Some("sheave-4000000-0")), // above the largest pid there is
            ("sheave-4000000-12", Some("sheave-4000000-12")),
            (&format!("sheave-{own}-0-n1"), None),
            ("sheave-demo-n1", None),
            ("sheave", None),
            ("other-4000000-0", None),
        ] {
            assert_eq!(dead_owner(name).as_deref(), expected, "{name}");
        }
    }
}
