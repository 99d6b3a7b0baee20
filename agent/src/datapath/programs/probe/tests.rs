//! Host descriptions in, facts out.

use std::path::Path;

use super::{Capabilities, KernelVersion, Mount, find_cgroup_root, mount_of, parse_mounts};

const UNIFIED: &str = "\
24 29 0:22 / /sys rw,nosuid shared:7 - sysfs sysfs rw
35 24 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
36 24 0:31 / /sys/fs/bpf rw,nosuid shared:11 master:2 - bpf bpf rw,mode=700";

const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/net_cls,net_prio rw,relatime - cgroup cgroup rw,net_cls,net_prio
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw";

const ODD: &str = "\
50 27 0:40 / /mnt/my\\040groups/deep rw - cgroup2 none rw
51 27 0:40 / /mnt/v2 rw - cgroup2 none rw";

#[test]
fn the_cgroup_root_is_found_on_every_kind_of_host() {
    for (host, mountinfo, expected) in [
        ("unified", UNIFIED, Some("/sys/fs/cgroup")),
        ("hybrid", HYBRID, Some("/sys/fs/cgroup/unified")),
        ("an unusual path", ODD, Some("/mnt/v2")),
        ("pure v1", "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu", None),
        ("nonsense", "\nhello\n1 2 3 - \n - - -", None),
    ] {
        assert_eq!(find_cgroup_root(&parse_mounts(mountinfo)).as_deref(), expected.map(Path::new), "{host}");
    }
}

#[test]
fn a_path_belongs_to_the_deepest_mount_above_it() {
    let mounts = parse_mounts(UNIFIED);
    let kind = |path: &str| mount_of(Path::new(path), &mounts).map(|m| m.kind.as_str());
    for (path, expected) in [
        ("/sys/fs/bpf", Some("bpf")),
        ("/sys/fs/bpf/no-such-node", Some("bpf")),
        ("/sys/fs/bpfx", Some("sysfs")),
        ("/no-such-directory", None),
    ] {
        assert_eq!(kind(path), expected, "{path}");
    }
    assert_eq!(parse_mounts(ODD)[0].point, Path::new("/mnt/my groups/deep"));
    let controllers = Mount {
        point: "/sys/fs/cgroup/net_cls,net_prio".into(),
        kind: "cgroup".to_owned(),
        options: ["rw", "net_cls", "net_prio"].map(str::to_owned).into(),
        read_only: false,
    };
    assert_eq!(parse_mounts(HYBRID)[1], controllers);
}

#[test]
fn a_kernel_release_has_two_numbers_in_front() {
    for (release, expected) in [
        ("6.18.44-fc-v595", Some(KernelVersion(6, 18))),
        ("5.10.0-28-amd64", Some(KernelVersion(5, 10))),
        ("7.3-rc1", Some(KernelVersion(7, 3))),
        ("6", None),
        ("", None),
    ] {
        assert_eq!(KernelVersion::parse(release), expected, "{release}");
    }
    assert!(KernelVersion(5, 9) < KernelVersion(5, 10) && KernelVersion(5, 10) < KernelVersion(6, 1));
}

#[test]
fn capabilities_are_bits_of_the_effective_set() {
    let status = "Name:\tsheave\nCapPrm:\t0000000000000000\nCapEff:\t0000008000001000\n";
    let capabilities = Capabilities::parse(status).unwrap();
    assert!(capabilities.has(Capabilities::BPF) && capabilities.has(Capabilities::NET_ADMIN));
    assert!(!capabilities.has(Capabilities::SYS_ADMIN));
    assert_eq!(Capabilities::parse("Name: x"), None);
}
