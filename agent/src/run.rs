//! Wiring and the event loop.

use crate::options::AgentOptions;

/// Runs the agent until it is told to stop.
///
/// # Errors
///
/// [`Refused`](crate::exit::Refused) when this host is not fit; else what broke.
pub fn run(options: AgentOptions) -> anyhow::Result<()> {
    anyhow::bail!("the agent of node {} is not built in yet", options.node_name)
}
