//! The server of the tests: answers with its name and what it saw of the client.

use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::{
    place::{Place, program},
    wait::{SOON, eventually, throughout},
};

/// What it answers to every line (TCP) and every datagram (UDP).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Who answers.
    pub name: String,
    /// The client, as the server sees it; an IPv4 address as such, never v4-mapped.
    pub client: SocketAddr,
}

/// A running server; ends when dropped.
#[derive(Debug)]
pub struct Echo {
    child: Child,
    orders: ChildStdin,
    replies: BufReader<ChildStdout>,
    mortal: bool,
}

impl Place {
    /// Starts a server here. It listens on every address of both families, on ports such as "8080/TCP"; when this
    /// returns it does listen.
    ///
    /// # Errors
    /// When a port is taken.
    pub fn echo(&self, name: &str, ports: &[&str]) -> Result<Echo> {
        let mut command = self.command(program("sheave-echo")?)?;
        command.arg(name).args(ports).stdin(Stdio::piped()).stdout(Stdio::piped());
        if !self.mortal {
            command.stderr(Stdio::null()); // what outlives us must not hold our terminal
        }
        let mut child = command.spawn()?;
        let orders = child.stdin.take().context("echo has no stdin")?;
        let replies = BufReader::new(child.stdout.take().context("echo has no stdout")?);
        let mut echo = Echo { child, orders, replies, mortal: self.mortal };
        let said = echo.line()?;
        ensure!(said == "ready", "echo {name} in {} said {said:?}", self.netns);
        Ok(echo)
    }
}

impl Echo {
    /// How many connections and datagrams it has seen.
    ///
    /// # Errors
    /// When it has ended.
    pub fn seen(&mut self) -> Result<u64> {
        self.orders.write_all(b"seen\n")?;
        Ok(self.line()?.parse()?)
    }

    /// Waits until it has seen ten more. `what` says so.
    ///
    /// # Errors
    /// When it does not.
    pub fn reached(&mut self, what: &str) -> Result<()> {
        let before = self.seen()?;
        eventually(what, SOON, || {
            ensure!(self.seen()? > before + 10, "too few");
            Ok(())
        })
    }

    /// Watches that it sees nothing more, for a while.
    ///
    /// # Errors
    /// When it does.
    pub fn unreached(&mut self) -> Result<()> {
        let before = self.seen()?;
        throughout(Duration::from_millis(300), || {
            ensure!(self.seen()? == before, "it is reached");
            Ok(())
        })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.replies.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        if self.mortal {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
