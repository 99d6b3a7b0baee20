//! `sheave check`.
use clap::Args;

/// Flags of `sheave check`.
#[derive(Debug, Args)]
pub struct CheckArgs {}

impl CheckArgs {
    pub fn run(self) -> anyhow::Result<()> {
        Ok(())
    }
}
