//! `sheave status`.

use std::io::{self, IsTerminal as _};

use clap::Args;

use super::{block_on, host::HostArgs, list::Output};
use crate::{
    api::client::Client,
    exit,
    render::{self, status},
};

const EXAMPLES: &str = "\
The exit code is 0 if the agent answers, healthy or not; for probes there is /readyz.

Examples:
  sheave status
  sheave status -o json | jq .counters";

/// Flags of `sheave status`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct StatusArgs {
    /// Output format; table is a page to read
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Output::Table)]
    output: Output,
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
        exit::print(text)
    }
}
