//! One agent for one run directory, one set of pins and one cgroup: held as flock(2), which a crash releases.
//!
//! The cgroup and the pins are locked as the directories that they are: the lock holds across mount namespaces, so that
//! two pods that see one host also see each other, and leaves nothing behind.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{Read as _, Write as _},
    os::unix::fs::MetadataExt as _,
    path::Path,
    process,
    thread::sleep,
    time::Duration,
};

use crate::{exit::Refused, options::HostPaths};

/// What an agent holds while it runs.
#[derive(Debug)]
pub struct Locks {
    _held: [File; 3],
}

/// An agent that is being replaced gets this many tries of 100 ms to end.
const TRIES: u32 = 10;

impl Locks {
    /// Takes all of them, making directories that are missing; an agent that is refused may have made some.
    ///
    /// # Errors
    ///
    /// When another agent holds one, or one cannot be opened.
    pub fn take(paths: &HostPaths, cgroup_root: &Path) -> Result<Self, Refused> {
        let lock = |file, path: &Path| lock(file, path, paths);
        let cgroup = lock(open_directory(cgroup_root)?, cgroup_root)?;
        fs::create_dir_all(&paths.bpffs).map_err(|e| refused("make the directory", &paths.bpffs, &e))?;
        let pins = lock(open_directory(&paths.bpffs)?, &paths.bpffs)?;
        fs::create_dir_all(&paths.run_dir).map_err(|e| refused("make the directory", &paths.run_dir, &e))?;
        let path = paths.lock();
        let mut run_dir = loop {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
            let file = lock(file.map_err(|e| refused("open", &path, &e))?, &path)?;
            if is_at(&file, &path) {
                break file;
            }
            // Whoever held it removed it: `sheave cleanup`, or an agent that was refused.
        };
        // For people and for messages; the lock itself is what counts.
        let write_pid = |file: &mut File| file.set_len(0).and_then(|()| writeln!(file, "{}", process::id()));
        write_pid(&mut run_dir).map_err(|e| refused("write", &path, &e))?;
        Ok(Self { _held: [cgroup, pins, run_dir] })
    }
}

/// Who holds the run directory or the bpffs: its process id, 0 where it is not known; `None` = no agent runs there.
#[must_use]
pub fn holder(paths: &HostPaths) -> Option<u32> {
    of_run_dir(paths).or_else(|| {
        let pins = File::open(&paths.bpffs).ok()?;
        matches!(pins.try_lock_shared(), Err(TryLockError::WouldBlock)).then_some(0)
    })
}

fn of_run_dir(paths: &HostPaths) -> Option<u32> {
    let mut file = File::open(paths.lock()).ok()?;
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => {
            let mut text = String::new();
            let _ = file.read_to_string(&mut text);
            Some(text.trim().parse().unwrap_or(0))
        }
        Ok(()) | Err(TryLockError::Error(_)) => None,
    }
}

/// Whether the file still bears that name.
fn is_at(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

fn open_directory(path: &Path) -> Result<File, Refused> {
    File::open(path).map_err(|e| refused("open", path, &e))
}

fn lock(file: File, path: &Path, paths: &HostPaths) -> Result<File, Refused> {
    for attempt in 1.. {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(refused("lock", path, &e)),
            Err(TryLockError::WouldBlock) if attempt < TRIES => sleep(Duration::from_millis(100)),
            Err(TryLockError::WouldBlock) => break,
        }
    }
    let pid = of_run_dir(paths).filter(|pid| *pid != 0).map(|pid| format!(" (pid {pid})")).unwrap_or_default();
    let path = path.display();
    Err(Refused(format!(
        "another agent is running with {path}{pid}; stop it first, or give this one its own --run-dir, --bpffs and \
         --cgroup-root"
    )))
}

fn refused(action: &str, path: &Path, error: &std::io::Error) -> Refused {
    Refused(format!("cannot {action} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
