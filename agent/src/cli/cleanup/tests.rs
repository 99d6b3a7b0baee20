//! What is left in the run directory.

use std::{env, fs, path::PathBuf, process, slice};

use super::remove_traces;
use crate::options::HostPaths;

#[test]
fn only_our_files_go_and_a_second_time_nothing_does() {
    let root = env::temp_dir().join(format!("sheave-cleanup-{}", process::id()));
    let paths = HostPaths { bpffs: root.join("bpf"), run_dir: root.join("run") };
    fs::create_dir_all(&paths.run_dir).unwrap();
    fs::write(paths.socket(), "").unwrap();
    fs::write(paths.lock(), "").unwrap();
    let shown = |paths: &[PathBuf]| paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>();
    let all = shown(&[paths.socket(), paths.lock(), paths.run_dir.clone()]);

    assert_eq!(remove_traces(&paths, true).unwrap(), all, "a dry run says the same");
    assert!(paths.socket().exists(), "a dry run removes nothing");
    let foreign = paths.run_dir.join("foreign");
    fs::write(&foreign, "").unwrap();
    assert_eq!(remove_traces(&paths, false).unwrap(), shown(&[paths.socket(), paths.lock()]));
    assert!(foreign.exists(), "what is not ours stays, and so does its directory");
    fs::remove_file(&foreign).unwrap();
    assert_eq!(remove_traces(&paths, false).unwrap(), shown(slice::from_ref(&paths.run_dir)));
    assert_eq!(remove_traces(&paths, false).unwrap(), Vec::<String>::new());
    fs::remove_dir_all(&root).unwrap();
}
