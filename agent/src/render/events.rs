//! `sheave monitor` as text.

use sheave_ebpf::counter::Counter;

use super::{Cell, Row, Table, Tone};
use crate::monitor::EventView;

/// One line a record. `wide` adds what the reason means.
#[must_use]
pub fn table(events: &[EventView], wide: bool) -> Table {
    let mut headings = vec!["TIME", "VERDICT", "PROTOCOL", "CLIENT", "FRONTEND", "BACKEND", "SERVICE", "REASON"];
    if wide {
        headings.push("MEANING");
    }
    Table { headings, status: 1, rows: events.iter().map(|event| row(event, wide)).collect() }
}

fn row(event: &EventView, wide: bool) -> Row {
    let tone = match event.verdict.as_str() {
        "forward" => Tone::Good,
        "reject" | "drop" => Tone::Bad,
        _ => Tone::Warn,
    };
    let mut cells = vec![
        time_of_day(&event.time).into(),
        Cell::toned(&event.verdict, tone),
        event.protocol.as_str().into(),
        client(event).into(),
        event.frontend.to_string().into(),
        event.backend.map_or_else(|| "-".into(), |addr| addr.to_string().into()),
        event.service.as_deref().unwrap_or("-").into(),
        event.reason.as_str().into(),
    ];
    if wide {
        let known = Counter::ALL.iter().find(|counter| counter.name() == event.reason);
        cells.push(known.map_or("", |counter| counter.meaning().trim()).into());
    }
    Row { key: String::new(), cells } // a stream has no line twice
}

/// A packet's source, or the process at a socket.
fn client(event: &EventView) -> String {
    match (&event.client, &event.process, event.pid) {
        (Some(addr), ..) => addr.to_string(),
        (None, Some(process), Some(pid)) => format!("{process}[{pid}]"),
        (None, Some(process), None) => process.clone(),
        (None, None, _) => "-".to_owned(),
    }
}

/// Hours to milliseconds of an RFC 3339 time: who watches knows the day.
fn time_of_day(time: &str) -> &str {
    let clock = time.split_once('T').map_or(time, |(_, clock)| clock);
    clock.get(..12).unwrap_or(clock)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_who_dialled_what_and_what_became_of_it() {
        let event = EventView {
            time: "2026-01-02T03:04:05.678901Z".into(),
            verdict: "drop".into(),
            reason: "packet_drop".into(),
            path: "packet".into(),
            protocol: "TCP".into(),
            client: Some("198.51.100.10:40000".parse().unwrap()),
            process: None,
            pid: None,
            frontend: "192.0.2.11:30080".parse().unwrap(),
            backend: None,
            service: Some("shop/web".into()),
        };
        let dialled = EventView {
            verdict: "forward".into(),
            reason: "socket_connect".into(),
            client: None,
            process: Some("cu\x1brl".into()),
            pid: Some(7),
            backend: Some("[2001:db8::1]:8080".parse().unwrap()),
            ..event.clone()
        };
        assert_eq!(
            table(&[event, dialled], true).text(),
            "\
TIME           VERDICT   PROTOCOL   CLIENT                FRONTEND           BACKEND              SERVICE    REASON           MEANING
03:04:05.678   drop      TCP        198.51.100.10:40000   192.0.2.11:30080   -                    shop/web   packet_drop      A packet met a Local policy without a local endpoint: dropped.
03:04:05.678   forward   TCP        cu\u{fffd}rl[7]              192.0.2.11:30080   [2001:db8::1]:8080   shop/web   socket_connect   A connect was sent to a backend.
"
        );
    }
}
