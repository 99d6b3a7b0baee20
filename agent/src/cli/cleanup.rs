//! `sheave cleanup`.
use clap::Args;

/// Flags of `sheave cleanup`.
#[derive(Debug, Args)]
pub struct CleanupArgs {}

impl CleanupArgs {
    pub fn run(self) -> anyhow::Result<()> {
        Ok(())
    }
}
