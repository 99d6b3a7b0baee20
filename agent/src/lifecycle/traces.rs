//! What a start leaves on the host, taken back when the start fails: whoever is refused finds nothing changed.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use crate::{datapath::tables::pins::Pins, options::HostPaths};

/// What is not there yet. Dropped, unless [`keep`](Self::keep) was called, it removes what has come since.
#[derive(Debug)]
pub struct Traces {
    /// Files and directories, in order of making.
    missing: Vec<PathBuf>,
    /// Directory of all pins, ours alone, and what is in it.
    pins: PathBuf,
    present: BTreeSet<PathBuf>,
}

impl Traces {
    /// Looks. Call it before anything is made.
    #[must_use]
    pub fn before(paths: &HostPaths) -> Self {
        let mut missing: Vec<PathBuf> = [&paths.run_dir, &paths.bpffs].into_iter().flat_map(|p| absent(p)).collect();
        missing.extend([paths.lock(), paths.socket()].into_iter().filter(|path| fs::symlink_metadata(path).is_err()));
        let pins = Pins::below(&paths.bpffs).base;
        Self { missing, present: tree(&pins), pins }
    }

    /// Looks at the pins again: call it once they are locked, since a predecessor may have made some in the meantime.
    pub fn look_at_pins(&mut self) {
        self.present = tree(&self.pins);
    }

    /// Only directories that nobody uses go: whatever is in one may be another agent's.
    pub fn keep_used(&mut self) {
        for path in self.missing.iter().rev() {
            let _ = fs::remove_dir(path); // refused while something is in it
        }
        self.keep();
    }

    /// Everything that is there now stays.
    pub fn keep(&mut self) {
        self.missing.clear();
        self.pins = PathBuf::new(); // which holds nothing
    }
}

impl Drop for Traces {
    /// What cannot be removed stays, as it would after a crash: `sheave cleanup` is for that.
    fn drop(&mut self) {
        let pins = tree(&self.pins);
        let made: Vec<&PathBuf> = self.missing.iter().chain(pins.difference(&self.present)).collect();
        for path in made.into_iter().rev() {
            let _ = if path.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
        }
    }
}

/// The directories that are missing on the way to `path`, from above.
fn absent(path: &Path) -> Vec<PathBuf> {
    let is_absent = |path: &&Path| !path.as_os_str().is_empty() && fs::symlink_metadata(path).is_err();
    let mut absent: Vec<PathBuf> = path.ancestors().take_while(is_absent).map(Path::to_owned).collect();
    absent.reverse();
    absent
}

/// A directory and everything in it; in order, a directory comes before what it contains.
fn tree(path: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let Ok(entries) = fs::read_dir(path) else { return found };
    found.insert(path.to_owned());
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(tree(&entry.path()));
        } else {
            found.insert(entry.path());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::{env, process};

    use super::*;

    #[test]
    fn a_failed_start_leaves_what_it_found() {
        let root = env::temp_dir().join(format!("sheave-traces-{}", process::id()));
        let paths = HostPaths { bpffs: root.join("bpf/new"), run_dir: root.join("run/new") };
        let pins = Pins::below(&paths.bpffs);
        let make = || {
            for directory in [&paths.run_dir, &pins.maps(), &pins.links()] {
                fs::create_dir_all(directory).unwrap();
            }
            for file in [paths.lock(), paths.socket(), pins.map("META"), pins.link("connect4")] {
                fs::write(file, "").unwrap();
            }
        };
        fs::create_dir_all(root.join("run")).unwrap();
        let before = tree(&root);

        let traces = Traces::before(&paths);
        make();
        drop(traces);
        assert_eq!(tree(&root), before, "all of it is taken back");

        let mut traces = Traces::before(&paths);
        fs::create_dir_all(&paths.run_dir).unwrap();
        fs::create_dir_all(pins.maps()).unwrap();
        traces.keep_used();
        drop(traces);
        assert!(pins.maps().exists() && !paths.run_dir.exists(), "what is in use may be another agent's");
        fs::remove_dir_all(root.join("bpf")).unwrap();

        let mut traces = Traces::before(&paths);
        make();
        traces.keep();
        let old = tree(&root);
        let traces = Traces::before(&paths);
        fs::write(pins.link("connect6"), "").unwrap();
        fs::write(paths.run_dir.join("of-others"), "").unwrap();
        drop(traces);
        let after: Vec<_> = tree(&root).difference(&old).cloned().collect();
        assert_eq!(after, [paths.run_dir.join("of-others")], "what a predecessor and others made stays");
        fs::remove_dir_all(root).unwrap();
    }
}
