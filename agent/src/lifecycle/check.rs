//! Whether this kernel and host can run the agent: facts judged, each with what to do about it. Pure.

use std::{ops::RangeInclusive, path::Path};

use serde::{Deserialize, Serialize};

use crate::{
    datapath::programs::probe::{Capabilities, Facts, KernelVersion, Supported, find_cgroup_root, mount_of},
    view::FeatureView,
};

/// How a finding is judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    /// As it should be.
    Ok,
    /// The agent runs, but something could be better.
    Warn,
    /// The agent would refuse to start.
    Fail,
}

/// One answer of `sheave check`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// What was looked at.
    pub name: String,
    /// How it is.
    pub status: Grade,
    /// What was found.
    pub found: String,
    /// What it means and what to do; null when all is well.
    pub advice: Option<String>,
}

impl Finding {
    fn ok(name: &str, found: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: Grade::Ok, found: found.into(), advice: None }
    }

    fn warn(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: Grade::Warn, found: found.into(), advice: Some(advice.into()) }
    }

    fn fail(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: Grade::Fail, found: found.into(), advice: Some(advice.into()) }
    }
}

/// `sock_release`, the last of the attach types that we need, came with 5.9; 5.10 is the oldest kernel that we test.
const OLDEST: KernelVersion = KernelVersion(5, 10);

/// What the agent is told to use.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// The BPF filesystem.
    pub bpffs: &'a Path,
    /// Where to attach; `None` = found.
    pub cgroup_root: Option<&'a Path>,
    /// First and last port that masquerades clients; `None` = there is no packet path.
    pub snat_ports: Option<(u16, u16)>,
}

/// All findings, the necessary things first.
#[must_use]
pub fn judge(facts: &Facts, plan: Plan<'_>) -> Vec<Finding> {
    let Plan { bpffs, cgroup_root, snat_ports } = plan;
    let version = KernelVersion::parse(&facts.release);
    vec![
        kernel(facts, version),
        privileges(facts),
        programs(facts),
        cgroup(facts, cgroup_root),
        bpf_filesystem(facts, bpffs),
        memlock(facts, version),
        cgroup_v1(facts, version),
        types(facts),
        compiler(facts),
        socket_closing(facts),
        forwarding(facts),
        node_ports(facts),
        masquerade(facts, snat_ports),
    ]
}

/// Findings of what is optional, by the names that `status` gives it.
#[must_use]
pub fn features(views: &[FeatureView]) -> Vec<Finding> {
    let finding = |feature: &FeatureView| {
        if feature.available {
            Finding::ok(&feature.name, "there")
        } else {
            Finding::warn(&feature.name, "missing", &feature.consequence)
        }
    };
    views.iter().map(finding).collect()
}

fn kernel(facts: &Facts, version: Option<KernelVersion>) -> Finding {
    match version {
        Some(version) if version >= OLDEST => Finding::ok("kernel", format!("Linux {}", facts.release)),
        Some(_) | None => Finding::fail(
            "kernel",
            format!("Linux {}", facts.release),
            format!("sheave needs Linux {}.{} or newer", OLDEST.0, OLDEST.1),
        ),
    }
}

/// Who may run the agent, in the words of the chart's values.
const FIT: &str = "run it as root, or in a pod that adds the capabilities BPF, NET_ADMIN, PERFMON and SYS_ADMIN, as the chart's \
                   does";

/// Maps and links need CAP_BPF; programs that compare pointers, as ours do, CAP_PERFMON. CAP_SYS_ADMIN stands for both.
fn privileges(facts: &Facts) -> Finding {
    const NAME: &str = "privileges";
    let Some(capabilities) = facts.capabilities else {
        return Finding::warn(NAME, "cannot read /proc/self/status", FIT);
    };
    let has = |bit| capabilities.has(bit);
    let rules_all = has(Capabilities::SYS_ADMIN);
    let needed = [
        ("CAP_BPF", rules_all || has(Capabilities::BPF)),
        ("CAP_PERFMON", rules_all || has(Capabilities::PERFMON)),
        ("CAP_NET_ADMIN", has(Capabilities::NET_ADMIN)),
    ];
    let missing: Vec<&str> = needed.iter().filter(|(_, there)| !there).map(|(name, _)| *name).collect();
    if !missing.is_empty() {
        let missing = missing.join(", ");
        return Finding::fail(NAME, format!("{missing} missing"), format!("grant {missing} to this process; or {FIT}"));
    }
    if !rules_all {
        return Finding::warn(
            NAME,
            "CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, but not CAP_SYS_ADMIN",
            "sockets in pods that talk to a removed backend cannot be closed: grant CAP_SYS_ADMIN, with the chart by \
             closePodSockets=true",
        );
    }
    Finding::ok(NAME, "CAP_SYS_ADMIN and CAP_NET_ADMIN")
}

fn programs(facts: &Facts) -> Finding {
    const NAME: &str = "eBPF";
    let needed: [(&str, &Supported); 4] = [
        ("programs on connect, sendmsg, recvmsg and getpeername", &facts.bpf.sock_addr),
        ("programs on bind and close", &facts.bpf.cgroup_sock),
        ("socket storage", &facts.bpf.socket_storage),
        ("network namespace cookies", &facts.bpf.netns_cookie),
    ];
    let unknown = needed.iter().find_map(|(_, s)| s.as_ref().err());
    let missing: Vec<&str> = needed.iter().filter(|(_, s)| matches!(s, Ok(false))).map(|(name, _)| *name).collect();
    match (unknown, missing.is_empty()) {
        (Some(error), _) => Finding::fail(
            NAME,
            format!("bpf(2) cannot be used: {error}"),
            "run as root; in a container, seccomp and lockdown must allow bpf(2)",
        ),
        (None, false) => Finding::fail(
            NAME,
            format!("this kernel lacks {}", missing.join(", ")),
            "boot a kernel with CONFIG_BPF_SYSCALL=y and CONFIG_CGROUP_BPF=y",
        ),
        (None, true) => Finding::ok(NAME, needed.map(|(name, _)| name).join(", ")),
    }
}

fn cgroup(facts: &Facts, told: Option<&Path>) -> Finding {
    const NAME: &str = "cgroup v2";
    let found = find_cgroup_root(&facts.mounts);
    let Some(root) = told.or(found.as_deref()) else {
        return Finding::fail(
            NAME,
            "not mounted",
            "mount -t cgroup2 none /run/sheave-cgroup2, and name it with --cgroup-root; the programs cannot be attached to \
             cgroup v1",
        );
    };
    let shown = root.display();
    if facts.cgroup_inode.is_none() {
        return Finding::fail(NAME, format!("{shown} does not exist"), "name the cgroup v2 root with --cgroup-root");
    }
    let kind = mount_of(root, &facts.mounts).map_or("nothing", |m| m.kind.as_str());
    if kind != "cgroup2" {
        let advice = match &found {
            Some(found) => format!("use --cgroup-root {}, or leave the flag out", found.display()),
            None => "name the cgroup v2 root with --cgroup-root".to_owned(),
        };
        return Finding::fail(NAME, format!("{shown} is {kind}, not cgroup2"), advice);
    }
    if told.is_none() && facts.cgroup_inode != Some(1) {
        // kernfs gives the root of a hierarchy inode 1; a container's own cgroup namespace begins further down.
        return Finding::warn(
            NAME,
            format!("{shown} is not the root of the tree"),
            "only processes below it are served: mount the host's cgroup2 into the pod and name it with --cgroup-root",
        );
    }
    Finding::ok(NAME, shown.to_string())
}

fn bpf_filesystem(facts: &Facts, bpffs: &Path) -> Finding {
    const NAME: &str = "BPF filesystem";
    let shown = bpffs.display();
    match mount_of(bpffs, &facts.mounts) {
        Some(mount) if mount.kind == "bpf" && mount.read_only => Finding::fail(
            NAME,
            format!("{shown} is read-only"),
            format!("nothing can be pinned there: mount -o remount,rw {}", mount.point.display()),
        ),
        Some(mount) if mount.kind == "bpf" => Finding::ok(NAME, shown.to_string()),
        Some(mount) => Finding::fail(
            NAME,
            format!("{shown} is {}, not bpf", mount.kind),
            format!("mount -t bpf bpf {shown}, or name a mounted one with --bpffs; a pod needs the host's as hostPath"),
        ),
        None => Finding::fail(NAME, format!("{shown}: nothing is mounted there"), format!("mount -t bpf bpf {shown}")),
    }
}

/// Since 5.11 maps count as the cgroup's memory instead.
fn memlock(facts: &Facts, version: Option<KernelVersion>) -> Finding {
    const NAME: &str = "locked memory";
    if version.is_some_and(|v| v >= KernelVersion(5, 11)) {
        return Finding::ok(NAME, "not limited on this kernel");
    }
    let may_raise = facts.capabilities.is_some_and(|c| c.has(Capabilities::SYS_RESOURCE));
    if facts.memlock_unlimited || may_raise {
        return Finding::ok(NAME, "unlimited");
    }
    Finding::fail(
        NAME,
        "limited",
        "grant CAP_SYS_RESOURCE or set LimitMEMLOCK=infinity: before 5.11 maps are locked memory",
    )
}

/// Before 5.15 (commit 8520e224f547) a socket remembered either its v1 class or its v2 group.
fn cgroup_v1(facts: &Facts, version: Option<KernelVersion>) -> Finding {
    const NAME: &str = "cgroup v1";
    let is_network = |o: &String| o == "net_cls" || o == "net_prio";
    let network = facts.mounts.iter().any(|m| m.kind == "cgroup" && m.options.iter().any(is_network));
    match (network, version) {
        (false, _) => Finding::ok(NAME, "no net_cls or net_prio"),
        (true, Some(version)) if version >= KernelVersion(5, 15) => {
            Finding::ok(NAME, "net_cls or net_prio is mounted, which does no harm since Linux 5.15")
        }
        (true, Some(_) | None) => Finding::warn(
            NAME,
            "net_cls or net_prio is mounted",
            "before Linux 5.15, processes in a group with a class or priority bypass Services: do not use them, or boot with \
             cgroup_no_v1=net_cls,net_prio",
        ),
    }
}

fn types(facts: &Facts) -> Finding {
    if facts.btf {
        return Finding::ok("BTF", "/sys/kernel/btf/vmlinux");
    }
    Finding::warn(
        "BTF",
        "/sys/kernel/btf/vmlinux is missing",
        "not needed yet, but untested without; CONFIG_DEBUG_INFO_BTF=y provides it",
    )
}

fn compiler(facts: &Facts) -> Finding {
    match facts.jit {
        Some(0) => Finding::warn("JIT", "off", "programs are interpreted, slowly: sysctl -w net.core.bpf_jit_enable=1"),
        Some(_) => Finding::ok("JIT", "on"),
        None => Finding::ok("JIT", "there is no switch; on, if the kernel has a JIT at all"),
    }
}

fn socket_closing(facts: &Facts) -> Finding {
    match &facts.socket_closing {
        Ok(()) => Finding::ok("socket closing", "works"),
        Err(error) => Finding::warn(
            "socket closing",
            error.as_str(),
            "connected UDP sockets stay with a removed backend: needs CONFIG_INET_DIAG_DESTROY=y and the module udp_diag",
        ),
    }
}

fn forwarding(facts: &Facts) -> Finding {
    const ADVICE: &str = "pods on this node cannot be reached from outside it: sysctl -w net.ipv4.ip_forward=1 \
                          net.ipv6.conf.all.forwarding=1";
    match (facts.forward_v4, facts.forward_v6) {
        (true, Some(true)) => Finding::ok("forwarding", "IPv4 and IPv6"),
        (true, None) => Finding::ok("forwarding", "IPv4; this kernel has no IPv6"),
        (true, Some(false)) => Finding::warn("forwarding", "IPv4, not IPv6", ADVICE),
        (false, Some(true)) => Finding::warn("forwarding", "IPv6, not IPv4", ADVICE),
        (false, Some(false) | None) => Finding::warn("forwarding", "off", ADVICE),
    }
}

/// A datagram for a NodePort's number is taken for a client's, unless a socket waits for it that is
/// connected, or that we have seen send.
fn node_ports(facts: &Facts) -> Finding {
    const NAME: &str = "NodePorts";
    let (low, high) = facts.local_ports;
    let range = format!("ephemeral ports are {low}–{high}");
    if may_be_ephemeral(facts, NODE_PORTS) {
        return Finding::warn(NAME, range, format!("they overlap the usual NodePorts: {}", reserve(facts, NODE_PORTS)));
    }
    if common(NODE_PORTS, facts.local_ports).is_empty() {
        return Finding::ok(NAME, range);
    }
    Finding::ok(NAME, format!("{range}, reserved are {}", facts.reserved_ports))
}

/// The usual NodePorts; the API server may have been told others.
const NODE_PORTS: (u16, u16) = (30_000, 32_767);

/// A connection of this node from a port that also masquerades a client could be taken for that client's.
fn masquerade(facts: &Facts, snat_ports: Option<(u16, u16)>) -> Finding {
    const NAME: &str = "masquerade ports";
    let Some(ports) = snat_ports else { return Finding::ok(NAME, "no packet path") };
    let range = format!("{}–{}", ports.0, ports.1);
    if may_be_ephemeral(facts, ports) {
        let (low, high) = facts.local_ports;
        return Finding::warn(
            NAME,
            format!("{range}, and ephemeral ports are {low}–{high}"),
            format!(
                "a connection of this node and a masqueraded client's may share a port, and then fail: choose another \
                 range with --snat-ports, or {}",
                reserve(facts, ports)
            ),
        );
    }
    if !common(ports, NODE_PORTS).is_empty() {
        return Finding::warn(
            NAME,
            range,
            "they overlap the usual NodePorts, 30000–32767: a new NodePort may still be in use for a masqueraded client; \
             choose another range with --snat-ports",
        );
    }
    Finding::ok(NAME, range)
}

fn common(a: (u16, u16), b: (u16, u16)) -> RangeInclusive<u16> {
    a.0.max(b.0)..=a.1.min(b.1)
}

/// Whether the kernel may give one of these ports to a socket that asked for none.
fn may_be_ephemeral(facts: &Facts, ports: (u16, u16)) -> bool {
    let is_reserved = |port: u16| {
        facts.reserved_ports.split(',').any(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            matches!((first.parse(), last.parse()), (Ok(first), Ok(last)) if (first..=last).contains(&port))
        })
    };
    common(ports, facts.local_ports).any(|port| !is_reserved(port))
}

/// The command that keeps them from that, and what is reserved already.
fn reserve(facts: &Facts, (first, last): (u16, u16)) -> String {
    let before = if facts.reserved_ports.is_empty() { String::new() } else { format!("{},", facts.reserved_ports) };
    format!("sysctl -w net.ipv4.ip_local_reserved_ports={before}{first}-{last}")
}

#[cfg(test)]
mod tests;
