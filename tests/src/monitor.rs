//! A running `sheave monitor`, read line by line.

use std::{
    io::{BufRead as _, BufReader},
    process::{Child, ChildStdout, Stdio},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{agent::Agent, node::Node, place::program};

/// A running `sheave monitor`, past its headings.
#[derive(Debug)]
pub struct Monitor {
    /// Its process; stderr is a pipe.
    pub child: Child,
    /// Its stdout.
    pub lines: BufReader<ChildStdout>,
}

impl Monitor {
    /// Starts it on a node and waits until it reads.
    ///
    /// # Errors
    /// When it cannot be started, or begins with anything but its headings.
    pub fn start(node: &Node, agent: &Agent, flags: &[&str]) -> Result<Self> {
        let mut command = node.host.command(program("sheave")?)?;
        command.arg("monitor").args(flags).args(agent.flags().split(' ')).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut lines = BufReader::new(child.stdout.take().context("no stdout")?);
        let mut headings = String::new();
        lines.read_line(&mut headings)?;
        ensure!(headings.starts_with("TIME"), "it began with {headings:?}");
        Ok(Self { child, lines })
    }

    /// The next line, its columns apart, without the time.
    ///
    /// # Errors
    /// When it has ended.
    pub fn line(&mut self) -> Result<Vec<String>> {
        let mut line = String::new();
        ensure!(self.lines.read_line(&mut line)? > 0, "it has ended");
        Ok(line.split_whitespace().skip(1).map(str::to_owned).collect())
    }

    /// Tells it to end, and gives what it said on stderr.
    ///
    /// # Errors
    /// When it cannot be told.
    pub fn end(self, signal: Signal) -> Result<String> {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal)?;
        Ok(String::from_utf8(self.child.wait_with_output()?.stderr)?)
    }
}
