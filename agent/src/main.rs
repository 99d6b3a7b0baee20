//! sheave: arguments, dispatch, exit code.

use std::process::ExitCode;

use clap::Parser as _;
use sheave_agent::{cli::Cli, exit};

fn main() -> ExitCode {
    exit::report(Cli::parse().run())
}
