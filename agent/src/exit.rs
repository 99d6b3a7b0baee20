//! Exit codes, all of them.

use std::{
    error::Error,
    fmt,
    io::{self, Write as _},
    process::ExitCode,
};

use anyhow::Context as _;

/// A command could not do what it should, or `check` found something missing.
pub const FAILED: u8 = 1;
/// Nothing was done and nothing was changed: the command line is wrong (clap's code too), or this host cannot run the
/// agent.
pub const REFUSED: u8 = 2;

/// All of them, with what they mean.
pub const CODES: [(u8, &str); 3] = [
    (
        0,
        "success; for `check`: nothing is missing; for `status`: the agent answers, healthy or not, and with --ready it is \
         ready",
    ),
    (FAILED, "failure, or the answer is bad news"),
    (REFUSED, "nothing was done and nothing changed: the command line is wrong, or this host cannot run the agent"),
];

/// Nothing was changed, and one sentence says why and what to do.
#[derive(Debug)]
pub struct Refused(pub String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refused {}

impl Refused {
    /// An error that came before anything was changed.
    #[must_use]
    pub fn because(error: &anyhow::Error) -> Self {
        Self(format!("{error:#}"))
    }
}

/// The answer was printed and is bad news: no message is needed, only the code [`FAILED`].
#[derive(Debug)]
pub struct Unwell;

impl fmt::Display for Unwell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("something is wrong, see above")
    }
}

impl Error for Unwell {}

/// The reader of our output has left: `sheave svc list | head` is not a failure.
#[derive(Debug)]
struct Unread;

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads the output any more")
    }
}

impl Error for Unread {}

/// Prints an answer.
///
/// # Errors
/// When it cannot be written, to a full disk say.
pub fn print(text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_ref()).and_then(|()| out.flush()))
}

fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(Unread.into()),
        result => result.context("cannot write to stdout"),
    }
}

/// Prints a remark to stderr; whether that works does not matter.
pub fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Says on stderr why a command ended, and with which code.
#[must_use]
pub fn report(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    if error.is::<Unread>() {
        return ExitCode::SUCCESS;
    }
    if !error.is::<Unwell>() {
        note(format_args!("error: {error:#}"));
    }
    ExitCode::from(if error.is::<Refused>() { REFUSED } else { FAILED })
}

/// Prints what clap has to say in place of a command: help that was asked for, or what is wrong with the line.
#[must_use]
pub fn answer(said: &clap::Error) -> ExitCode {
    let printed = said.print().and_then(|()| io::stdout().flush());
    if said.use_stderr() { ExitCode::from(REFUSED) } else { report(written(printed)) }
}
