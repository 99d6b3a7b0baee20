//! What all listing commands have in common: formats, filters, and following changes.

use std::{
    io::{self, IsTerminal as _},
    mem,
};

use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::{
    api::client::Watched,
    exit,
    render::{self, Table, Widths},
};

/// Format of the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Aligned columns
    #[default]
    Table,
    /// More columns
    Wide,
    /// JSON: {"items": [...]}
    Json,
    /// YAML: items: [...]
    Yaml,
    /// Names only, one per line
    Name,
}

/// Flags of every list.
#[derive(Debug, Default, Args)]
pub struct FormatArgs {
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Output::Table)]
    pub output: Output,
    /// Keep running and print what changes; as JSON or YAML, one document per change
    #[arg(short, long)]
    pub watch: bool,
    /// Leave out the header line
    #[arg(long)]
    pub no_headers: bool,
}

/// Flags of every list whose lines belong to namespaces. Unlike with kubectl, all namespaces are shown unless one is
/// named: who looks at a node wants to see the node.
#[derive(Debug, Default, Args)]
pub struct NamespaceArgs {
    /// Only this namespace [default: all of them]
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// All namespaces: the default, accepted for the sake of kubectl habits; overrides --namespace
    #[arg(short = 'A', long)]
    all_namespaces: bool,
}

impl NamespaceArgs {
    /// The namespace that is meant; `None` = all.
    pub fn only(&self) -> Option<&str> {
        if self.all_namespaces { None } else { self.namespace.as_deref() }
    }
}

/// Tells whoever watches once that what is watched went, and once that it is back. What was printed stays; on stdout
/// goes on what changes.
pub struct Presence {
    what: &'static str,
    is_away: bool,
}

impl Presence {
    /// It is there.
    pub const fn of(what: &'static str) -> Self {
        Self { what, is_away: false }
    }
}

impl Watched for Presence {
    fn away(&mut self, why: &anyhow::Error) {
        if !mem::replace(&mut self.is_away, true) {
            exit::note(format_args!("note: {why:#}; waiting for {} to come back", self.what));
        }
    }

    fn here(&mut self) {
        if mem::take(&mut self.is_away) {
            exit::note(format_args!("note: {} is back", self.what));
        }
    }
}

/// What can be listed.
pub trait Listing: Serialize {
    /// As a table.
    fn table(&self, wide: bool) -> Table;
    /// As names.
    fn names(&self) -> String;
}

/// Prints a list, and then what changes in it.
pub struct Printer {
    format: FormatArgs,
    colours: bool,
    last: Last,
}

/// What was printed before.
#[derive(Default)]
enum Last {
    #[default]
    Nothing,
    Text(String),
    Table(Table, Widths),
}

impl Printer {
    /// A printer to stdout.
    pub fn new(format: FormatArgs) -> Self {
        Self { format, colours: render::colours_wanted(io::stdout().is_terminal()), last: Last::Nothing }
    }

    /// Prints the list; from the second time on, only what is new.
    pub fn print(&mut self, list: &impl Listing) -> anyhow::Result<()> {
        let text = self.next(list)?;
        exit::print(text)
    }

    fn next(&mut self, list: &impl Listing) -> anyhow::Result<String> {
        let text = match self.format.output {
            Output::Table => return Ok(self.next_lines(list.table(false))),
            Output::Wide => return Ok(self.next_lines(list.table(true))),
            Output::Json if self.format.watch => render::json_line(list)?,
            Output::Json => render::json(list)?,
            Output::Yaml => render::yaml(list)?,
            Output::Name => list.names(),
        };
        Ok(match mem::replace(&mut self.last, Last::Text(text.clone())) {
            Last::Text(before) if before == text => String::new(),
            Last::Text(_) if self.format.output == Output::Yaml => format!("---\n{text}"),
            Last::Text(_) | Last::Nothing | Last::Table(..) => text,
        })
    }

    fn next_lines(&mut self, table: Table) -> String {
        if table.rows.is_empty() && !self.format.watch {
            exit::note("Nothing to show.");
            return String::new();
        }
        let (heading, shown, mut widths) = match mem::take(&mut self.last) {
            Last::Table(before, widths) => (false, table.changes_since(&before), widths),
            Last::Nothing | Last::Text(_) => (!self.format.no_headers, table.clone(), Widths::default()),
        };
        shown.grow(&mut widths);
        let heading = if heading { shown.heading_line(&widths) } else { String::new() };
        let text = heading + &shown.lines(&widths, self.colours);
        self.last = Last::Table(table, widths);
        text
    }
}

#[cfg(test)]
mod tests;
