//! sheave: arguments, dispatch, exit code.

use std::process::ExitCode;

use clap::Parser as _;
use sheave_agent::{cli::Cli, exit};

fn main() -> ExitCode {
    match Cli::try_parse() {
        Ok(cli) => exit::report(cli.run()),
        Err(answer) => exit::answer(&answer),
    }
}
