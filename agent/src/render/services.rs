//! `svc list` and `svc get` as text.

use std::fmt::Write as _;

use super::{Cell, Row, Table, Tone, endpoint};
use crate::view::{BackendView, FrontendView, Items, ServiceView};

/// One line a frontend; a Service without frontend has one line that says why.
#[must_use]
pub fn table(services: &Items<ServiceView>, wide: bool) -> Table {
    let mut headings = vec!["NAMESPACE", "NAME", "TYPE", "ADDRESS", "READY", "PROGRAMMED"];
    if wide {
        headings.extend(["PORT NAME", "BACKENDS"]);
    }
    let rows = services.items.iter().flat_map(|service| {
        let without = service.frontends.is_empty().then(|| frontendless(service, wide));
        without.into_iter().chain(service.frontends.iter().map(move |f| frontend(service, f, wide)))
    });
    Table { headings, status: 5, rows: rows.collect() }
}

/// `namespace/name` of each: what `svc get` takes.
#[must_use]
pub fn names(services: &Items<ServiceView>) -> String {
    services.items.iter().map(|s| format!("{}/{}\n", s.namespace, s.name)).collect()
}

/// Everything about one Service.
#[must_use]
pub fn details(service: &ServiceView) -> String {
    let labels: Vec<String> = service.labels.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let mut text = String::new();
    for (title, value) in [
        ("Name", service.name.as_str()),
        ("Namespace", &service.namespace),
        ("Type", &service.kind),
        ("Cluster IPs", &or_none(&service.cluster_ips)),
        ("Labels", &or_none(&labels)),
        ("No frontend", service.reason.as_deref().unwrap_or_default()),
    ] {
        if !value.is_empty() {
            let _ = writeln!(text, "{:<13}{value}", format!("{title}:"));
        }
    }
    for frontend in &service.frontends {
        let port_name = if frontend.port_name.is_empty() { "-" } else { &frontend.port_name };
        let _ = writeln!(text, "\n{} {}", frontend.kind, address(frontend));
        let _ = writeln!(text, "  Port name:   {port_name}");
        let _ = writeln!(text, "  Ready:       {}", ready(frontend));
        let _ = writeln!(text, "  Programmed:  {}", programmed(frontend).text);
        for line in backends(frontend).text().lines() {
            let _ = writeln!(text, "  {line}");
        }
    }
    text
}

fn frontend(service: &ServiceView, frontend: &FrontendView, wide: bool) -> Row {
    let address = address(frontend);
    let mut cells: Vec<Cell> = vec![
        service.namespace.as_str().into(),
        service.name.as_str().into(),
        frontend.kind.as_str().into(),
        address.as_str().into(),
        ready(frontend).into(),
        programmed(frontend),
    ];
    if wide {
        let selected = frontend.backends.iter().filter(|b| b.selected).map(|b| endpoint(&b.address, b.port));
        cells.push(or_dash(&frontend.port_name).into());
        cells.push(or_none(&selected.collect::<Vec<_>>()).into());
    }
    Row { key: format!("{}/{} {} {address}", service.namespace, service.name, frontend.kind), cells }
}

fn frontendless(service: &ServiceView, wide: bool) -> Row {
    let reason = service.reason.as_deref().unwrap_or("no port");
    let tone = if reason.starts_with("invalid") { Tone::Bad } else { Tone::Plain };
    let mut cells: Vec<Cell> = vec![
        service.namespace.as_str().into(),
        service.name.as_str().into(),
        service.kind.as_str().into(),
        "-".into(),
        "-".into(),
        Cell::toned(format!("-: {reason}"), tone),
    ];
    if wide {
        cells.extend(["-".into(), "-".into()]);
    }
    Row { key: format!("{}/{}", service.namespace, service.name), cells }
}

fn backends(frontend: &FrontendView) -> Table {
    let row = |b: &BackendView| {
        let target = endpoint(&b.address, b.port);
        let zone = b.zone.as_deref().map(|z| format!(" ({z})")).unwrap_or_default();
        let selected = if b.selected { Cell::toned("yes", Tone::Good) } else { "no".into() };
        let cells = vec![
            target.as_str().into(),
            format!("{}{zone}", b.node.as_deref().unwrap_or("-")).into(),
            yes_no(b.ready).into(),
            yes_no(b.serving).into(),
            yes_no(b.terminating).into(),
            selected,
        ];
        Row { key: target, cells }
    };
    Table {
        headings: vec!["BACKEND", "NODE", "READY", "SERVING", "TERMINATING", "SELECTED"],
        status: 5,
        rows: frontend.backends.iter().map(row).collect(),
    }
}

fn address(frontend: &FrontendView) -> String {
    format!("{}/{}", endpoint(&frontend.address, frontend.port), frontend.protocol)
}

fn ready(frontend: &FrontendView) -> String {
    format!("{}/{}", frontend.ready, frontend.total)
}

fn programmed(frontend: &FrontendView) -> Cell {
    match (frontend.programmed, &frontend.message) {
        (true, None) => Cell::toned("yes", Tone::Good),
        (true, Some(message)) => Cell::toned(format!("yes: {message}"), Tone::Warn),
        (false, Some(message)) => Cell::toned(format!("no: {message}"), Tone::Bad),
        (false, None) => Cell::toned("no", Tone::Bad),
    }
}

const fn yes_no(flag: bool) -> &'static str {
    if flag { "yes" } else { "no" }
}

fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

fn or_none(texts: &[String]) -> String {
    if texts.is_empty() { "-".to_owned() } else { texts.join(",") }
}
