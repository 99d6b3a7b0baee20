//! What is wanted, and what of it is written (SY-1 to SY-6).

use std::{collections::BTreeMap, env, fs, path::PathBuf, process, time::Duration};

use super::{ConntrackSysctls, Wanted};

const HOUR: u64 = 3600;

fn nothing() -> ConntrackSysctls {
    ConntrackSysctls {
        folder: PathBuf::new(),
        max_per_core: 0,
        min: 0,
        tcp_established: Duration::ZERO,
        tcp_close_wait: Duration::ZERO,
        tcp_be_liberal: false,
        udp: Duration::ZERO,
        udp_stream: Duration::ZERO,
    }
}

#[test]
fn the_table_follows_from_the_processors() {
    for (row, max_per_core, min, cores, expected) in [
        ("SY-1, SY-4", 0, 123_456, 4, 0),
        ("SY-2", 67_890, 1, 4, 271_560),
        ("SY-3", 1, 123_456, 4, 123_456),
        ("SY-5", 32_768, 0, 512, 1_048_576),
        ("SY-5, at its edge", 32_768, 0, 32, 1_048_576),
        ("SY-3, beyond the cap", 1, 2_000_000, 4, 2_000_000),
        ("the product overflows", u32::MAX, 0, 4, 1_048_576),
        ("default, two processors", 32_768, 131_072, 2, 131_072),
    ] {
        let wanted = ConntrackSysctls { max_per_core, min, ..nothing() }.wanted(cores);
        let sizes = [("nf_conntrack_max", expected), ("nf_conntrack_buckets", expected / 4)];
        let sizes = sizes.map(|(name, size)| (name, Wanted::AtLeast(size)));
        assert_eq!(wanted, if expected == 0 { Vec::new() } else { sizes.to_vec() }, "{row}");
    }
}

/// Names without `nf_conntrack_`.
fn shown(values: &BTreeMap<&str, &str>) -> String {
    values.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_differs_is_written_and_what_fails_is_named() {
    let hours = |hours| Duration::from_secs(hours * HOUR);
    let default = ConntrackSysctls {
        max_per_core: 32_768,
        min: 131_072,
        tcp_established: hours(24),
        tcp_close_wait: hours(1),
        ..nothing()
    };
    let all = ConntrackSysctls { tcp_be_liberal: true, udp: hours(1), udp_stream: hours(2), ..default.clone() };
    let kernels = "buckets=16384 max=65536 tcp_be_liberal=0 tcp_timeout_close_wait=60 tcp_timeout_established=432000 \
                   udp_timeout=30 udp_timeout_stream=120";
    for (row, settings, before, after, failed) in [
        (
            "SY-6, defaults",
            &default,
            kernels,
            "buckets=32768 max=131072 tcp_be_liberal=0 tcp_timeout_close_wait=3600 tcp_timeout_established=86400 \
             udp_timeout=30 udp_timeout_stream=120",
            "",
        ),
        (
            "SY-6, all of them",
            &all,
            kernels,
            "buckets=32768 max=131072 tcp_be_liberal=1 tcp_timeout_close_wait=3600 tcp_timeout_established=86400 \
             udp_timeout=3600 udp_timeout_stream=7200",
            "",
        ),
        ("SY-4, SY-6, zeros", &nothing(), kernels, kernels, ""),
        (
            "a larger table stays",
            &default,
            "buckets=65536 max=262144 tcp_timeout_close_wait=60 tcp_timeout_established=60",
            "buckets=65536 max=262144 tcp_timeout_close_wait=3600 tcp_timeout_established=86400",
            "",
        ),
        (
            "what is missing does not keep the rest from being set",
            &default,
            "buckets=1 max=1 tcp_timeout_established=1",
            "buckets=32768 max=131072 tcp_timeout_established=86400",
            " nf_conntrack_tcp_timeout_close_wait: No such file or directory (os error 2)",
        ),
    ] {
        let folder = env::temp_dir().join(format!("sheave-sysctls-{}", process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = |name: &str| folder.join(format!("nf_conntrack_{name}"));
        let names: Vec<(&str, &str)> = before.split(' ').filter_map(|word| word.split_once('=')).collect();
        for (name, value) in &names {
            fs::write(file(name), format!("{value}\n")).unwrap();
        }
        let said = ConntrackSysctls { folder: folder.clone(), ..settings.clone() }.apply(2);
        let found: BTreeMap<&str, String> =
            names.iter().map(|(name, _)| (*name, fs::read_to_string(file(name)).unwrap())).collect();
        fs::remove_dir_all(&folder).unwrap();
        let found = found.iter().map(|(name, value)| (*name, value.trim())).collect();
        assert_eq!((shown(&found).as_str(), said.1.as_str()), (after, failed), "{row}");
        assert_eq!(said.0.is_empty(), before == after, "{row}: {said:?}");
    }
}
