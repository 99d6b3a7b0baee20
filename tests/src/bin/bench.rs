//! `sheave-bench`: see `cargo xtask bench --help`. `sheave-bench worker CPU` is a process of its own in a pod.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use sheave_tests::bench::{self, Effort, Part};

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    worker: Option<Worker>,
    /// What to measure [default: everything]
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Measured>,
    /// A short run over small clusters, to see that it works; the numbers mean nothing
    #[arg(long)]
    quick: bool,
    /// Write the numbers to this file as well
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Worker {
    #[command(hide = true)]
    Worker { cpu: usize },
}

#[derive(Clone, Copy, ValueEnum)]
enum Measured {
    /// CPU and latency of connections, requests and datagrams, against a bare node
    Traffic,
    /// Time and memory to program a cluster from nothing
    Fill,
    /// Time and CPU of a changed slice
    Change,
    /// CPU of NodePorts from outside, against plain routing and kube-proxy; the flow table
    Packets,
}

impl From<Measured> for Part {
    fn from(measured: Measured) -> Self {
        match measured {
            Measured::Traffic => Self::Traffic,
            Measured::Fill => Self::Fill,
            Measured::Change => Self::Change,
            Measured::Packets => Self::Packets,
        }
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(Worker::Worker { cpu }) = cli.worker {
        return bench::worker::run(cpu);
    }
    let named: Vec<Part> = cli.parts.into_iter().map(Part::from).collect();
    let parts = if named.is_empty() { &Part::ALL[..] } else { &named };
    let report = bench::run(parts, if cli.quick { &Effort::QUICK } else { &Effort::FULL })?;
    let report = report.context("this host cannot run the bench; the line above says why")?;
    println!("{report}");
    if let Some(file) = cli.json {
        fs::write(&file, serde_json::to_string_pretty(&report)?).with_context(|| file.display().to_string())?;
    }
    Ok(())
}
