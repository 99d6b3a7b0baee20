//! Aligned columns without borders, as kubectl prints them.
//!
//! Laying out a line is the twenty lines at the end of this file. A crate for tables would take these over, but not what
//! the rest is about: which lines are new since the last print, in columns that a watch has seen growing.

use std::{
    collections::{HashMap, HashSet},
    fmt::Write as _,
    iter,
};

/// What a cell means for whoever skims the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tone {
    /// Nothing to notice.
    #[default]
    Plain,
    /// Well.
    Good,
    /// Worth a look.
    Warn,
    /// Wrong.
    Bad,
}

impl Tone {
    /// The SGR sequence that starts this colour.
    const fn start(self) -> &'static str {
        match self {
            Self::Plain => "",
            Self::Good => "\x1b[32m",
            Self::Warn => "\x1b[33m",
            Self::Bad => "\x1b[31m",
        }
    }
}

/// One cell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// One line.
    pub text: String,
    /// Its colour on a terminal.
    pub tone: Tone,
}

impl Cell {
    /// A cell that says how things stand.
    #[must_use]
    pub fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: printable(text.into()), tone }
    }
}

/// What comes from objects must not steer a terminal or break a line.
#[must_use]
pub fn printable(text: String) -> String {
    if text.chars().any(char::is_control) { text.replace(char::is_control, "\u{fffd}") } else { text }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self::toned(text, Tone::Plain)
    }
}

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// What makes it the same line in a later print; unique in its table.
    pub key: String,
    /// As many as the table has columns.
    pub cells: Vec<Cell>,
}

/// Lines under headings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Upper case.
    pub headings: Vec<&'static str>,
    /// Which column says how a line stands; in a watch it reads "deleted" when the line is gone.
    pub status: usize,
    /// The lines.
    pub rows: Vec<Row>,
}

/// Widths of the columns printed so far, so that a watch keeps its columns in place.
#[derive(Clone, Debug, Default)]
pub struct Widths(Vec<usize>);

/// Between columns.
const GAP: usize = 3;

impl Table {
    /// The lines of `self` that `before` did not have, had otherwise, or had and `self` has not.
    #[must_use]
    pub fn changes_since(&self, before: &Self) -> Self {
        let now: HashSet<&str> = self.rows.iter().map(|r| r.key.as_str()).collect();
        let then: HashMap<&str, &Row> = before.rows.iter().map(|r| (r.key.as_str(), r)).collect();
        let gone = before.rows.iter().filter(|r| !now.contains(r.key.as_str())).map(|r| {
            let mut row = r.clone();
            if let Some(cell) = row.cells.get_mut(self.status) {
                *cell = Cell::toned("deleted", Tone::Warn);
            }
            row
        });
        let changed = self.rows.iter().filter(|r| then.get(r.key.as_str()) != Some(r)).cloned();
        Self { headings: self.headings.clone(), status: self.status, rows: changed.chain(gone).collect() }
    }

    /// The headings line.
    #[must_use]
    pub fn heading_line(&self, widths: &Widths) -> String {
        let cells: Vec<Cell> = self.headings.iter().map(|h| Cell::from(*h)).collect();
        line(&cells, widths, false)
    }

    /// Every line but the headings.
    #[must_use]
    pub fn lines(&self, widths: &Widths, colours: bool) -> String {
        self.rows.iter().map(|row| line(&row.cells, widths, colours)).collect()
    }

    /// Headings and lines without colour: what golden tests compare.
    #[must_use]
    pub fn text(&self) -> String {
        self.page(false)
    }

    /// Headings and lines.
    #[must_use]
    pub fn page(&self, colours: bool) -> String {
        let mut widths = Widths::default();
        self.grow(&mut widths);
        self.heading_line(&widths) + &self.lines(&widths, colours)
    }

    /// Makes room for every cell and heading.
    pub fn grow(&self, widths: &mut Widths) {
        widths.0.resize(self.headings.len().max(widths.0.len()), 0);
        let headings = self.headings.iter().enumerate().map(|(i, h)| (i, h.chars().count()));
        let cells = self.rows.iter().flat_map(|r| r.cells.iter().enumerate()).map(|(i, c)| (i, c.text.chars().count()));
        for (column, width) in headings.chain(cells) {
            if let Some(known) = widths.0.get_mut(column) {
                *known = width.max(*known);
            }
        }
    }
}

fn line(cells: &[Cell], widths: &Widths, colours: bool) -> String {
    let mut line = String::new();
    let mut spaces = 0;
    for (cell, width) in cells.iter().zip(&widths.0) {
        // Written before the next cell only, so that no line ends in spaces.
        line.extend(iter::repeat_n(' ', spaces));
        let coloured = colours && cell.tone != Tone::Plain;
        let (start, end) = if coloured { (cell.tone.start(), "\x1b[0m") } else { ("", "") };
        let _ = write!(line, "{start}{}{end}", cell.text);
        spaces = width - cell.text.chars().count().min(*width) + GAP;
    }
    line.truncate(line.trim_end().len()); // the last cell may be empty
    line + "\n"
}
