//! `cargo xtask bench`: what sheave costs, beside the bars it has to clear. The method is in `docs/benchmarks.md`.

pub mod change;
pub mod cluster;
pub mod fill;
pub mod kube_proxy;
pub mod numbers;
pub mod packets;
pub mod report;
pub mod rounds;
pub mod stage;
pub mod traffic;
pub mod usage;
pub mod worker;

use std::{fs, thread};

use anyhow::{Context, Result};

use crate::lab::Lab;
use report::{Host, Report};

/// How long it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Rounds of traffic. Many short ones: what disturbs the machine then meets both sides of a ratio.
    pub rounds: usize,
    /// Operations of one arm in one round.
    pub batch: u32,
    /// Rounds of changes.
    pub change_rounds: usize,
    /// Changes of a slice in one round, at each scale.
    pub changes: usize,
    /// How often a cluster is programmed from nothing.
    pub fills: usize,
    /// Clusters are smaller by this factor.
    pub divisor: usize,
    /// kube-proxy is measured too, where it has been built; it wants an API server.
    pub kube_proxy: bool,
}

impl Effort {
    /// For numbers that are told to others: some minutes.
    pub const FULL: Self =
        Self { rounds: 60, batch: 1_000, change_rounds: 10, changes: 100, fills: 5, divisor: 1, kube_proxy: true };
    /// To see that it works: some seconds, and numbers that say nothing.
    pub const QUICK: Self =
        Self { rounds: 2, batch: 100, change_rounds: 2, changes: 3, fills: 1, divisor: 100, kube_proxy: false };

    fn scaled(&self, services: usize) -> usize {
        (services / self.divisor).max(1)
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Connections, requests and datagrams against a bare node.
    Traffic,
    /// A whole cluster from nothing.
    Fill,
    /// A changed slice.
    Change,
    /// NodePorts from outside, beside kube-proxy; the flow table.
    Packets,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Traffic, Self::Fill, Self::Change, Self::Packets];
}

/// Measures, each part on nodes of its own; `None` when this host cannot have any, which [`Lab::new`] explains.
///
/// # Errors
/// When something fails.
pub fn run(parts: &[Part], effort: &Effort) -> Result<Option<Report>> {
    let host = host()?;
    let cpu = host.cores - 1; // interrupts and everything else rather go to the first
    let mut rows = Vec::new();
    for part in parts {
        let nodes = match part {
            Part::Traffic => traffic::NODES as u8,
            Part::Fill => 1,
            Part::Change => change::NODES as u8,
            Part::Packets => packets::NODES as u8,
        };
        let Some(lab) = Lab::new(nodes)? else { return Ok(None) };
        rows.extend(match part {
            Part::Traffic => traffic::measure(&lab, cpu, effort)?,
            Part::Fill => fill::measure(&lab, cpu, effort)?,
            Part::Change => change::measure(&lab, cpu, effort)?,
            Part::Packets => packets::measure(&lab, cpu, effort)?,
        });
    }
    Ok(Some(Report { host, rows }))
}

fn host() -> Result<Host> {
    let info = fs::read_to_string("/proc/cpuinfo").context("/proc/cpuinfo")?;
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let load = fs::read_to_string("/proc/loadavg").context("/proc/loadavg")?;
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("/proc/sys/kernel/osrelease")?;
    Ok(Host {
        cpu: model.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.to_owned()),
        cores: thread::available_parallelism()?.get(),
        kernel: kernel.trim_end().to_owned(),
        load: load.split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(f64::NAN),
    })
}
