//! The command line, with kubectl's conventions.

pub mod agent;
mod check;
mod cleanup;
mod conntrack;
mod host;
mod lb;
mod list;
mod monitor;
mod packets;
mod selector;
mod status;
mod svc;

use std::env;

use anyhow::Context as _;
use clap::{CommandFactory as _, Parser, Subcommand, ValueEnum};
use sheave_ebpf::ABI_VERSION;

use crate::exit;

const EXAMPLES: &str = "\
Examples:
  sheave check                  can this host run the agent, and what is missing?
  sheave agent --help           how to run it
  sheave status                 is it healthy?
  sheave svc list               what the agent wants the kernel to do
  sheave lb list                what the kernel really does; works while the agent is down
  sheave monitor                what happens to connections, as it happens

Exit codes: 0 success, 1 failure or bad news, 2 refused before anything was changed.";

/// A kube-proxy replacement: Kubernetes Services in eBPF, with any CNI
#[derive(Debug, Parser)]
#[command(name = "sheave", version, after_help = EXAMPLES, disable_help_subcommand = true, max_term_width = 120)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the agent on this node until it is told to stop
    Agent(Box<agent::AgentArgs>),
    /// Show Services as the agent wants them
    #[command(alias = "service", subcommand)]
    Svc(svc::SvcCommand),
    /// Show the load balancer as the kernel has it
    #[command(subcommand)]
    Lb(lb::LbCommand),
    /// Show connections as they are opened, refused and dropped
    Monitor(monitor::MonitorArgs),
    /// Show at a glance whether the agent is healthy
    Status(status::StatusArgs),
    /// Check whether this kernel and host can run the agent, and what is missing
    Check(check::CheckArgs),
    /// Remove sheave from this node, as if it had never been installed
    Cleanup(cleanup::CleanupArgs),
    /// Print a completion script for a shell
    #[command(after_help = COMPLETION_EXAMPLES)]
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Print the version of this program and of its map layout
    Version,
}

/// Shells with a completion script.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

const COMPLETION_EXAMPLES: &str = "\
Examples:
  source <(sheave completion bash)
  sheave completion zsh > \"${fpath[1]}/_sheave\"
  sheave completion fish > ~/.config/fish/completions/sheave.fish";

impl Cli {
    /// Does what was asked.
    ///
    /// # Errors
    ///
    /// What [`exit::report`] turns into a message and an exit code.
    pub fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Agent(_) => agent::AgentArgs::run(&env::args_os().collect::<Vec<_>>()),
            Command::Svc(command) => command.run(),
            Command::Lb(command) => command.run(),
            Command::Monitor(args) => args.run(),
            Command::Status(args) => args.run(),
            Command::Check(args) => args.run(),
            Command::Cleanup(args) => args.run(),
            Command::Completion { shell } => exit::print(completion(shell)),
            Command::Version => {
                exit::print(format!("sheave {} (map layout v{ABI_VERSION})\n", env!("CARGO_PKG_VERSION")))
            }
        }
    }
}

/// Runs what talks to the agent.
fn block_on<T>(work: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the async runtime")?.block_on(work)
}

/// The script, whole: clap_complete panics when it cannot write.
fn completion(shell: Shell) -> Vec<u8> {
    let shell = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "sheave", &mut script);
    script
}

#[cfg(test)]
mod tests;
