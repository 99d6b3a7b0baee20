//! The kernel's side of the agent: the only part that knows aya, bpf(2) and netlink.
//!
//! [`Datapath`] is everything that [`reconcile`](crate::reconcile) may do to the tables. Two implementations: kernel
//! maps ([`tables::kernel`]) and memory with seeded faults ([`tables::fake`]); the same scenarios run on both.

pub mod host;
pub mod programs;
pub mod tables;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
};

use ipnet::IpNet;
use sheave_ebpf::{
    addr::Addr,
    backend::Backend,
    frontend::{Frontend, FrontendKey},
    names::ServiceName,
    source_range::SourceRange,
};

use crate::{lb::clients::ReadClients, options::HostPaths};

/// What can go wrong in the datapath; typed where a caller decides by it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A map has no room left.
    #[error("map {map} is full ({capacity} entries){}", remedy(*flag))]
    NoSpace {
        /// Name of the map.
        map: &'static str,
        /// Entries it holds at most.
        capacity: u32,
        /// The agent's flag that sets the capacity; `None` = it is fixed.
        flag: Option<&'static str>,
    },
    /// A system call failed.
    #[error("{call} failed: {source}")]
    Kernel {
        /// What was tried, on what.
        call: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Nothing went wrong here, but with the service that takes over the address.
    #[error("the service that takes over its address could not be written yet")]
    Awaited,
    /// Pinned state that this build cannot use.
    #[error("{0}")]
    Incompatible(String),
}

fn remedy(flag: Option<&str>) -> String {
    flag.map_or_else(
        || ", and its size is fixed".to_owned(),
        |flag| format!("; a larger {flag} takes effect at the node's next boot"),
    )
}

impl Error {
    /// A failed call with what it was about.
    pub fn kernel(call: impl Into<String>, source: io::Error) -> Self {
        Self::Kernel { call: call.into(), source }
    }
}

/// Shorthand.
pub type Result<T> = std::result::Result<T, Error>;

/// Bits of a network as a prefix of the 128 of an [`Addr`], in which IPv4 is mapped.
#[must_use]
pub fn prefix_bits(net: &IpNet) -> u32 {
    let bits = u32::from(net.prefix_len());
    match net {
        IpNet::V4(_) => 96 + bits,
        IpNet::V6(_) => bits,
    }
}

/// Sizes of the maps, in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Frontends, and service ids. `FRONTENDS` is twice as large, for the entries of unknown ports.
    pub frontends: u32,
    /// `BACKENDS`.
    pub backends: u32,
    /// `TABLES`.
    pub slots: u32,
    /// `AFFINITY`.
    pub affinity: u32,
    /// `PEERS`.
    pub peers: u32,
    /// `SOURCE_RANGES`.
    pub source_ranges: u32,
    /// `CONNTRACK`: a flow has two entries, or four if its client is masqueraded.
    pub conntrack: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            frontends: 65_536,
            backends: 262_144,
            slots: 1_048_576,
            affinity: 65_536,
            peers: 65_536,
            source_ranges: 65_536,
            conntrack: 262_144,
        }
    }
}

/// An LPM key: prefix length in bits, and the data.
pub type RangeKey = (u32, SourceRange);

/// Connected sockets that are to be closed, because nothing else tells them to look for another peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stale {
    /// Sockets that this service sent to a backend which left it, or serves no more.
    Backend {
        /// Service id.
        service: u32,
        /// Address.
        addr: Addr,
        /// Port, network order.
        port: u16,
        /// IANA protocol number.
        proto: u8,
    },
    /// Sockets that dialled a frontend while it was dropped silently; for UDP, also while it led nowhere or to another
    /// service.
    Frontend {
        /// Who has it now.
        service: u32,
        /// It was dropped silently under this service too, until now.
        was_silent: bool,
        /// Address.
        addr: Addr,
        /// Port, network order.
        port: u16,
        /// IANA protocol number.
        proto: u8,
    },
}

/// The tables, one verb a method. Every write is idempotent; removing what is not there is success.
pub trait Datapath {
    /// Sizes of the maps.
    fn limits(&self) -> Limits;

    /// All frontends, in no order.
    fn frontends(&self) -> Result<Vec<(FrontendKey, Frontend)>>;
    /// Inserts a frontend, or lets it name another service. The caller sees to the grace period in between.
    fn put_frontend(&mut self, key: &FrontendKey, value: &Frontend) -> Result<()>;
    /// Removes a frontend.
    fn remove_frontend(&mut self, key: &FrontendKey) -> Result<()>;

    /// All names, by service id.
    fn names(&self) -> Result<Vec<(u32, ServiceName)>>;
    /// The name of one id.
    fn name(&self, service: u32) -> Option<ServiceName>;
    /// Names a service id.
    fn put_name(&mut self, service: u32, name: &ServiceName) -> Result<()>;
    /// Removes the name: the id stands for no service any more.
    fn remove_name(&mut self, service: u32) -> Result<()>;

    /// All source ranges.
    fn source_ranges(&self) -> Result<Vec<RangeKey>>;
    /// Admits a network.
    fn put_source_range(&mut self, range: &RangeKey) -> Result<()>;
    /// No longer admits a network.
    fn remove_source_range(&mut self, range: &RangeKey) -> Result<()>;

    /// Makes `SERVICE_CIDRS` hold these networks, each with whether its addresses are dropped silently, by writing what
    /// differs. Whatever else it holds stays, unless `complete`.
    fn set_service_networks(&mut self, networks: &BTreeMap<IpNet, bool>, complete: bool) -> Result<()>;

    /// A word of `SERVICES`; 0 beyond its end.
    fn word(&self, index: u32) -> u64;
    /// One store: the commit point.
    fn put_word(&mut self, index: u32, word: u64) -> Result<()>;

    /// A slot of `TABLES`: a backend id; 0 beyond its end.
    fn slot(&self, index: u32) -> u32;
    /// Writes a slot of a run that no word names yet.
    fn put_slot(&mut self, index: u32, backend: u32) -> Result<()>;

    /// A backend; [`Backend::UNUSED`] beyond the end.
    fn backend(&self, id: u32) -> Backend;
    /// Writes a backend that no run names yet.
    fn put_backend(&mut self, id: u32, backend: &Backend) -> Result<()>;

    /// The raw `CONNECTIONS` word of a backend.
    fn connections(&self, id: u32) -> u64;
    /// Sets or clears [`RETIRED`](sheave_ebpf::backend::RETIRED), leaving the count alone.
    fn set_retired(&mut self, id: u32, retired: bool) -> Result<()>;
    /// The id is about to be used afresh: no connections, not retired.
    fn reset_connections(&mut self, id: u32) -> Result<()>;

    /// Forgets where the clients of these services went.
    fn forget_clients(&mut self, services: &BTreeSet<u32>) -> Result<()>;

    /// A word of `META`.
    fn meta(&self, index: u32) -> u64;
    /// Writes a word of `META`.
    fn put_meta(&mut self, index: u32, value: u64) -> Result<()>;

    /// Waits until no program that runs now can still hold what it read before (some 10 ms).
    fn grace_period(&mut self) -> Result<()>;
}

/// Opens the pinned maps for reading.
///
/// # Errors
/// When there are none, or they are not what this build expects.
pub fn open_tables(paths: &HostPaths) -> anyhow::Result<Box<dyn ReadClients>> {
    Ok(Box::new(tables::kernel::Kernel::open(&pinned(paths)?)?))
}

/// Opens the pinned flow table for reading.
///
/// # Errors
/// When there is none, or it is not what this build expects.
pub fn open_flows(paths: &HostPaths) -> anyhow::Result<tables::flows::Flows> {
    Ok(tables::flows::Flows::open(&pinned(paths)?)?)
}

/// Lets the programs tell what they do, and reads it.
///
/// # Errors
/// When nothing is pinned, it is not what this build expects, or somebody is reading already.
pub fn open_watch(paths: &HostPaths) -> anyhow::Result<tables::watch::Watch> {
    Ok(tables::watch::Watch::open(&pinned(paths)?)?)
}

/// Where an agent has pinned its maps, if one has.
fn pinned(paths: &HostPaths) -> anyhow::Result<tables::pins::Pins> {
    let pins = tables::pins::Pins::below(&paths.bpffs);
    anyhow::ensure!(
        pins.maps().exists(),
        "nothing is pinned at {}: no agent has run with --bpffs {} since this host was booted or cleaned up",
        pins.maps().display(),
        paths.bpffs.display()
    );
    Ok(pins)
}

/// Detaches and unpins everything; returns a line for each thing removed. `dry_run` only says what would be.
///
/// # Errors
/// When something could not be removed.
pub fn cleanup(paths: &HostPaths, dry_run: bool) -> anyhow::Result<Vec<String>> {
    let mut removed = programs::attach::cleanup(&tables::pins::Pins::below(&paths.bpffs), dry_run)?;
    removed.extend(programs::tc::remove_filters(dry_run));
    if remove_device(host::discard::DEVICE, dry_run)? {
        removed.push(format!("device {}", host::discard::DEVICE));
    }
    Ok(removed)
}

/// Removes a network device; says whether it was there. `dry_run` only says.
///
/// # Errors
/// When the kernel refuses.
pub fn remove_device(name: &str, dry_run: bool) -> anyhow::Result<bool> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(host::discard::remove(name, dry_run))
}
