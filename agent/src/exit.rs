//! Exit codes, all of them.

use std::{error::Error, fmt, io, process::ExitCode};

/// A command could not do what it should, or `check` found something missing.
pub const FAILED: u8 = 1;
/// Nothing was done and nothing was changed: the command line is wrong (clap's code too), or this host is not fit.
pub const REFUSED: u8 = 2;

/// All of them, with what they say.
pub const CODES: [(u8, &str); 3] = [
    (0, "done; for `check` and `status`: all is well"),
    (FAILED, "failed, or the answer is bad news"),
    (REFUSED, "nothing was done and nothing changed: the command line is wrong, or this host is not fit"),
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

/// The answer was printed and is bad news: no message is needed, only the code [`FAILED`].
#[derive(Debug)]
pub struct Unwell;

impl fmt::Display for Unwell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("something is wrong, see above")
    }
}

impl Error for Unwell {}

/// Says on stderr why a command ended, and with which code.
#[must_use]
pub fn report(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    // `sheave svc list | head` is no failure.
    if error.chain().filter_map(|e| e.downcast_ref::<io::Error>()).any(|e| e.kind() == io::ErrorKind::BrokenPipe) {
        return ExitCode::SUCCESS;
    }
    if !error.is::<Unwell>() {
        eprintln!("error: {error:#}");
    }
    ExitCode::from(if error.is::<Refused>() { REFUSED } else { FAILED })
}
