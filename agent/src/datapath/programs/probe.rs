//! Facts about this kernel and host: what is mounted, allowed and supported. Judging them is [`check`](crate::lifecycle::check)'s.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use aya::{
    maps::MapType,
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported, is_map_supported, is_program_supported},
};

mod closing;
pub(super) mod trial;

/// Major and minor version of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion(pub u32, pub u32);

impl KernelVersion {
    /// From a release such as `6.18.44-amd64`.
    #[must_use]
    pub fn parse(release: &str) -> Option<Self> {
        let mut numbers = release.split(|c: char| !c.is_ascii_digit());
        Some(Self(numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
    }

    /// That of the running kernel.
    #[must_use]
    pub fn running() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/sys/kernel/osrelease").ok()?)
    }
}

/// One line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Where it is mounted.
    pub point: PathBuf,
    /// Type of filesystem.
    pub kind: String,
    /// Options of the filesystem: with cgroup v1, its controllers.
    pub options: Vec<String>,
    /// Nothing can be made there.
    pub read_only: bool,
}

/// Parses `/proc/self/mountinfo`; lines it does not understand are left out.
#[must_use]
pub fn parse_mounts(mountinfo: &str) -> Vec<Mount> {
    let parse = |line: &str| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let (mut mount, mut filesystem) = (mount.split(' ').skip(4), filesystem.split(' '));
        let (point, flags) = (mount.next()?, mount.next()?);
        let kind = filesystem.next()?.to_owned();
        let options: Vec<_> = filesystem.nth(1).unwrap_or_default().split(',').map(str::to_owned).collect();
        let read_only = flags.split(',').any(|flag| flag == "ro") || options.iter().any(|option| option == "ro");
        Some(Mount { point: unescape(point).into(), kind, options, read_only })
    };
    mountinfo.lines().filter_map(parse).collect()
}

/// The kernel writes space, tab, newline and backslash as `\040` and so on.
fn unescape(text: &str) -> String {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .into_iter()
        .fold(text.to_owned(), |text, (code, character)| text.replace(code, character))
}

/// The root of the cgroup v2 tree: at `/sys/fs/cgroup`, with hybrid hosts below it, else wherever it is mounted.
#[must_use]
pub fn find_cgroup_root(mounts: &[Mount]) -> Option<PathBuf> {
    let points = || mounts.iter().filter(|m| m.kind == "cgroup2").map(|m| m.point.as_path());
    let usual = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(Path::new);
    let found = usual.into_iter().find(|usual| points().any(|p| p == *usual));
    found.or_else(|| points().min_by_key(|p| p.components().count())).map(Path::to_owned)
}

/// What is mounted where `path` is, or would be.
#[must_use]
pub fn mount_of<'a>(path: &Path, mounts: &'a [Mount]) -> Option<&'a Mount> {
    let real = path.ancestors().find_map(|a| a.canonicalize().ok().map(|r| r.join(path.strip_prefix(a).unwrap_or(a))));
    let real = real.unwrap_or_else(|| path.to_owned());
    // The last of the deepest: a later mount hides an earlier one.
    mounts.iter().filter(|m| real.starts_with(&m.point)).max_by_key(|m| m.point.components().count())
}

/// Linux capabilities, as bits of `CapEff`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities(pub u64);

impl Capabilities {
    /// `CAP_NET_ADMIN`.
    pub const NET_ADMIN: u32 = 12;
    /// `CAP_SYS_ADMIN`.
    pub const SYS_ADMIN: u32 = 21;
    /// `CAP_SYS_RESOURCE`.
    pub const SYS_RESOURCE: u32 = 24;
    /// `CAP_PERFMON`, Linux 5.8.
    pub const PERFMON: u32 = 38;
    /// `CAP_BPF`, Linux 5.8.
    pub const BPF: u32 = 39;

    /// From `/proc/self/status`.
    #[must_use]
    pub fn parse(status: &str) -> Option<Self> {
        let hex = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(hex.trim(), 16).ok().map(Self)
    }

    /// Whether a capability is there.
    #[must_use]
    pub const fn has(self, bit: u32) -> bool {
        self.0 & (1 << bit) != 0
    }
}

/// Whether the kernel supports something, or why that cannot be told.
pub type Supported = Result<bool, String>;

/// What bpf(2) says of the program types, helpers and maps that we use. The attach types among them came one by one,
/// the last (`sock_release`) with Linux 5.9, and cannot be asked for.
#[derive(Clone, Debug)]
pub struct Bpf {
    /// Programs on connect, sendmsg, recvmsg and getpeername.
    pub sock_addr: Supported,
    /// Programs on bind and close.
    pub cgroup_sock: Supported,
    /// Socket storage, Linux 5.2.
    pub socket_storage: Supported,
    /// `bpf_get_netns_cookie`, Linux 5.7.
    pub netns_cookie: Supported,
}

impl Bpf {
    fn probe() -> Self {
        let program = |kind| is_program_supported(kind).map_err(whole);
        let helper = |id| is_helper_supported(ProgramType::CgroupSockAddr, id).map_err(whole);
        Self {
            sock_addr: program(ProgramType::CgroupSockAddr),
            cgroup_sock: program(ProgramType::CgroupSock),
            socket_storage: is_map_supported(MapType::SkStorage).map_err(whole),
            netns_cookie: helper(BpfHelper::BPF_FUNC_get_netns_cookie),
        }
    }
}

/// An error with its causes.
fn whole(error: impl Into<anyhow::Error>) -> String {
    format!("{:#}", error.into())
}

/// Everything that `check` judges.
#[derive(Clone, Debug)]
pub struct Facts {
    /// `uname -r`.
    pub release: String,
    /// What is mounted.
    pub mounts: Vec<Mount>,
    /// What this process may do; `None` = unknown.
    pub capabilities: Option<Capabilities>,
    /// The limit on locked memory is off.
    pub memlock_unlimited: bool,
    /// `/sys/kernel/btf/vmlinux` exists.
    pub btf: bool,
    /// Asked of bpf(2).
    pub bpf: Bpf,
    /// A socket of ours could be closed through `SOCK_DESTROY`; else why not.
    pub socket_closing: Result<(), String>,
    /// Inode of the cgroup root: 1 is the root of the whole tree; `None` = no such directory.
    pub cgroup_inode: Option<u64>,
    /// `net.core.bpf_jit_enable`; `None` = cannot be read.
    pub jit: Option<u32>,
    /// `net.ipv4.ip_forward`.
    pub forward_v4: bool,
    /// `net.ipv6.conf.all.forwarding`; `None` = no IPv6.
    pub forward_v6: Option<bool>,
    /// `net.ipv4.ip_local_port_range`.
    pub local_ports: (u16, u16),
    /// `net.ipv4.ip_local_reserved_ports`.
    pub reserved_ports: String,
}

impl Facts {
    /// Looks around. Changes nothing. `cgroup_root` is where to attach, or `None` to find it.
    #[must_use]
    pub fn gather(cgroup_root: Option<&Path>) -> Self {
        let mounts = parse_mounts(&read("/proc/self/mountinfo"));
        let root = cgroup_root.map(Path::to_owned).or_else(|| find_cgroup_root(&mounts));
        let range = read("/proc/sys/net/ipv4/ip_local_port_range");
        let mut range = range.split_whitespace().filter_map(|n| n.parse().ok());
        Self {
            release: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            capabilities: Capabilities::parse(&read("/proc/self/status")),
            memlock_unlimited: read("/proc/self/limits")
                .lines()
                .any(|l| l.starts_with("Max locked memory") && l.contains("unlimited")),
            btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
            bpf: Bpf::probe(),
            socket_closing: closing::try_it().map_err(whole),
            cgroup_inode: root.and_then(|r| fs::metadata(r).ok()).map(|m| m.ino()),
            jit: read("/proc/sys/net/core/bpf_jit_enable").trim().parse().ok(),
            forward_v4: read("/proc/sys/net/ipv4/ip_forward").trim() == "1",
            forward_v6: fs::read_to_string("/proc/sys/net/ipv6/conf/all/forwarding").ok().map(|t| t.trim() == "1"),
            local_ports: (range.next().unwrap_or(0), range.next().unwrap_or(0)),
            reserved_ports: read("/proc/sys/net/ipv4/ip_local_reserved_ports").trim().to_owned(),
            mounts,
        }
    }
}

/// A file of proc or sys; empty where it does not exist.
fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests;
