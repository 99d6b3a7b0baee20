//! Flags that say which agent on this host is meant.

use std::path::PathBuf;

use clap::Args;

use crate::options::HostPaths;

/// Where an agent has its pins and its socket.
#[derive(Debug, Args)]
pub struct HostArgs {
    /// BPF filesystem, or a directory in one, that holds the pinned maps and links
    #[arg(long, value_name = "DIR", default_value = HostPaths::DEFAULT_BPFFS, env = "SHEAVE_BPFFS", help_heading = "Host")]
    bpffs: PathBuf,
    /// Directory of the agent's socket and lock
    #[arg(long, value_name = "DIR", default_value = HostPaths::DEFAULT_RUN_DIR, env = "SHEAVE_RUN_DIR", help_heading = "Host")]
    run_dir: PathBuf,
}

impl HostArgs {
    /// The same without a trace of clap.
    pub fn paths(&self) -> HostPaths {
        HostPaths { bpffs: self.bpffs.clone(), run_dir: self.run_dir.clone() }
    }
}
