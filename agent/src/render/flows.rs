//! `lb list --conntrack` as text.

use super::{Cell, Row, Table, Tone};
use crate::conntrack::FlowView;

/// One line a flow. `wide` adds its age.
#[must_use]
pub fn table(flows: &[FlowView], wide: bool) -> Table {
    let mut headings = vec!["PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "SEEN AS", "SERVICE", "STATE", "IDLE"];
    if wide {
        headings.push("AGE");
    }
    let row = |flow: &FlowView| {
        let tone = if flow.state == "open" { Tone::Good } else { Tone::Plain };
        let mut cells = vec![
            flow.protocol.as_str().into(),
            flow.client.to_string().into(),
            flow.frontend.to_string().into(),
            flow.backend.to_string().into(),
            flow.masqueraded_as.map_or_else(|| "-".into(), |addr| addr.to_string().into()),
            flow.service.as_deref().unwrap_or("-").into(),
            Cell::toned(&flow.state, tone),
            format!("{}s", flow.idle).into(),
        ];
        if wide {
            cells.push(format!("{}s", flow.age).into());
        }
        Row { key: name(flow), cells }
    };
    Table { headings, status: 6, rows: flows.iter().map(row).collect() }
}

/// `client→frontend/protocol` of each flow.
#[must_use]
pub fn names(flows: &[FlowView]) -> String {
    flows.iter().map(|flow| name(flow) + "\n").collect()
}

fn name(flow: &FlowView) -> String {
    format!("{}→{}/{}", flow.client, flow.frontend, flow.protocol)
}
