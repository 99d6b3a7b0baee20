//! Netfilter's connection tracking, set as kube-proxy sets it at its start (SY-1 to SY-6).
//!
//! Nothing of ours asks for it: a CNI's masquerading and NetworkPolicies do, on a node that has had these values for as
//! long as it had kube-proxy.

use std::{
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::lifecycle::upkeep::PERIOD;

/// Where the kernel has them. Writing there takes CAP_NET_ADMIN, or to be root; a container sees it read-only.
pub const FOLDER: &str = "/proc/sys/net/netfilter";
/// The largest table that follows from the number of processors.
const MOST: u32 = 1_048_576;
/// The table; without connection tracking in the kernel there is no such file.
const MAX: &str = "nf_conntrack_max";

/// What is wanted, in kube-proxy's terms; zero = leave it as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConntrackSysctls {
    /// [`FOLDER`], or where a container has it writable.
    pub folder: PathBuf,
    /// Entries of the table for each processor.
    pub max_per_core: u32,
    /// Entries of the table at least, where `max_per_core` is not zero.
    pub min: u32,
    /// How long an established TCP connection may rest.
    pub tcp_established: Duration,
    /// How long a TCP connection may wait for one end to close.
    pub tcp_close_wait: Duration,
    /// TCP segments outside the window are not marked as invalid.
    pub tcp_be_liberal: bool,
    /// How long a UDP flow may rest that was not answered.
    pub udp: Duration,
    /// How long an answered one may.
    pub udp_stream: Duration,
}

/// A value for a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    Exactly(u64),
    /// A larger one stays: kube-proxy would lower it, and the node would drop what it has room for.
    AtLeast(u64),
}

impl Wanted {
    /// What is to be written in place of `current`, if anything.
    fn instead_of(self, current: u64) -> Option<u64> {
        match self {
            Self::Exactly(value) => (current != value).then_some(value),
            Self::AtLeast(value) => (current < value).then_some(value),
        }
    }
}

impl ConntrackSysctls {
    /// Applies them once, as soon as the kernel has connection tracking: often the first rule of a CNI loads it. What an
    /// administrator sets afterwards stays.
    pub async fn apply_when_there(self) {
        while !self.folder.join(MAX).exists() {
            tokio::time::sleep(PERIOD).await;
        }
        let cores = aya::util::online_cpus().map_or(1, |online| online.len());
        let (set, failed) = self.apply(u32::try_from(cores).unwrap_or(u32::MAX));
        if !set.is_empty() {
            tracing::info!("set netfilter's sysctls as kube-proxy does:{set}");
        }
        if !failed.is_empty() {
            let folder = self.folder.display();
            tracing::warn!(
                "netfilter's sysctls stay as they are, in {folder}:{failed}; set them on the node by sysctl.d, or say \
                 --netfilter-sysctls= to leave them alone"
            );
        }
    }

    /// What was set, and what could not be.
    fn apply(&self, cores: u32) -> (String, String) {
        let (mut set, mut failed) = (String::new(), String::new());
        for (name, wanted) in self.wanted(cores) {
            // Writing to a string cannot fail.
            let _ = match settle(&self.folder.join(name), wanted) {
                Ok(None) => continue,
                Ok(Some(value)) => write!(set, " {name}={value}"),
                Err(error) => write!(failed, " {name}: {error}"),
            };
        }
        (set, failed)
    }

    /// Files and their values, in the order that they are written in.
    fn wanted(&self, cores: u32) -> Vec<(&'static str, Wanted)> {
        let max = match self.max_per_core.saturating_mul(cores) {
            0 => 0,
            product if product > MOST => MOST,
            product => product.max(self.min),
        };
        [
            (MAX, Wanted::AtLeast(max.into())),
            ("nf_conntrack_buckets", Wanted::AtLeast((max / 4).into())),
            ("nf_conntrack_tcp_timeout_established", Wanted::Exactly(self.tcp_established.as_secs())),
            ("nf_conntrack_tcp_timeout_close_wait", Wanted::Exactly(self.tcp_close_wait.as_secs())),
            ("nf_conntrack_tcp_be_liberal", Wanted::Exactly(self.tcp_be_liberal.into())),
            ("nf_conntrack_udp_timeout", Wanted::Exactly(self.udp.as_secs())),
            ("nf_conntrack_udp_timeout_stream", Wanted::Exactly(self.udp_stream.as_secs())),
        ]
        .into_iter()
        .filter(|(_, wanted)| !matches!(wanted, Wanted::Exactly(0) | Wanted::AtLeast(0)))
        .collect()
    }
}

/// What was written, if anything had to be.
fn settle(file: &Path, wanted: Wanted) -> io::Result<Option<u64>> {
    let current = fs::read_to_string(file)?.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
    wanted.instead_of(current).map(|value| fs::write(file, value.to_string()).map(|()| value)).transpose()
}

#[cfg(test)]
mod tests;
