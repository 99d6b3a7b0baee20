//! Logging: to stderr, as text for people or JSON for collectors.

use std::{
    io::{self, IsTerminal as _},
    str::FromStr,
};

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

/// What is logged: trace, debug, info, warn, error, or directives such as `info,sheave_agent=debug`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level(String);

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        match EnvFilter::try_new(text) {
            Ok(_) if !text.is_empty() => Ok(Self(text.to_owned())),
            Ok(_) | Err(_) => Err("expected trace, debug, info, warn, error, or directives such as \
                                   info,sheave_agent::source=debug"
                .to_owned()),
        }
    }
}

/// Starts logging.
pub fn start(format: LogFormat, Level(level): &Level) {
    // What kube's client logs at every failed try is in the state of the source, once and in words.
    let filter = EnvFilter::new(format!("kube_client=off,{level}"));
    // A full disk or a dead reader costs log lines, never the agent: complaining about it would go to stderr too, and
    // panic there.
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).log_internal_errors(false);
    match format {
        LogFormat::Text => builder.with_ansi(colours_wanted(io::stderr().is_terminal())).init(),
        LogFormat::Json => builder.json().flatten_event(true).init(),
    }
}
