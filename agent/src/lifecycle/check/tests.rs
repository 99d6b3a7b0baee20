//! Facts in, findings out.

use std::path::Path;

use super::{Finding, Grade, Plan, features, judge};
use crate::{
    datapath::programs::probe::{Bpf, Capabilities, Facts, parse_mounts},
    view::FeatureView,
};

const UNIFIED: &str = "\
35 24 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
36 24 0:31 / /sys/fs/bpf rw - bpf bpf rw";

const NET_CLS: &str = "33 31 0:30 / /sys/fs/cgroup/net_cls rw - cgroup cgroup rw,net_cls";

/// A host without fault.
fn good() -> Facts {
    Facts {
        release: "6.12.0".to_owned(),
        mounts: parse_mounts(UNIFIED),
        capabilities: Some(Capabilities(u64::MAX)),
        memlock_unlimited: false,
        btf: true,
        bpf: Bpf { sock_addr: Ok(true), cgroup_sock: Ok(true), socket_storage: Ok(true), netns_cookie: Ok(true) },
        socket_closing: Ok(()),
        cgroup_inode: Some(1),
        jit: Some(1),
        forward_v4: true,
        forward_v6: Some(true),
        local_ports: (32_768, 60_999),
        reserved_ports: String::new(),
    }
}

fn findings(facts: &Facts, cgroup_root: Option<&str>) -> Vec<Finding> {
    judge_ports(facts, cgroup_root, (10_000, 29_999))
}

fn judge_ports(facts: &Facts, cgroup_root: Option<&str>, snat_ports: (u16, u16)) -> Vec<Finding> {
    let cgroup_root = cgroup_root.map(Path::new);
    judge(facts, Plan { bpffs: Path::new("/sys/fs/bpf"), cgroup_root, snat_ports: Some(snat_ports) })
}

#[test]
fn a_good_host_needs_no_advice() {
    for finding in findings(&good(), None) {
        assert_eq!((finding.status, &finding.advice), (Grade::Ok, &None), "{finding:?}");
    }
}

/// Changes a good host.
type Change = fn(&mut Facts);

/// Name of a case, grade and name of what is found, a word of the advice, and what spoils the host.
type Fault = (&'static str, Grade, &'static str, &'static str, Change);

#[test]
fn each_fault_is_found_once_graded_and_answered_with_advice() {
    fn all_but(missing: &[u32]) -> Option<Capabilities> {
        Some(Capabilities(missing.iter().fold(u64::MAX, |all, bit| all & !(1 << bit))))
    }
    fn without(facts: &mut Facts, kind: &str) {
        facts.mounts.retain(|m| m.kind != kind);
    }
    let cases: &[Fault] = &[
        ("old kernel", Grade::Fail, "kernel", "5.10 or newer", |f| f.release = "4.19.0".to_owned()),
        ("no CAP_SYS_ADMIN", Grade::Warn, "privileges", "grant CAP_SYS_ADMIN", |f| {
            f.capabilities = all_but(&[Capabilities::SYS_ADMIN]);
        }),
        ("no CAP_PERFMON", Grade::Fail, "privileges", "grant CAP_PERFMON to", |f| {
            f.capabilities = all_but(&[Capabilities::SYS_ADMIN, Capabilities::PERFMON]);
        }),
        ("no CAP_BPF", Grade::Fail, "privileges", "grant CAP_BPF to", |f| {
            f.capabilities = all_but(&[Capabilities::SYS_ADMIN, Capabilities::BPF]);
        }),
        ("no CAP_NET_ADMIN", Grade::Fail, "privileges", "grant CAP_NET_ADMIN to", |f| {
            f.capabilities = all_but(&[Capabilities::NET_ADMIN]);
        }),
        ("none of them", Grade::Fail, "privileges", "grant CAP_BPF, CAP_PERFMON, CAP_NET_ADMIN to", |f| {
            f.capabilities = Some(Capabilities(0));
        }),
        ("bpf(2) forbidden", Grade::Fail, "eBPF", "seccomp", |f| f.bpf.sock_addr = Err("EPERM".to_owned())),
        ("no cgroup programs", Grade::Fail, "eBPF", "CONFIG_CGROUP_BPF", |f| f.bpf.cgroup_sock = Ok(false)),
        ("pure cgroup v1", Grade::Fail, "cgroup v2", "mount -t cgroup2", |f| without(f, "cgroup2")),
        ("a container's cgroup namespace", Grade::Warn, "cgroup v2", "only processes below", |f| {
            f.cgroup_inode = Some(4242);
        }),
        ("a read-only bpffs", Grade::Fail, "BPF filesystem", "remount,rw /sys/fs/bpf", |f| {
            f.mounts.iter_mut().filter(|m| m.kind == "bpf").for_each(|m| m.read_only = true);
        }),
        ("no bpffs", Grade::Fail, "BPF filesystem", "mount -t bpf bpf /sys/fs/bpf", |f| without(f, "bpf")),
        ("limited memory on 5.10", Grade::Fail, "locked memory", "CAP_SYS_RESOURCE", |f| {
            f.release = "5.10.0".to_owned();
            f.capabilities = Some(Capabilities(!(1 << Capabilities::SYS_RESOURCE)));
        }),
        ("case 43: net_cls before 5.15", Grade::Warn, "cgroup v1", "cgroup_no_v1", |f| {
            f.release = "5.14.0".to_owned();
            f.mounts.extend(parse_mounts(NET_CLS));
        }),
        ("no BTF", Grade::Warn, "BTF", "CONFIG_DEBUG_INFO_BTF", |f| f.btf = false),
        ("interpreter", Grade::Warn, "JIT", "bpf_jit_enable", |f| f.jit = Some(0)),
        ("no SOCK_DESTROY", Grade::Warn, "socket closing", "INET_DIAG_DESTROY", |f| {
            f.socket_closing = Err("Operation not supported".to_owned());
        }),
        ("no forwarding", Grade::Warn, "forwarding", "ip_forward", |f| f.forward_v4 = false),
        ("no IPv6 forwarding", Grade::Warn, "forwarding", "ipv6", |f| f.forward_v6 = Some(false)),
        ("ephemeral NodePorts", Grade::Warn, "NodePorts", "ports=30000-32767", |f| f.local_ports = (30_000, 65_535)),
        ("another port is reserved", Grade::Warn, "NodePorts", "ports=8080,30000-32767", |f| {
            f.local_ports = (30_000, 65_535);
            f.reserved_ports = "8080".to_owned();
        }),
        ("half of the NodePorts are reserved", Grade::Warn, "NodePorts", "overlap", |f| {
            f.local_ports = (30_000, 65_535);
            f.reserved_ports = "30000-31000,31002-32767".to_owned();
        }),
        ("ephemeral masquerade ports", Grade::Warn, "masquerade ports", "--snat-ports", |f| {
            f.local_ports = (20_000, 29_999);
        }),
        ("partly reserved masquerade ports", Grade::Warn, "masquerade ports", "ip_local_reserved_ports", |f| {
            f.local_ports = (20_000, 29_999);
            f.reserved_ports = "20000-29000,29002-29999".to_owned();
        }),
    ];
    for (case, grade, name, advice, change) in cases {
        let mut facts = good();
        change(&mut facts);
        let found: Vec<Finding> = findings(&facts, None).into_iter().filter(|f| f.status != Grade::Ok).collect();
        assert_eq!(found.len(), 1, "{case}: {found:?}");
        assert_eq!((found[0].name.as_str(), found[0].status), (*name, *grade), "{case}");
        assert!(found[0].advice.as_ref().unwrap().contains(advice), "{case}: {:?}", found[0]);
    }
}

#[test]
fn a_missing_feature_is_told_with_what_follows() {
    for (available, status) in [(true, Grade::Ok), (false, Grade::Warn)] {
        let consequence = "without it, x".to_owned();
        let feature = FeatureView { name: "tcx".to_owned(), available, consequence: consequence.clone() };
        let found = features(&[feature]);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].status), ("tcx", status));
        assert_eq!(found[0].advice, (!available).then_some(consequence));
    }
}

#[test]
fn what_is_no_fault_passes() {
    let cases: &[(&str, Change)] = &[
        ("CAP_SYS_ADMIN in place of CAP_BPF and CAP_PERFMON", |f| {
            f.capabilities = Some(Capabilities(1 << Capabilities::SYS_ADMIN | 1 << Capabilities::NET_ADMIN));
        }),
        ("5.10 with CAP_SYS_RESOURCE", |f| f.release = "5.10.0".to_owned()),
        ("case 43: net_cls since 5.15", |f| {
            f.mounts.extend(parse_mounts(NET_CLS));
        }),
        ("no IPv6", |f| f.forward_v6 = None),
        ("reserved NodePorts", |f| {
            f.local_ports = (1024, 65_535);
            f.reserved_ports = "10000-29999,30000-32767".to_owned();
        }),
        ("those NodePorts reserved that may be ephemeral", |f| {
            f.local_ports = (32_000, 65_535);
            f.reserved_ports = "32000-32767".to_owned();
        }),
    ];
    for (case, change) in cases {
        let mut facts = good();
        change(&mut facts);
        assert!(findings(&facts, None).iter().all(|f| f.status == Grade::Ok), "{case}");
    }
}

#[test]
fn a_cgroup_root_that_was_named_is_believed_where_it_can_be() {
    for (case, root, inode, grade, text) in [
        ("a child of the root", "/sys/fs/cgroup/lab-n1", Some(4242), Grade::Ok, "/sys/fs/cgroup/lab-n1"),
        ("not there", "/sys/fs/cgroup/nothing", None, Grade::Fail, "does not exist"),
        ("of another filesystem", "/sys/fs/bpf", Some(1), Grade::Fail, "is bpf, not cgroup2"),
    ] {
        let facts = Facts { cgroup_inode: inode, ..good() };
        let finding = findings(&facts, Some(root)).into_iter().find(|f| f.name == "cgroup v2").unwrap();
        assert_eq!(finding.status, grade, "{case}");
        assert!(finding.found.contains(text), "{case}: {finding:?}");
    }
}

#[test]
fn masquerade_ports_shall_be_nobody_elses() {
    for (ports, grade) in [
        ((10_000, 29_999), Grade::Ok),
        ((29_000, 30_000), Grade::Warn),
        ((32_767, 32_767), Grade::Warn),
        ((61_000, 65_535), Grade::Ok),
        ((1, 65_535), Grade::Warn),
    ] {
        let findings = judge_ports(&good(), None, ports);
        let found = findings.iter().find(|f| f.name == "masquerade ports").unwrap();
        assert_eq!(found.status, grade, "{ports:?}: {found:?}");
    }
}
