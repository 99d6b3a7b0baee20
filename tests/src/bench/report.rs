//! What was measured, beside the bar it has to clear.

use std::fmt::{self, Write as _};

use serde::Serialize;

use super::numbers::Spread;

/// Everything of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Where it ran.
    pub host: Host,
    /// In the order of measurement.
    pub rows: Vec<Row>,
}

/// The machine. Absolute numbers mean nothing without it.
#[derive(Clone, Debug, Serialize)]
pub struct Host {
    /// Processor.
    pub cpu: String,
    /// How many of them.
    pub cores: usize,
    /// `uname -r`
    pub kernel: String,
    /// Processes that wanted to run when it began, beside us: above 1 the numbers scatter.
    pub load: f64,
}

/// One measured thing.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Which table it belongs to.
    pub group: &'static str,
    /// In words.
    pub what: String,
    /// Over the rounds.
    #[serde(flatten)]
    pub spread: Spread,
    /// Of the numbers.
    pub unit: Unit,
    /// The median should be no more than this.
    pub bar: Option<f64>,
    /// How it did.
    pub verdict: Verdict,
}

/// What a number counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Unit {
    /// A ratio to the bare node in the same round.
    TimesBare,
    /// Microseconds.
    Micros,
    /// Milliseconds.
    Millis,
    /// Mebibytes.
    Mebibytes,
}

/// A number against its bar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Verdict {
    /// The median is within the bar, or above by no more than two bare nodes differ.
    Pass,
    /// The median is above, but may truly be within: repeat on a quiet machine.
    Unclear,
    /// The median is above, and sure to be.
    Miss,
    /// There is no bar.
    Shown,
}

impl Row {
    /// A row of the table `group`.
    #[must_use]
    pub fn new(group: &'static str, what: impl Into<String>, spread: Spread, unit: Unit) -> Self {
        Self { group, what: what.into(), spread, unit, bar: None, verdict: Verdict::Shown }
    }

    /// With a bar.
    #[must_use]
    pub fn bar(self, bar: f64) -> Self {
        self.bar_with_noise(bar, 0.0)
    }

    /// With a bar, in a run in which two equal things differed by `noise`.
    #[must_use]
    pub fn bar_with_noise(mut self, bar: f64, noise: f64) -> Self {
        self.bar = Some(bar);
        self.verdict = match self.spread {
            Spread { median, .. } if median <= bar + noise => Verdict::Pass,
            Spread { low, .. } if low <= bar + noise => Verdict::Unclear,
            Spread { .. } => Verdict::Miss,
        };
        self
    }
}

impl Unit {
    fn show(self, number: f64) -> String {
        match self {
            Self::TimesBare => format!("{number:.3} ×"),
            Self::Micros => format!("{number:.1} µs"),
            Self::Millis => format!("{number:.2} ms"),
            Self::Mebibytes => format!("{number:.1} MiB"),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Pass => "pass",
            Self::Unclear => "unclear",
            Self::Miss => "MISS",
            Self::Shown => "",
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Host { cpu, cores, kernel, load } = &self.host;
        writeln!(f, "{cores} × {cpu}, Linux {kernel}, load {load:.2} when it began")?;
        let width = self.rows.iter().map(|row| row.what.chars().count()).max().unwrap_or(0);
        for rows in self.rows.chunk_by(|a, b| a.group == b.group) {
            let (group, what) = (rows[0].group, "");
            writeln!(f, "\n{group}\n  {what:width$}  {:>12}  {:>26}  {:>12}", "median", "95 % sure", "bar")?;
            for row in rows {
                writeln!(f, "{}", line(row, width)?)?;
            }
        }
        Ok(())
    }
}

fn line(row: &Row, width: usize) -> Result<String, fmt::Error> {
    let Row { what, spread: Spread { median, low, high }, unit, bar, verdict, group: _ } = row;
    let range = if low < high { format!("{} … {}", unit.show(*low), unit.show(*high)) } else { String::new() };
    let bar = bar.map_or_else(String::new, |bar| format!("≤ {}", unit.show(bar)));
    let mut line = String::new();
    write!(line, "  {what:width$}  {:>12}  {range:>26}  {bar:>12}  {verdict}", unit.show(*median))?;
    Ok(line.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(median: f64, low: f64) -> Row {
        Row::new("a", "b", Spread { median, low, high: 9.0 }, Unit::TimesBare)
    }

    #[test]
    fn a_median_within_the_bar_passes_and_only_a_hopeless_one_misses() {
        for (median, low, noise, expected) in [
            (1.05, 0.9, 0.0, Verdict::Pass),
            (1.06, 1.05, 0.0, Verdict::Unclear),
            (1.07, 1.06, 0.0, Verdict::Miss),
            (1.06, 1.055, 0.02, Verdict::Pass),
            (1.08, 1.06, 0.02, Verdict::Unclear),
            (1.08, 1.075, 0.02, Verdict::Miss),
        ] {
            let verdict = row(median, low).bar_with_noise(1.05, noise).verdict;
            assert_eq!(verdict, expected, "median {median}, low {low}, noise {noise}");
        }
        assert_eq!(row(1.0, 1.0).verdict, Verdict::Shown);
    }

    #[test]
    fn the_table_shows_bar_and_verdict_beside_each_number() {
        let host = Host { cpu: "Z80".into(), cores: 1, kernel: "1.0".into(), load: 0.5 };
        let text = Report { host, rows: vec![row(1.2, 1.1).bar(1.05), row(2.0, 1.5)] }.to_string();
        let lines: Vec<_> = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(
            lines,
            [
                "1 × Z80, Linux 1.0, load 0.50 when it began",
                "",
                "a",
                "median 95 % sure bar",
                "b 1.200 × 1.100 × … 9.000 × ≤ 1.050 × MISS",
                "b 2.000 × 1.500 × … 9.000 ×",
            ]
        );
    }
}
