//! Attaching the programs, in place of a predecessor's, and keeping them attached.

use std::{mem, path::PathBuf};

use anyhow::Context as _;

use crate::{
    datapath::{
        host::devices,
        programs::{
            attach,
            keep::{self, Keep},
            link::Pinned,
            load::Loaded,
            packets::{self, Control, Ordered, Packets},
        },
        tables::{
            flows::{self, Collected, Flows},
            migrate::Legacy,
            pins::Pins,
        },
    },
    lifecycle::upkeep::Upkeep,
    observe::metrics::Metrics,
    options::PacketOptions,
};

/// What attaching needs besides programs.
pub struct HookOptions {
    /// Whose links the programs go into.
    pub legacy: Legacy,
    /// Where to attach the programs of sockets.
    pub cgroup_root: PathBuf,
    /// Where links are pinned.
    pub pins: Pins,
    /// Binding to a NodePort is refused.
    pub bind_protection: bool,
    /// The discard device is there.
    pub has_discard: bool,
    /// What becomes of packets.
    pub packets: PacketOptions,
    /// Where flows are counted.
    pub metrics: Metrics,
    /// Of how many Services.
    pub series: usize,
    /// Where losses are noted.
    pub upkeep: Upkeep,
}

/// Programs that the kernel has accepted and that are not yet attached.
pub struct Hooks {
    options: HookOptions,
    maps: Vec<Pinned>,
    sockets: Vec<attach::Program>,
    packets: Option<(Packets, Ordered)>,
    /// What is not as it should be, one sentence each.
    warnings: Vec<String>,
}

impl Hooks {
    /// Loads every program: nothing after this needs the right to. Also returns how the packet path, if there is one,
    /// is told what is wanted.
    ///
    /// # Errors
    /// When the verifier refuses a program of sockets.
    pub fn load(mut loaded: Loaded, options: HookOptions) -> anyhow::Result<(Self, Option<Control>)> {
        let (maps, mut warnings) = (mem::take(&mut loaded.maps), mem::take(&mut loaded.warnings));
        let sockets = attach::load(&mut loaded.ebpf, options.bind_protection)?;
        let (mut packets, mut control) = (None, None);
        if options.packets.enabled {
            match Packets::open(loaded, &options.pins, options.packets.clone()) {
                Ok(loaded) => {
                    let (ours, theirs) = loaded.control();
                    (packets, control) = (Some((loaded, theirs)), Some(ours));
                }
                Err(error) => warnings.push(no_packet_path(&error)),
            }
        }
        Ok((Self { options, maps, sockets, packets, warnings }, control))
    }

    /// Attaches everything and starts what looks after it. Returns what is not as it should be, a sentence each.
    ///
    /// # Errors
    /// When the programs of sockets cannot be attached. Those attached before stay.
    pub async fn attach(self) -> anyhow::Result<Vec<String>> {
        let Self { options, maps, sockets, packets, mut warnings } = self;
        let HookOptions { legacy, cgroup_root, pins, bind_protection, has_discard, upkeep, .. } = options;
        let counting = (options.metrics, options.series);
        legacy.move_links(&pins)?;
        let programs = attach::attach(sockets, &cgroup_root, &pins, bind_protection)?;
        tokio::spawn(keep::follow(Keep { maps, programs, has_discard }, upkeep.clone()));
        let started = match packets {
            Some((packets, ordered)) => start_packets(packets, ordered, &pins, counting, upkeep).await,
            None if options.packets.enabled => Ok(()), // the warning is there
            None => packets::detach(&pins).map_err(Into::into),
        };
        warnings.extend(started.err().map(|error: anyhow::Error| no_packet_path(&error)));
        if let Err(error) = legacy.remove() {
            warnings.push(format!(
                "pins of another version could not be removed; run `sheave cleanup` while no agent is running: {error}"
            ));
        }
        Ok(warnings)
    }
}

fn no_packet_path(error: &(impl std::fmt::Display + ?Sized)) -> String {
    format!("there is no packet path, so clients outside this node are not served: {error:#}")
}

/// Starts what keeps the packet programs on every device.
async fn start_packets(
    packets: Packets,
    ordered: Ordered,
    pins: &Pins,
    (metrics, series): (Metrics, usize),
    upkeep: Upkeep,
) -> anyhow::Result<()> {
    let devices = devices::follow().await.context("cannot follow this host's network devices")?;
    packets::start(packets, ordered, devices, upkeep).await.context("cannot use netlink")?;
    let tell = move |Collected { kept, removed, hidden, services, took }| {
        metrics.collected_flows(kept, removed, took);
        metrics.live_flows(hidden, services.iter().map(|(name, count)| (name, *count)), series);
    };
    flows::start(Flows::open(pins)?, tell).context("cannot start looking after the flow table")
}
