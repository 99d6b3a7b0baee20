//! Logging: to stderr, as text for people or JSON for collectors.

use std::io::{self, IsTerminal as _};

use anyhow::Context as _;
use tracing_subscriber::EnvFilter;

use crate::render::colours_wanted;

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Starts logging. `level` is one of trace, debug, info, warn, error, or directives such as `info,sheave_agent=debug`.
///
/// # Errors
///
/// When `level` is neither.
pub fn start(format: LogFormat, level: &str) -> anyhow::Result<()> {
    // What kube's client logs at every failed try is in the state of the source, once and in words.
    let filter =
        EnvFilter::try_new(format!("kube_client=off,{level}")).with_context(|| format!("{level:?} is no log level"))?;
    // A full disk or a dead reader costs log lines, never the agent: complaining about it would go to stderr too, and
    // panic there.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Text => builder.with_ansi(colours_wanted(io::stderr().is_terminal())).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
    Ok(())
}
