//! The names of metrics and how their numbers come about; kube-proxy's where there are such.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    time::Duration,
};

use sheave_ebpf::{
    counter::Counter,
    names::{ServiceName, pad},
};

use super::{Connections, Meter, Metrics, NoLocal, Pass, Snapshot, Triggers};
use crate::{
    model::{Family, Noted, Protocol, SliceChange, State, Update},
    plan::group::GroupKey,
    source::convert::fixtures::{service_name, slice_name, slice_of},
    view::{FeatureView, MapView, StatusView},
};

const SECOND: i128 = 1_000_000_000;

/// A slice `ns/NAME` of the Service of that name was written, with that annotation; its port is another each time.
fn put(name: &str, time: Option<i128>, port: u16) -> Update {
    let mut slice =
        slice_of(&format!("ns/{name}"), name).ports(&format!("{port}/TCP")).endpoints("10.0.0", ".1 R").build();
    slice.trigger_time = time;
    Update::Slice(Box::new(slice))
}

fn gone(name: &str) -> Update {
    Update::SliceGone(slice_name(&format!("ns/{name}")))
}

#[test]
fn trigger_times_of_changes_are_reported_once_they_are_programmed() {
    let start = 1_000 * SECOND;
    // t-1 is before the tracker's start; t0, t1 … after it.
    let t = |n: i128| Some(start + if n < 0 { n } else { n + 1 } * SECOND);
    type Times = &'static [(&'static str, &'static [i128])];
    let cases: Vec<(&str, Vec<Update>, Times)> = vec![
        ("TT-1", vec![put("ep1", t(0), 1)], &[("ep1", &[0])]),
        ("TT-2", vec![put("ep1", t(0), 1), put("ep1", t(1), 2)], &[("ep1", &[0, 1])]),
        (
            "TT-3",
            vec![put("ep1", t(1), 1), put("ep2", t(2), 1), put("ep1", t(3), 2)],
            &[("ep1", &[1, 3]), ("ep2", &[2])],
        ),
        ("TT-4", vec![put("ep1", None, 1)], &[]),
        ("TT-5", vec![put("ep1", t(-1), 1)], &[]),
        ("TT-6", vec![put("ep1", t(1), 1), gone("ep1")], &[]),
        ("TT-7", vec![put("ep1", t(1), 1), gone("ep1"), put("ep1", t(2), 1)], &[("ep1", &[2])]),
        ("TT-8", vec![gone("ep1")], &[]),
        ("an annotation alone is no change", vec![put("ep1", t(1), 1), put("ep1", t(2), 1)], &[("ep1", &[1])]),
    ];
    for (row, updates, expected) in cases {
        let (mut state, mut triggers) = (State::default(), Triggers::new(start));
        for update in updates {
            for change in &state.apply(update).noted.slices {
                triggers.record(change);
            }
        }
        let expected: BTreeMap<_, Vec<_>> = expected
            .iter()
            .map(|(name, times)| {
                let times = times.iter().map(|n| (Family::V4, start + (n + 1) * SECOND)).collect();
                (service_name(&format!("ns/{name}")), times)
            })
            .collect();
        assert_eq!(triggers.take(), expected, "{row}");
        assert_eq!(triggers.take(), BTreeMap::new(), "{row}: reported twice");
    }
}

/// `# TYPE` lines: name and type.
fn types(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).collect()
}

/// The value of exactly that series.
fn value(text: &str, series: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

/// A page on which every metric has been observed; those that have not been are absent, as with kube-proxy.
pub(crate) fn full_page() -> String {
    let metrics = Metrics::default();
    let mut meter = Meter::new(metrics.clone());
    let slices = Family::ALL.map(|family| SliceChange {
        service: service_name("ns/a"),
        family,
        removed: false,
        trigger_time: Some(i128::MAX),
    });
    meter.noted(&Noted { services: 1, slices: slices.into() });
    meter.requested();
    meter.passed(Pass::Full, Duration::ZERO, true);
    meter.passed(Pass::Partial, Duration::ZERO, true);
    metrics.answered_healthz(200);
    metrics.answered_livez(200);
    metrics.requested("GET".to_owned(), "192.0.2.1:6443".to_owned(), Some(200), Duration::ZERO);
    metrics.collected_flows(0, [0, 0], Duration::ZERO);
    let text = |text| pad(text).expect("short");
    let (namespace, name, port_name) = (text("ns"), text("a"), text("http"));
    let name = ServiceName { namespace, name, port_name, proto: 6, family: 4, zero: [0; 6] };
    metrics.live_flows(1, [(&name, 1)].into_iter(), 1);
    let group = GroupKey {
        service: service_name("ns/a"),
        port_name: "http".into(),
        protocol: Protocol::Tcp,
        family: Family::V4,
    };
    let feature = FeatureView { name: "set-retval".into(), available: true, consequence: String::new() };
    let snapshot = Snapshot {
        status: StatusView {
            maps: vec![MapView { name: "BACKENDS".into(), used: 3, capacity: 4, flag: "--max-backends".into() }],
            features: vec![feature],
            counters: BTreeMap::from([("socket_connect".to_owned(), 1)]),
            repairs: BTreeMap::from([("pin".to_owned(), 1)]),
            ..StatusView::default()
        },
        no_local: Family::ALL.map(|family| (family, NoLocal::default())).into(),
        connections: Connections::of([(group, ([10, 0, 0, 1], 80).into(), 1)].into_iter(), 1),
        ..Snapshot::default()
    };
    metrics.text(Some(snapshot))
}

/// Names of metrics in an expression or in what surrounds it: words that begin like ours do.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| ["sheave_", "kubeproxy_", "process_"].iter().any(|ours| word.starts_with(ours))).collect()
}

#[test]
fn the_chart_asks_for_metrics_that_exist() {
    let page = full_page();
    let series = page.lines().filter(|line| !line.starts_with('#'));
    let names: BTreeSet<&str> = series.filter_map(|line| line.split(['{', ' ']).next()).collect();
    for file in ["rules/sheave.yaml", "dashboards/sheave.json"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm").join(file);
        let text = fs::read_to_string(path).unwrap();
        let asked = metrics_in(&text);
        assert!(asked.len() > 3, "{file}: {asked:?}");
        for name in asked {
            assert!(names.contains(name), "{file}: there is no {name}");
        }
        let text = text.replace('\\', ""); // JSON's, before quotes
        let events = text.split("{event=").skip(1).filter_map(|rest| rest.split('"').nth(1));
        for event in events.flat_map(|events| events.split('|')) {
            assert!(Counter::ALL.iter().any(|counter| counter.name() == event), "{file}: there is no event {event}");
        }
    }
}

#[test]
fn names_and_types_are_those_of_kube_proxy() {
    let unobserved = Metrics::default().text(Some(Snapshot::default()));
    for name in ["proxy_healthz_total", "proxy_livez_total", "network_programming_duration_seconds"] {
        assert!(!unobserved.contains(name), "{name} is there before its first observation");
    }
    let text = full_page();
    let types = types(&text);
    for (name, kind) in [
        ("sync_proxy_rules_duration_seconds", "histogram"),
        ("sync_full_proxy_rules_duration_seconds", "histogram"),
        ("sync_partial_proxy_rules_duration_seconds", "histogram"),
        ("sync_proxy_rules_last_timestamp_seconds", "gauge"),
        ("sync_proxy_rules_last_queued_timestamp_seconds", "gauge"),
        ("network_programming_duration_seconds", "histogram"),
        ("sync_proxy_rules_endpoint_changes_pending", "gauge"),
        ("sync_proxy_rules_endpoint_changes_total", "counter"),
        ("sync_proxy_rules_service_changes_pending", "gauge"),
        ("sync_proxy_rules_service_changes_total", "counter"),
        ("sync_proxy_rules_no_local_endpoints_total", "gauge"),
        ("proxy_healthz_total", "counter"),
        ("proxy_livez_total", "counter"),
    ] {
        assert_eq!(types.get(format!("kubeproxy_{name}").as_str()), Some(&kind), "{name}");
    }
    assert!(text.contains("\nkubernetes_build_info{"), "{text}");
}

#[test]
fn a_pass_is_counted_for_both_families() {
    let metrics = Metrics::default();
    let mut meter = Meter::new(metrics.clone());
    let future = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as i128 + SECOND;
    let change = |family, trigger_time| SliceChange {
        service: service_name("ns/a"),
        family,
        removed: false,
        trigger_time: Some(trigger_time),
    };
    let slices = vec![change(Family::V4, future), change(Family::V4, future), change(Family::V6, 5)];
    meter.noted(&Noted { services: 2, slices });
    let pending = metrics.text(None);
    meter.requested();
    meter.passed(Pass::Partial, Duration::from_millis(3), false);
    let failed = metrics.text(None);
    meter.passed(Pass::Full, Duration::from_millis(3), true);
    let passed = metrics.text(None);

    for (series, expected) in [
        ("endpoint_changes_total", [Some(3.0), Some(3.0), Some(3.0)]),
        ("endpoint_changes_pending", [Some(3.0), Some(0.0), Some(0.0)]),
        ("service_changes_total", [Some(2.0), Some(2.0), Some(2.0)]),
        ("service_changes_pending", [Some(2.0), Some(0.0), Some(0.0)]),
    ] {
        let series = format!("kubeproxy_sync_proxy_rules_{series}");
        assert_eq!([&pending, &failed, &passed].map(|text| value(text, &series)), expected, "{series}");
    }
    for (series, expected) in [
        ("sync_proxy_rules_duration_seconds_count", [None, Some(1.0), Some(2.0)]),
        ("sync_partial_proxy_rules_duration_seconds_count", [None, Some(1.0), Some(1.0)]),
        ("sync_full_proxy_rules_duration_seconds_count", [None, None, Some(1.0)]),
    ] {
        for family in ["IPv4", "IPv6"] {
            let series = format!(r#"kubeproxy_{series}{{ip_family="{family}"}}"#);
            assert_eq!([&pending, &failed, &passed].map(|text| value(text, &series)), expected, "{series}");
        }
    }
    let programming =
        |family| format!(r#"kubeproxy_network_programming_duration_seconds_count{{ip_family="{family}"}}"#);
    assert_eq!(value(&failed, &programming("IPv4")), None, "nothing is programmed by a pass that failed");
    assert_eq!(value(&passed, &programming("IPv4")), Some(2.0));
    assert_eq!(value(&passed, &programming("IPv6")), None, "what is older than the agent is not its to answer for");
}

#[test]
fn buckets_are_those_of_kube_proxy() {
    let metrics = Metrics::default();
    metrics.programming.get_or_create(&super::ip_family(Family::V4)).observe(1.0);
    metrics.sync.get_or_create(&super::ip_family(Family::V4)).observe(1.0);
    let text = metrics.text(None);
    let bounds = |name: &str| -> Vec<f64> {
        let lines = text.lines().filter(|line| line.starts_with(&format!("kubeproxy_{name}_bucket")));
        lines.filter_map(|line| line.split("le=\"").nth(1)?.split('"').next()?.parse().ok()).collect()
    };
    let programming = bounds("network_programming_duration_seconds");
    assert_eq!((programming.len(), &programming[..4]), (2 + 59 + 12 + 7 + 1, &[0.25, 0.5, 1.0, 2.0][..]));
    assert_eq!(
        programming[60..],
        [
            59.0,
            60.0,
            65.0,
            70.0,
            75.0,
            80.0,
            85.0,
            90.0,
            95.0,
            100.0,
            105.0,
            110.0,
            115.0,
            120.0,
            150.0,
            180.0,
            210.0,
            240.0,
            270.0,
            300.0,
            f64::INFINITY
        ]
    );
    let sync = bounds("sync_proxy_rules_duration_seconds");
    assert_eq!((sync.len(), sync[0], sync[14]), (16, 0.001, 16.384));
}

#[test]
fn only_the_busiest_have_a_series_of_their_own() {
    let group = |name: &str| GroupKey {
        service: service_name(&format!("ns/{name}")),
        port_name: "http".into(),
        protocol: Protocol::Tcp,
        family: Family::V4,
    };
    let found = [("a", 1, 0), ("b", 1, 7), ("c", 1, 2), ("c", 2, 6), ("d", 1, 1)];
    let found = found.map(|(name, port, count)| (group(name), ([10, 0, 0, 1], port).into(), count));
    let connections = Connections::of(found.into_iter(), 2);
    assert_eq!(connections.total, 16);
    assert_eq!(connections.services, [(group("c"), 8), (group("b"), 7)]);
    let backends: Vec<_> = connections.backends.iter().map(|((_, address), n)| (address.port(), *n)).collect();
    assert_eq!(backends, [(1, 7), (2, 6)]);

    let map = MapView { name: "BACKENDS".into(), used: 3, capacity: 4, flag: "--max-backends".into() };
    let status = StatusView { maps: vec![map], ..StatusView::default() };
    let text = Metrics::default().text(Some(Snapshot { status, connections, ..Snapshot::default() }));
    for (series, expected) in [
        (r#"sheave_service_connections{namespace="ns",service="c",port="http",protocol="TCP"}"#, 8.0),
        (
            r#"sheave_backend_connections{namespace="ns",service="b",port="http",protocol="TCP",backend="10.0.0.1:1"}"#,
            7.0,
        ),
        ("sheave_connections", 16.0),
        (r#"sheave_map_pressure{map="BACKENDS"}"#, 0.75),
    ] {
        assert_eq!(value(&text, series), Some(expected), "{series}\n{text}");
    }
}

#[test]
fn the_process_is_measured() {
    let text = Metrics::default().text(None);
    for series in ["process_resident_memory_bytes", "process_open_fds"] {
        assert!(value(&text, series).is_some_and(|value| value > 0.0), "{series}\n{text}");
    }
    assert!(value(&text, "process_cpu_seconds_total").is_some(), "{text}");
}
