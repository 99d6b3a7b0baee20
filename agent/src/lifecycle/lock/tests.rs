//! Who may start where.

use std::{env, fs, path::PathBuf, process};

use super::{Locks, holder};
use crate::options::HostPaths;

/// Directories of their own, gone with the value.
struct Host(PathBuf);

impl Host {
    fn new(name: &str) -> Self {
        let root = env::temp_dir().join(format!("sheave-lock-{}-{name}", process::id()));
        fs::create_dir_all(root.join("cgroup-1")).unwrap();
        fs::create_dir_all(root.join("cgroup-2")).unwrap();
        Self(root)
    }

    fn take(&self, run_dir: &str, bpffs: &str, cgroup: &str) -> Result<Locks, String> {
        let paths = HostPaths { bpffs: self.0.join(bpffs), run_dir: self.0.join(run_dir) };
        Locks::take(&paths, &self.0.join(cgroup)).map_err(|e| e.0)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_agent_shares_neither_run_directory_nor_pins_nor_cgroup() {
    let host = Host::new("share");
    let _first = host.take("run-1", "bpf-1", "cgroup-1").unwrap();
    for (case, [run_dir, bpffs, cgroup], held) in [
        ("same run directory", ["run-1", "bpf-2", "cgroup-2"], "run-1/lock"),
        ("same pins", ["run-2", "bpf-1", "cgroup-2"], "bpf-1"),
        ("same cgroup", ["run-2", "bpf-2", "cgroup-1"], "cgroup-1"),
    ] {
        let error = host.take(run_dir, bpffs, cgroup).expect_err(case);
        assert!(error.starts_with("another agent is running") && error.contains(held), "{case}: {error}");
    }
    let error = host.take("run-1", "bpf-2", "cgroup-2").unwrap_err();
    assert!(error.contains(&format!("(pid {})", process::id())), "{error}");
    host.take("run-2", "bpf-2", "cgroup-2").expect("another node on the same host");
}

#[test]
fn the_lock_goes_with_the_agent() {
    let host = Host::new("gone");
    let paths = HostPaths { bpffs: host.0.join("bpf"), run_dir: host.0.join("run") };
    assert_eq!(holder(&paths), None);
    let locks = host.take("run", "bpf", "cgroup-1").unwrap();
    assert_eq!(holder(&paths), Some(process::id()));
    drop(locks);
    assert_eq!(holder(&paths), None, "the file stays, the lock does not");
    host.take("run", "bpf", "cgroup-1").unwrap();
}

#[test]
fn a_cgroup_that_is_not_there_is_named() {
    let host = Host::new("missing");
    let error = host.take("run", "bpf", "no-such-cgroup").unwrap_err();
    assert!(error.contains("no-such-cgroup: No such file"), "{error}");
    assert!(!host.0.join("run").exists(), "nothing was changed");
}
