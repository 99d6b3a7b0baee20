//! What the agent needs of the host before it changes anything.

use std::{
    fs::{self, File, TryLockError},
    path::PathBuf,
};

use crate::{exit::Refused, options::AgentOptions};

/// A host found fit, and the lock that keeps a second agent away.
pub struct Host {
    /// Root of the cgroup v2 tree whose sockets are translated.
    pub cgroup_root: PathBuf,
    /// Held as long as the agent lives.
    _lock: File,
}

impl Host {
    /// Checks and locks.
    ///
    /// # Errors
    /// [`Refused`] with one sentence; nothing was changed then.
    pub fn prepare(options: &AgentOptions) -> anyhow::Result<Self> {
        let run_dir = &options.paths.run_dir;
        let refuse = |what: String| anyhow::Error::new(Refused(what));
        let cgroup_root = options.cgroup_root.clone().ok_or_else(|| {
            refuse("no cgroup v2 tree is mounted; mount one or name it with --cgroup-root".to_owned())
        })?;
        fs::create_dir_all(run_dir)
            .map_err(|e| refuse(format!("cannot create the run directory {}: {e}", run_dir.display())))?;
        let path = options.paths.lock();
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(|e| refuse(format!("cannot open the lock {}: {e}", path.display())))?;
        match lock.try_lock() {
            Ok(()) => Ok(Self { cgroup_root, _lock: lock }),
            Err(TryLockError::WouldBlock) => Err(refuse(format!(
                "another agent runs with the run directory {}; stop it first, or choose another --run-dir, --bpffs and \
                 --cgroup-root for a second node",
                run_dir.display()
            ))),
            Err(TryLockError::Error(e)) => Err(refuse(format!("cannot lock {}: {e}", path.display()))),
        }
    }
}
