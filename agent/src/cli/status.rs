//! `sheave status`.

use std::io::{self, IsTerminal as _};

use anyhow::bail;
use clap::Args;

use super::{block_on, host::HostArgs, list::Output};
use crate::{
    api::client::Client,
    exit,
    observe::health::NOT_READY,
    render::{self, status},
    view::StatusView,
};

const EXAMPLES: &str = "\
The exit code is 0 if the agent answers, healthy or not. With --ready it is 1 until the agent is ready, as with /readyz.

Examples:
  sheave status
  sheave status --ready -o name                # for probes
  sheave status -o json | jq .counters";

/// Flags of `sheave status`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    /// Output format; table is a page to read
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Output::Table)]
    output: Output,
    /// Fail until everything that was listed at the start is in the kernel
    #[arg(long)]
    ready: bool,
    #[command(flatten)]
    host: HostArgs,
}

impl StatusArgs {
    /// Asks the agent and prints.
    pub fn run(self) -> anyhow::Result<()> {
        let client = Client { socket: self.host.paths().socket() };
        let status = block_on(client.status())?;
        let colours = render::colours_wanted(io::stdout().is_terminal());
        let text = match self.output {
            Output::Table | Output::Wide => status::page(&status, colours),
            Output::Json => render::json(&status)?,
            Output::Yaml => render::yaml(&status)?,
            Output::Name => format!("{}\n", status.node),
        };
        exit::print(text)?;
        if self.ready { readiness(&status) } else { Ok(()) }
    }
}

/// A probe's failure shows one sentence to whoever looks at the pod: with what keeps the agent from it, if it knows.
fn readiness(status: &StatusView) -> anyhow::Result<()> {
    if status.ready {
        return Ok(());
    }
    let reasons: String = status.source_problems.iter().map(|problem| format!("; {problem}")).collect();
    bail!("not ready: {NOT_READY}{reasons}")
}
