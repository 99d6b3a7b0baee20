//! `lb list` as text.

use std::collections::HashMap;

use super::{Cell, Row, Table, Tone, endpoint};
use crate::view::{Items, LbBackendView, LbView};

/// Which lines `lb list` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lines {
    /// One a frontend and backend.
    Pairs,
    /// One a frontend.
    Frontends,
    /// One a backend.
    Backends,
}

/// The kernel's tables. `wide` adds kind, algorithm and affinity.
#[must_use]
pub fn table(items: &Items<LbView>, lines: Lines, wide: bool) -> Table {
    match lines {
        Lines::Pairs => pairs(&items.items, wide),
        Lines::Frontends => frontends(&items.items, wide),
        Lines::Backends => backends(&items.items, wide),
    }
}

/// `address:port/protocol` of each frontend, once.
#[must_use]
pub fn names(items: &Items<LbView>) -> String {
    let mut names: Vec<String> = items.items.iter().map(name).collect();
    names.dedup();
    names.iter().map(|name| format!("{name}\n")).collect()
}

fn pairs(views: &[LbView], wide: bool) -> Table {
    let mut headings = vec!["FRONTEND", "SCOPE", "SERVICE", "VERDICT", "BACKEND", "WEIGHT", "CONNECTIONS"];
    if wide {
        headings.extend(WIDE);
    }
    let row = |view: &LbView, backend: Option<&LbBackendView>| {
        let [target, weight, connections] = backend.map_or(["-".into(), "-".into(), "-".into()], |b| {
            [endpoint(&b.address, b.port), b.weight.to_string(), b.connections.to_string()]
        });
        let key = format!("{} {} {target}", name(view), view.scope);
        let mut cells = start(view);
        cells.extend([target.into(), weight.into(), connections.into()]);
        if wide {
            cells.extend(more(view));
        }
        Row { key, cells }
    };
    let rows = views.iter().flat_map(|view| {
        let none = view.backends.is_empty().then(|| row(view, None));
        none.into_iter().chain(view.backends.iter().map(move |b| row(view, Some(b))))
    });
    Table { headings, status: 3, rows: rows.collect() }
}

fn frontends(views: &[LbView], wide: bool) -> Table {
    let mut headings = vec!["FRONTEND", "SCOPE", "SERVICE", "VERDICT", "BACKENDS"];
    if wide {
        headings.extend(WIDE);
    }
    let row = |view: &LbView| {
        let mut cells = start(view);
        cells.push(view.backends.len().to_string().into());
        if wide {
            cells.extend(more(view));
        }
        Row { key: format!("{} {}", name(view), view.scope), cells }
    };
    Table { headings, status: 3, rows: views.iter().map(row).collect() }
}

/// A backend belongs to one port of one Service; several frontends of that port share it and its count.
fn backends(views: &[LbView], wide: bool) -> Table {
    let mut headings = vec!["BACKEND", "SERVICE", "CONNECTIONS", "FRONTENDS"];
    if wide {
        headings.extend(&WIDE[1..]);
    }
    let mut places: HashMap<String, usize> = HashMap::new();
    let mut found: Vec<(String, &LbView, &LbBackendView, Vec<String>)> = Vec::new();
    for view in views {
        for backend in &view.backends {
            let target = format!("{}/{}", endpoint(&backend.address, backend.port), view.protocol);
            let key = format!("{} {} {target}", service(view), view.port_name.as_deref().unwrap_or_default());
            let place = *places.entry(key).or_insert_with_key(|key| {
                found.push((key.clone(), view, backend, Vec::new()));
                found.len() - 1
            });
            found[place].3.push(name(view));
        }
    }
    let row = |(key, view, backend, mut names): (String, &LbView, &LbBackendView, Vec<String>)| {
        names.dedup(); // two scopes of one frontend
        let target = format!("{}/{}", endpoint(&backend.address, backend.port), view.protocol);
        let connections = backend.connections.to_string();
        let mut cells: Vec<Cell> =
            vec![target.into(), service(view).into(), connections.into(), names.len().to_string().into()];
        if wide {
            cells.extend(more(view).into_iter().skip(1));
        }
        Row { key, cells }
    };
    Table { headings, status: 1, rows: found.into_iter().map(row).collect() }
}

const WIDE: [&str; 3] = ["KIND", "ALGORITHM", "AFFINITY"];

fn start(view: &LbView) -> Vec<Cell> {
    let tone = if view.verdict == "forward" { Tone::Good } else { Tone::Warn };
    vec![name(view).into(), view.scope.as_str().into(), service(view).into(), Cell::toned(view.verdict.as_str(), tone)]
}

fn more(view: &LbView) -> [Cell; 3] {
    let affinity = if view.affinity_seconds == 0 { "-".to_owned() } else { format!("{}s", view.affinity_seconds) };
    [view.kind.as_str().into(), view.algorithm.as_str().into(), affinity.into()]
}

fn name(view: &LbView) -> String {
    if view.port == 0 {
        // The entry that stands for every port without a Service.
        return format!("{}/{}", endpoint(&view.address, "*"), view.protocol);
    }
    format!("{}/{}", endpoint(&view.address, view.port), view.protocol)
}

fn service(view: &LbView) -> &str {
    view.service.as_deref().unwrap_or("-")
}
