//! How answers look: kubectl's tables, JSON and YAML. The tables are also what golden tests compare.

pub mod check;
pub mod clients;
pub mod events;
pub mod flows;
pub mod lb;
pub mod services;
pub mod status;
pub mod table;

use std::{env, fmt::Display};

use anyhow::Context as _;
use serde::Serialize;

pub use table::{Cell, Row, Table, Tone, Widths};

/// Whether to colour: `NO_COLOR` (no-color.org) forbids it, and files and pipes want none.
#[must_use]
pub fn colours_wanted(is_terminal: bool) -> bool {
    is_terminal && env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
}

/// JSON for people: indented, with a final newline.
///
/// # Errors
///
/// Never with the types of [`view`](crate::view).
pub fn json(document: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(document).context("cannot write JSON")? + "\n")
}

/// JSON for programs that follow a stream: one line a document.
///
/// # Errors
///
/// Never with the types of [`view`](crate::view).
pub fn json_line(document: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string(document).context("cannot write JSON")? + "\n")
}

/// YAML, with a final newline.
///
/// # Errors
///
/// Never with the types of [`view`](crate::view).
pub fn yaml(document: &impl Serialize) -> anyhow::Result<String> {
    let text = serde_saphyr::to_string(document).context("cannot write YAML")?;
    Ok(text.trim_end().to_owned() + "\n")
}

/// `address:port`, IPv6 in brackets.
#[must_use]
pub fn endpoint(address: &str, port: impl Display) -> String {
    if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") }
}

#[cfg(test)]
mod tests;
