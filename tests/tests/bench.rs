//! `cargo xtask bench` works. What it measures is for people: a test that asserts times fails on a busy day.

use anyhow::{Result, ensure};
use sheave_tests::bench::{self, Effort, Part};

#[test]
fn every_part_measures_something() -> Result<()> {
    for (part, rows) in [(Part::Traffic, 22), (Part::Fill, 8), (Part::Change, 24), (Part::Packets, 20)] {
        let Some(report) = bench::run(&[part], &Effort::QUICK)? else { return Ok(()) };
        ensure!(report.rows.len() == rows, "{part:?} has {} rows:\n{report}", report.rows.len());
        let odd = report.rows.iter().find(|row| !(row.spread.low > 0.0 && row.spread.high.is_finite()));
        ensure!(odd.is_none(), "{odd:?}");
    }
    Ok(())
}
