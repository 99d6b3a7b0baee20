//! `check` as text.

use super::{Cell, Row, Table, Tone, Widths};
use crate::{
    lifecycle::check::{Finding, Grade},
    view::Items,
};

/// A line a finding, its advice below it.
#[must_use]
pub fn page(findings: &Items<Finding>, colours: bool) -> String {
    let rows: Vec<Row> = findings.items.iter().map(row).collect();
    let table = Table { headings: vec!["", "", ""], status: 0, rows };
    let mut widths = Widths::default();
    table.grow(&mut widths);
    let lines = table.lines(&widths, colours);
    lines
        .lines()
        .zip(&findings.items)
        .flat_map(|(line, finding)| {
            let advice = finding.advice.as_ref().map(|advice| format!("       → {advice}\n"));
            [Some(format!("{line}\n")), advice].into_iter().flatten()
        })
        .collect()
}

fn row(finding: &Finding) -> Row {
    let status = match finding.status {
        Grade::Ok => Cell::toned("ok", Tone::Good),
        Grade::Warn => Cell::toned("warn", Tone::Warn),
        Grade::Fail => Cell::toned("fail", Tone::Bad),
    };
    let cells = vec![status, finding.name.as_str().into(), finding.found.as_str().into()];
    Row { key: finding.name.clone(), cells }
}
