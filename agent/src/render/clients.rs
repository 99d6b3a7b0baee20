//! `lb list --affinity` and `lb list --source-ranges` as text.

use super::{Cell, Row, Table};
use crate::lb::clients::{AffinityView, PortView, SourceRangeView};

/// One line a client. `wide` adds how long it is remembered.
#[must_use]
pub fn affinity(views: &[AffinityView], wide: bool) -> Table {
    let mut headings = vec!["SERVICE", "PORT", "PROTOCOL", "CLIENT", "BACKEND", "REMAINING"];
    if wide {
        headings.push("TIMEOUT");
    }
    let row = |view: &AffinityView| {
        let mut cells = port(&view.port);
        cells.extend([view.client.as_str().into(), view.backend.to_string().into()]);
        cells.push(format!("{}s", view.remaining_seconds).into());
        if wide {
            cells.push(format!("{}s", view.timeout_seconds).into());
        }
        Row { key: affinity_name(view), cells }
    };
    Table { headings, status: 5, rows: views.iter().map(row).collect() }
}

/// `client→service:port/protocol→backend` of each client.
#[must_use]
pub fn affinity_names(views: &[AffinityView]) -> String {
    views.iter().map(|view| affinity_name(view) + "\n").collect()
}

/// One line a network.
#[must_use]
pub fn source_ranges(views: &[SourceRangeView]) -> Table {
    let row = |view: &SourceRangeView| {
        let mut cells = port(&view.port);
        cells.push(view.network.to_string().into());
        Row { key: range_name(view), cells }
    };
    let headings = vec!["SERVICE", "PORT", "PROTOCOL", "CLIENTS"];
    Table { headings, status: 2, rows: views.iter().map(row).collect() }
}

/// `network→service:port/protocol` of each network.
#[must_use]
pub fn range_names(views: &[SourceRangeView]) -> String {
    views.iter().map(|view| range_name(view) + "\n").collect()
}

fn affinity_name(view: &AffinityView) -> String {
    format!("{}→{}→{}", view.client, port_name(&view.port), view.backend)
}

fn range_name(view: &SourceRangeView) -> String {
    format!("{}→{}", view.network, port_name(&view.port))
}

fn port(port: &PortView) -> Vec<Cell> {
    [&port.service, &port.port_name, &port.protocol].map(|text| known(text.as_deref()).into()).into()
}

fn port_name(port: &PortView) -> String {
    let [service, name, protocol] = [&port.service, &port.port_name, &port.protocol].map(|text| known(text.as_deref()));
    format!("{service}:{name}/{protocol}")
}

fn known(text: Option<&str>) -> &str {
    text.filter(|text| !text.is_empty()).unwrap_or("-")
}
