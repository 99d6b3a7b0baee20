//! `status` as text.

use std::{collections::BTreeMap, fmt::Write as _};

use super::{Cell, Row, Table, Tone, Widths};
use crate::view::{FeatureView, MapView, StatusView};

/// The page of `sheave status`.
#[must_use]
pub fn page(status: &StatusView, colours: bool) -> String {
    let synced = if status.synced { "synced" } else { "waiting for the first complete list" };
    let health = match status.health.as_str() {
        "ok" => Cell::toned("ok", Tone::Good),
        "starting" => Cell::toned("starting", Tone::Warn),
        other => Cell::toned(other, Tone::Bad),
    };
    let summary: Vec<(&str, Cell)> = vec![
        ("Health:", health),
        ("Node:", status.node.as_str().into()),
        ("Version:", status.version.as_str().into()),
        ("Source:", format!("{} ({synced})", status.source).into()),
        ("Services:", status.services.to_string().into()),
        ("Frontends:", format!("{}/{} programmed", status.frontends_programmed, status.frontends).into()),
        ("Backends:", status.backends.to_string().into()),
    ];
    let rows = summary.into_iter().map(|(title, cell)| Row { key: title.to_owned(), cells: vec![title.into(), cell] });
    let summary = Table { headings: vec!["", ""], status: 1, rows: rows.collect() };
    let mut widths = Widths::default();
    summary.grow(&mut widths);
    let mut page = summary.lines(&widths, colours);

    let lists = [
        ("Problems", &status.problems),
        ("Problems of the source", &status.source_problems),
        ("Warnings", &status.warnings),
    ];
    for (title, sentences) in lists {
        if !sentences.is_empty() {
            let lines: String = sentences.iter().map(|s| format!("  - {s}\n")).collect();
            let _ = write!(page, "\n{title}:\n{lines}");
        }
    }
    let counts = [("COUNTER", &status.counters), ("REPAIRS", &status.repairs)];
    let [counters, repairs] = counts.map(|(heading, counts)| counters(heading, counts));
    for table in [maps(&status.maps), features(&status.features), counters, repairs] {
        if !table.rows.is_empty() {
            let _ = write!(page, "\n{}", table.page(colours));
        }
    }
    page
}

fn maps(maps: &[MapView]) -> Table {
    let row = |map: &MapView| {
        let percent = (map.used * 100).checked_div(map.capacity).unwrap_or_default();
        let tone = match percent {
            0..80 => Tone::Plain,
            80..100 => Tone::Warn,
            _ => Tone::Bad,
        };
        let cells = vec![
            map.name.as_str().into(),
            map.used.to_string().into(),
            map.capacity.to_string().into(),
            Cell::toned(format!("{percent}%"), tone),
            map.flag.as_str().into(),
        ];
        Row { key: map.name.clone(), cells }
    };
    Table { headings: vec!["MAP", "USED", "CAPACITY", "FULL", "FLAG"], status: 3, rows: maps.iter().map(row).collect() }
}

fn features(features: &[FeatureView]) -> Table {
    let row = |feature: &FeatureView| {
        let available = if feature.available { Cell::toned("yes", Tone::Good) } else { Cell::toned("no", Tone::Warn) };
        let consequence = if feature.available { "" } else { &feature.consequence };
        Row { key: feature.name.clone(), cells: vec![feature.name.as_str().into(), available, consequence.into()] }
    };
    Table { headings: vec!["FEATURE", "AVAILABLE", "CONSEQUENCE"], status: 1, rows: features.iter().map(row).collect() }
}

fn counters(heading: &'static str, counts: &BTreeMap<String, u64>) -> Table {
    let counters = counts.iter().filter(|(_, count)| **count > 0);
    let row = |(name, count): (&String, &u64)| Row {
        key: name.clone(),
        cells: vec![name.as_str().into(), count.to_string().into()],
    };
    Table { headings: vec![heading, "COUNT"], status: 1, rows: counters.map(row).collect() }
}
