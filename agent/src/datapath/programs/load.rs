//! Loading the object: sizes, constants, pins, and whether what is pinned is what we expect.

use std::{os::fd::AsFd as _, path::Path};

use aya::{
    Ebpf, EbpfLoader,
    maps::{MapData, MapType},
};
use sheave_ebpf::{
    addr::Addr,
    affinity::AffinityKey,
    backend::Backend,
    conntrack::{Flow, FragmentKey, Ports, Tuple},
    counter,
    device::Device,
    event,
    frontend::{Frontend, FrontendKey},
    globals, maps, meta,
    names::ServiceName,
    service::WORDS_PER_SERVICE,
    socket::{OwnPeer, Peer, PeerKey, PickKey, SocketState},
    source_range::SourceRange,
};

use crate::OBJECT;
use crate::datapath::{
    Error, Limits, Result,
    programs::{
        features::{Features, Mptcp},
        link::{self, Pinned},
    },
    tables::{pinned::flatten, pins::Pins},
};

/// What the operator chose that the programs must know when they are loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// Only sockets of the host's network namespace are translated.
    pub host_only: bool,
    /// NodePorts answer on loopback.
    pub loopback_node_ports: bool,
    /// Binding to a NodePort is refused.
    pub bind_protection: bool,
    /// TCP connections of removed backends are closed too.
    pub track_tcp: bool,
    /// The packet path's.
    pub packets: PacketSwitches,
}

/// What the operator chose that the packet programs must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketSwitches {
    /// The first of two neighbouring bits of the packet mark that are ours.
    pub mark_bit: u8,
    /// First and last source port for masqueraded clients.
    pub snat_ports: (u16, u16),
    /// Every client of a ClusterIP is masqueraded.
    pub masquerade_all: bool,
    /// What says who is a pod.
    pub pods: PodSign,
    /// ClusterIPs are served to clients that are no pods.
    pub cluster_ips_from_outside: bool,
    /// A client from outside is not masqueraded towards a backend on this node.
    pub keep_client: bool,
    /// Pings of virtual addresses are answered.
    pub answer_pings: bool,
}

/// What says that a packet comes from a pod; the numbers are those of `DETECT_PODS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PodSign {
    /// Nothing does.
    Nothing = 0,
    /// Its source, by `POD_RANGES`.
    Address = 1,
    /// The device that it comes through.
    Device = 2,
}

impl Default for PacketSwitches {
    fn default() -> Self {
        Self {
            mark_bit: 11,
            snat_ports: (10_000, 29_999),
            masquerade_all: false,
            pods: PodSign::Address,
            cluster_ips_from_outside: true,
            keep_client: false,
            answer_pings: false,
        }
    }
}

/// A cluster has a handful of service CIDRs, and of Services that are left alone.
pub(in crate::datapath) const MAX_SERVICE_CIDRS: u32 = 1024;
/// Packets of which fragments are still to come; each for milliseconds.
const FRAGMENTED_PACKETS: u32 = 8192;
/// Whom this node's sockets talk to from ports among the NodePorts, which few have.
const MAX_OWN_PEERS: u32 = 4096;
/// Network devices of a node, and its addresses.
const MAX_DEVICES: u32 = 4096;
/// Pod CIDRs: one or two for each node of a large cluster.
const MAX_POD_RANGES: u32 = 16_384;

/// A map as this build makes it.
pub(in crate::datapath) struct Shape {
    pub(in crate::datapath) name: &'static str,
    kind: MapType,
    key: usize,
    value: usize,
    entries: u32,
}

pub(in crate::datapath) fn shapes(limits: &Limits) -> [Shape; maps::ALL.len()] {
    let shape = |name, kind, key, value, entries| Shape { name, kind, key, value, entries };
    let array = |name, value, entries| Shape { name, kind: MapType::Array, key: 4, value, entries };
    let Limits { frontends, backends, slots, affinity, peers, source_ranges, conntrack } = *limits;
    [
        // Twice: an address has an entry for its unknown ports too, which shall not cost a Service its place.
        shape(
            maps::FRONTENDS,
            MapType::Hash,
            size_of::<FrontendKey>(),
            size_of::<Frontend>(),
            frontends.saturating_mul(2),
        ),
        array(maps::SERVICES, 8, frontends.saturating_mul(WORDS_PER_SERVICE)),
        array(maps::TABLES, 8, slots),
        array(maps::BACKENDS, size_of::<Backend>(), backends),
        array(maps::CONNECTIONS, 8, backends),
        array(maps::CURSORS, 8, frontends),
        shape(maps::AFFINITY, MapType::LruHash, size_of::<AffinityKey>(), 8, affinity),
        shape(maps::SOCKETS, MapType::SkStorage, 4, size_of::<SocketState>(), 0),
        shape(maps::PEERS, MapType::LruHash, size_of::<PeerKey>(), size_of::<Peer>(), peers),
        shape(maps::PICKS, MapType::LruHash, size_of::<PickKey>(), 8, peers / 4 + 1),
        shape(maps::OWN_PEERS, MapType::LruHash, size_of::<OwnPeer>(), 4, MAX_OWN_PEERS),
        shape(maps::SOURCE_RANGES, MapType::LpmTrie, 4 + size_of::<SourceRange>(), 4, source_ranges),
        shape(maps::SERVICE_CIDRS, MapType::LpmTrie, 4 + size_of::<Addr>(), 4, MAX_SERVICE_CIDRS),
        shape(maps::NAMES, MapType::Hash, 4, size_of::<ServiceName>(), frontends),
        array(maps::META, 8, meta::SIZE),
        shape(maps::COUNTERS, MapType::PerCpuArray, 4, 8, counter::SIZE),
        shape(maps::CONNTRACK, MapType::LruHash, size_of::<Tuple>(), size_of::<Flow>(), conntrack),
        shape(maps::FRAGMENTS, MapType::LruHash, size_of::<FragmentKey>(), size_of::<Ports>(), FRAGMENTED_PACKETS),
        shape(maps::DEVICES, MapType::Hash, 4, size_of::<Device>(), MAX_DEVICES),
        shape(maps::NODE_ADDRESSES, MapType::Hash, size_of::<Addr>(), 4, MAX_DEVICES),
        shape(maps::POD_RANGES, MapType::LpmTrie, 4 + size_of::<Addr>(), 4, MAX_POD_RANGES),
        shape(maps::EVENTS, MapType::RingBuf, 0, 0, event::RING_BYTES),
    ]
}

/// The loaded object, and what was not as asked.
pub struct Loaded {
    /// Programs not yet attached; dropping it detaches nothing that is pinned.
    pub ebpf: Ebpf,
    /// The same for devices without a link layer; only its packet programs are of use.
    pub tunnels: Ebpf,
    /// Every map, held.
    pub maps: Vec<Pinned>,
    /// One sentence each: limits that a pinned map does not have.
    pub warnings: Vec<String>,
}

/// Loads the object; its maps are those pinned below `pins`, made there where they are missing.
///
/// # Errors
/// When bpffs cannot be written, when what is pinned is not what this build expects, or when the kernel refuses.
pub fn load(pins: &Pins, limits: &Limits, switches: Switches, features: Features) -> Result<Loaded> {
    for directory in [pins.maps(), pins.links()] {
        link::make_directory(&directory)
            .map_err(|e| Error::kernel(format!("creating the directory {}", directory.display()), e))?;
    }
    let mut warnings = Vec::new();
    let mut loader = EbpfLoader::new();
    for shape in shapes(limits) {
        let pin = pins.map(shape.name);
        let entries = match pinned_entries(&pin, &shape)? {
            Some(pinned) if pinned != shape.entries => {
                warnings.push(format!(
                    "map {} stays at {pinned} entries instead of {} because it is in use; the new limit takes effect after \
                     `sheave cleanup` or a reboot of the node",
                    shape.name, shape.entries
                ));
                pinned
            }
            Some(_) | None => shape.entries,
        };
        if shape.entries != 0 {
            loader.map_max_entries(shape.name, entries);
        }
        loader.map_pin_path(shape.name, pin);
    }
    let flag = u32::from;
    let (first_port, last_port) = switches.packets.snat_ports;
    let constants = [
        (globals::SET_RETVAL, flag(features.set_retval)),
        (globals::HOST_ONLY, flag(switches.host_only)),
        (globals::LOOPBACK_NODE_PORTS, flag(switches.loopback_node_ports)),
        (globals::BIND_PROTECTION, flag(switches.bind_protection)),
        (globals::DISCARD, flag(features.discard)),
        (globals::MPTCP, flag(features.mptcp == Mptcp::Seen)),
        (globals::TRACK_TCP, flag(switches.track_tcp)),
        (globals::MARK, 1 << switches.packets.mark_bit),
        (globals::SNAT_FIRST, first_port.into()),
        (globals::SNAT_COUNT, u32::from(last_port.saturating_sub(first_port)) + 1),
        (globals::MASQUERADE_ALL, flag(switches.packets.masquerade_all)),
        (globals::DETECT_PODS, switches.packets.pods as u32),
        (globals::CLUSTER_IPS_INSIDE_ONLY, flag(!switches.packets.cluster_ips_from_outside)),
        (globals::KEEP_CLIENT, flag(switches.packets.keep_client)),
        (globals::ANSWER_PINGS, flag(switches.packets.answer_pings)),
        (globals::CSUM_IPV6, flag(features.csum_ipv6)),
        (globals::CURRENT_TASK, flag(features.current_task)),
    ];
    for (name, value) in &constants {
        loader.override_global(name, value, true);
    }
    loader.override_global(globals::HOST_NETNS, &features.host_netns, true);
    let refused = |e| Error::Incompatible(format!("the kernel refused the maps of sheave: {}", flatten(&e)));
    let ebpf = loader.load(OBJECT).map_err(refused)?;
    loader.override_global(globals::LINK_HEADER, &0_u32, true);
    let tunnels = loader.load(OBJECT).map_err(refused)?;
    let held = |name: &&str| {
        let pin = pins.map(name);
        Pinned::open(pin.clone()).map_err(|e| Error::kernel(format!("opening the pin {}", pin.display()), e))
    };
    let maps = maps::ALL.iter().map(held).collect::<Result<_>>()?;
    Ok(Loaded { ebpf, tunnels, maps, warnings })
}

/// How many entries a pinned map has; `None` when there is no pin. aya would reuse a pin of any shape silently.
pub(in crate::datapath) fn pinned_entries(pin: &Path, shape: &Shape) -> Result<Option<u32>> {
    if !pin.exists() {
        return Ok(None);
    }
    let foreign = |what: String| {
        Error::Incompatible(format!(
            "{} is not a map of this version of sheave ({what}); remove it with `sheave cleanup`",
            pin.display()
        ))
    };
    let map = MapData::from_pin(pin).map_err(|e| foreign(flatten(&e)))?;
    let _open = map.fd().as_fd();
    let info = map.info().map_err(|e| foreign(flatten(&e)))?;
    let kind = info.map_type().map_err(|e| foreign(flatten(&e)))?;
    let found = (kind, info.key_size() as usize, info.value_size() as usize);
    if found != (shape.kind, shape.key, shape.value) {
        return Err(foreign(format!(
            "a {kind:?} with keys of {} and values of {} bytes, where a {:?} with {} and {} is wanted",
            found.1, found.2, shape.kind, shape.key, shape.value
        )));
    }
    Ok(Some(info.max_entries()))
}
