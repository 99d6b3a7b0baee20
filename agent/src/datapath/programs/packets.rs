//! The packet path's side of the agent: every device has its programs, and the programs know this node's devices,
//! addresses and pods.

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    net::IpAddr,
    time::Duration,
};

use aya::{
    Ebpf, Pod,
    maps::{HashMap, LpmTrie, Map, MapData, lpm_trie},
};
use ipnet::IpNet;
use sheave_ebpf::{
    addr::Addr,
    device::{ADDRESS_OF_NODE, ADDRESS_OWN, DEVICE_OF_PODS, Device as Lent, RANGE_OWN_PODS, RANGE_PODS},
    maps,
};

use rtnetlink::Handle;
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval},
};

use crate::datapath::{
    Error, Result,
    host::{
        addresses::tell_if_new,
        devices::{Device, Nature, Role},
    },
    prefix_bits,
    programs::{
        load::Loaded,
        tc::{self, Hold},
        workload_watch::{Equipment, WorkloadWatch},
    },
    tables::{
        pinned::{self, failed, removed},
        pins::Pins,
    },
};
use crate::{
    lifecycle::upkeep::{PERIOD, Part, Upkeep},
    options::{FromPods, PacketOptions, TcAttach},
};

/// Networks whose addresses are pods', and whether they are this node's.
pub type PodRanges = BTreeMap<IpNet, bool>;

/// How often to check whether the programs need those of workload devices.
const LOOK: Duration = Duration::from_secs(1);

/// What the plan wants of the packet path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// Sources in these networks are pods.
    pub pods: PodRanges,
    /// The addresses of this node's object; none while there is no such object, as when a node registers again.
    pub node: BTreeSet<IpAddr>,
    /// Clients outside the cluster have something to dial.
    pub serves_outsiders: bool,
    /// What pods send is translated packet by packet: some Service admits this node's pods by the addresses of their
    /// packets, or uses a protocol for whose sockets the kernel has no hook.
    pub pods_dial: bool,
}

/// What [`start`] hands out.
pub struct Control {
    orders: watch::Sender<Option<Orders>>,
    workloads: watch::Receiver<bool>,
}

/// The other end of [`Control`].
pub struct Ordered {
    orders: watch::Receiver<Option<Orders>>,
    tell: watch::Sender<bool>,
}

impl Control {
    /// Gives new orders, and waits a little for what has to be in place before somebody outside dials.
    pub async fn order(&mut self, orders: Orders) {
        let serves_outsiders = orders.serves_outsiders;
        let orders = Some(orders);
        let changed = tell_if_new(&self.orders, orders);
        if changed && serves_outsiders && !*self.workloads.borrow() {
            drop(tokio::time::timeout(LOOK, self.workloads.wait_for(|are_on| *are_on)).await);
        }
    }
}

/// The programs, and the same for devices without a link layer.
struct Programs {
    ethernet: Ebpf,
    tunnels: Ebpf,
}

impl Programs {
    const fn of(&mut self, nature: Nature) -> &mut Ebpf {
        match nature {
            Nature::Tunnel => &mut self.tunnels,
            Nature::None | Nature::Unreadable | Nature::Workload | Nature::Overlay | Nature::Uplink => {
                &mut self.ethernet
            }
        }
    }
}

/// Programs, and the tables that only they read.
pub struct Packets {
    programs: Programs,
    pins: Pins,
    options: PacketOptions,
    /// What each device has, by index.
    devices: BTreeMap<u32, Carrier>,
    /// Devices that could not be given what they should have, and their names.
    lacking: BTreeMap<u32, String>,
    /// The addresses of this node's object; before the first orders, as a predecessor knew them.
    node: BTreeSet<IpAddr>,
    watch: WorkloadWatch,
    lent: HashMap<MapData, u32, Lent>,
    addresses: HashMap<MapData, Addr, u32>,
    pods: LpmTrie<MapData, Addr, u32>,
}

/// A device, and its programs if it needs any.
struct Carrier {
    name: String,
    role: Option<Role>,
    hold: Option<Hold>,
}

impl Carrier {
    /// Takes the programs off a device that needs none.
    fn detach(&self) {
        if let Some(Hold::Tcx(links)) = &self.hold {
            // A device that is gone has none.
            links.iter().for_each(|link| drop(link.detach()));
        }
    }

    /// Pins that go with the device, or with the need for programs, are not missed.
    fn forget(&self, upkeep: &Upkeep) {
        if let Some(Hold::Tcx(links)) = &self.hold {
            for link in links {
                upkeep.note::<Error>(Part::Pin, link.path().display(), Ok(false));
            }
        }
    }
}

impl Packets {
    /// Loads the programs; attaches none yet.
    ///
    /// # Errors
    /// When the verifier refuses a program, or a pinned map is not what this build expects.
    pub fn open(loaded: Loaded, pins: &Pins, options: PacketOptions) -> Result<Self> {
        let Loaded { ebpf: mut ethernet, mut tunnels, .. } = loaded;
        tc::load(&mut ethernet)?;
        tc::load(&mut tunnels)?;
        let meta = pinned::words(pins, maps::META)?;
        let watch = WorkloadWatch::adopt(meta, options.from_pods == FromPods::Always);
        let addresses: HashMap<_, Addr, u32> = pinned::open(pins, maps::NODE_ADDRESSES, Map::HashMap)?;
        let known = addresses.iter().filter_map(std::result::Result::ok);
        let node = known.filter(|(_, is)| is & ADDRESS_OF_NODE != 0).map(|(address, _)| address.into()).collect();
        Ok(Self {
            programs: Programs { ethernet, tunnels },
            options,
            devices: BTreeMap::new(),
            lacking: BTreeMap::new(),
            node,
            watch,
            lent: pinned::open(pins, maps::DEVICES, Map::HashMap)?,
            addresses,
            pods: pinned::open(pins, maps::POD_RANGES, Map::LpmTrie)?,
            pins: pins.clone(),
        })
    }

    /// The channel through which it learns what is wanted.
    #[must_use]
    pub fn control(&self) -> (Control, Ordered) {
        let (give, orders) = watch::channel(None);
        let (tell, workloads) = watch::channel(self.watch.equipment() != Equipment::Bare);
        (Control { orders: give, workloads }, Ordered { orders, tell })
    }

    /// Updates the kernel to the devices there are. What fails is noted and tried again soon.
    pub async fn set_devices(&mut self, netlink: &Handle, devices: &[Device], upkeep: &Upkeep) {
        if let Err(error) = self.write_addresses(devices) {
            tracing::warn!(%error, "cannot update this node's addresses for the packet path");
        }
        let lacked = std::mem::take(&mut self.lacking);
        for device in devices {
            let role = self.role(device);
            let known = self.devices.get(&device.index);
            if known.is_some_and(|known| known.name == device.name && known.role == role) {
                continue;
            }
            let equipped = self.equip(device, role, netlink).await;
            upkeep.note(Part::Device, &device.name, equipped.as_ref().map(|_| false));
            match equipped {
                Ok(hold) => {
                    let carrier = Carrier { name: device.name.clone(), role, hold };
                    if let Some(old) = self.devices.insert(device.index, carrier) {
                        if role.is_none() {
                            old.detach();
                        }
                        old.forget(upkeep);
                    }
                }
                Err(_) => drop(self.lacking.insert(device.index, device.name.clone())),
            }
        }
        // A device may vanish while we look at it: what it lacked is no loss any more.
        for (_, name) in lacked.iter().filter(|(index, name)| self.lacking.get(index) != Some(name)) {
            upkeep.note::<Error>(Part::Device, name, Ok(false));
        }
        let present: BTreeSet<u32> = devices.iter().map(|device| device.index).collect();
        self.devices.retain(|index, carrier| {
            let is_there = present.contains(index);
            if !is_there {
                carrier.forget(upkeep);
            }
            is_there
        });
        // What lacks one of its programs may have the other, or a predecessor's.
        let is_wanted = |index| {
            self.lacking.contains_key(&index) || self.devices.get(&index).is_some_and(|carrier| carrier.role.is_some())
        };
        if let Err(error) = tc::prune(&self.pins, &is_wanted) {
            tracing::warn!(%error, "cannot remove the links of devices that are gone");
        }
        self.watch.tell_programs();
    }

    async fn equip(&mut self, device: &Device, role: Option<Role>, netlink: &Handle) -> Result<Option<Hold>> {
        let Some(role) = role else {
            tc::remove_filters_of(&device.name);
            return Ok(None);
        };
        if device.nature == Nature::Unreadable {
            let unserved =
                "clients that come through it are not served: the packet programs cannot read its link layer";
            return Err(Error::Incompatible(unserved.to_owned()));
        }
        if self.options.attach == TcAttach::Clsact || !tc::is_tcx_there() {
            tc::check_qdisc(netlink, device.index).await?;
        }
        let hold = tc::attach(self.programs.of(device.nature), &self.pins, device, role, self.options.attach)?;
        tracing::info!(device = device.name, ?role, by = hold.name(), "attached the packet programs to a device");
        Ok(Some(hold))
    }

    /// Puts back what somebody has detached or unpinned.
    pub async fn mend(&mut self, netlink: &Handle, devices: &[Device], upkeep: &Upkeep) {
        let mut lost = Vec::new();
        for (index, carrier) in &self.devices {
            let is_there = match &carrier.hold {
                None => continue,
                Some(Hold::Tcx(links)) => links.iter().all(|link| link.is_attached().unwrap_or(false)),
                Some(Hold::Clsact) => tc::has_filters(netlink, *index).await,
            };
            if !is_there {
                lost.push(*index);
            } else if let Some(Hold::Tcx(links)) = &carrier.hold {
                for link in links {
                    upkeep.note(Part::Pin, link.path().display(), link.mend());
                }
            }
        }
        if lost.is_empty() {
            return;
        }
        let names =
            lost.iter().filter_map(|index| Some((*index, self.devices.remove(index)?.name))).collect::<Vec<_>>();
        self.set_devices(netlink, devices, upkeep).await;
        for (index, name) in names {
            // A device that went with its links is no loss.
            if self.devices.contains_key(&index) {
                upkeep.note::<Error>(Part::Device, name, Ok(true));
            }
        }
    }

    fn role(&self, device: &Device) -> Option<Role> {
        let role = device.role(&self.options.devices, &self.node)?;
        match self.watch.equipment() {
            Equipment::Clients => Some(Role::Clients),
            Equipment::Bare if role == Role::Workloads && device.nature == Nature::Workload => None,
            Equipment::Bare | Equipment::Leaving | Equipment::Replies => Some(role),
        }
    }

    /// Sources in these networks are pods.
    ///
    /// # Errors
    /// What the kernel refused.
    pub fn set_pod_ranges(&mut self, ranges: &PodRanges) -> Result<()> {
        let value = |own: bool| if own { RANGE_OWN_PODS } else { RANGE_PODS };
        let entry = |(net, own): (&IpNet, &bool)| ((prefix_bits(net), Addr::from(net.network())), value(*own));
        let wanted: BTreeMap<(u32, Addr), u32> = ranges.iter().map(entry).collect();
        let present: Vec<_> = self.pods.keys().filter_map(std::result::Result::ok).collect();
        for ((bits, addr), value) in &wanted {
            let key = lpm_trie::Key::new(*bits, *addr);
            self.pods
                .insert(&key, *value, 0)
                .map_err(|e| failed(e, maps::POD_RANGES, 16_384, Some("--cluster-cidr")))?;
        }
        for key in present.into_iter().filter(|key| !wanted.contains_key(&(key.prefix_len(), key.data()))) {
            removed(self.pods.remove(&key), maps::POD_RANGES)?;
        }
        Ok(())
    }

    fn write_addresses(&mut self, devices: &[Device]) -> Result<()> {
        let own = devices.iter().flat_map(|device| &device.addresses);
        let flags = |ip| ADDRESS_OWN | if self.node.contains(ip) { ADDRESS_OF_NODE } else { 0 };
        let own = own.map(|ip| (Addr::from(*ip), flags(ip))).collect();
        let addresses = sync(&mut self.addresses, maps::NODE_ADDRESSES, &own);
        let flags = |device: &Device| if self.options.detection.is_of_pods(&device.name) { DEVICE_OF_PODS } else { 0 };
        let lent = |device| Lent { flags: flags(device), ..lent(device, devices) };
        let lent = devices.iter().map(|device| (device.index, lent(device))).collect();
        addresses.and(sync(&mut self.lent, maps::DEVICES, &lent)) // eager: one map that is full spoils only itself
    }
}

/// Takes the programs off every device.
///
/// # Errors
/// When a pin cannot be removed.
pub fn detach(pins: &Pins) -> Result<()> {
    tc::remove_filters(false);
    tc::prune(pins, &|_| false)
}

/// Keeps the packet path up to date for as long as its control lives. Before the first orders, what a predecessor left
/// stays.
///
/// # Errors
/// When netlink cannot be used.
pub async fn start(
    mut packets: Packets,
    ordered: Ordered,
    devices: watch::Receiver<Vec<Device>>,
    upkeep: Upkeep,
) -> io::Result<()> {
    let (connection, netlink, _) = rtnetlink::new_connection()?;
    tokio::spawn(connection);
    let present = devices.borrow().clone();
    packets.set_devices(&netlink, &present, &upkeep).await;
    tokio::spawn(follow(packets, netlink, devices, ordered, upkeep));
    Ok(())
}

async fn follow(
    mut packets: Packets,
    netlink: Handle,
    mut devices: watch::Receiver<Vec<Device>>,
    mut ordered: Ordered,
    upkeep: Upkeep,
) {
    let (mut look, mut tend) = (interval(LOOK), interval(PERIOD));
    tend.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let more = tokio::select! {
            more = devices.changed() => more,
            more = ordered.orders.changed() => {
                let orders = ordered.orders.borrow_and_update().clone();
                if let Some(Orders { pods, node, serves_outsiders, pods_dial }) = orders {
                    if !node.is_empty() {
                        packets.node = node;
                    }
                    packets.watch.order(serves_outsiders, pods_dial);
                    if let Err(error) = packets.set_pod_ranges(&pods) {
                        tracing::warn!(%error, "cannot update which addresses are pods' for the packet path");
                    }
                }
                packets.watch.look();
                more
            }
            _ = look.tick() => {
                if !packets.watch.look() && packets.lacking.is_empty() {
                    continue;
                }
                Ok(())
            }
            _ = tend.tick() => {
                let devices = devices.borrow().clone();
                packets.mend(&netlink, &devices, &upkeep).await;
                upkeep.report();
                continue;
            }
        };
        if more.is_err() {
            return;
        }
        let present = devices.borrow_and_update().clone();
        packets.set_devices(&netlink, &present, &upkeep).await;
        ordered.tell.send_replace(packets.watch.equipment() != Equipment::Bare);
    }
}

/// The addresses that a device lends to masqueraded clients: its own first address, else that of the device with the
/// default route, which a workload of this node reaches as well.
fn lent(device: &Device, devices: &[Device]) -> Lent {
    let uplinks = devices.iter().filter(|device| device.has_default_route);
    let others = uplinks.chain(devices);
    let first = |is_wanted: fn(&IpAddr) -> bool| {
        let mut candidates = std::iter::once(device).chain(others.clone()).flat_map(|device| &device.addresses);
        candidates.find(|ip| is_wanted(ip)).map_or(Addr { words: [0; 4] }, |ip| Addr::from(*ip))
    };
    Lent { v4: first(IpAddr::is_ipv4), v6: first(IpAddr::is_ipv6), flags: 0, zero: 0 }
}

/// Makes a map hold exactly `wanted`; writes what differs, last what takes room.
fn sync<K: Pod + Ord, V: Pod + PartialEq>(
    map: &mut HashMap<MapData, K, V>,
    name: &'static str,
    wanted: &BTreeMap<K, V>,
) -> Result<()> {
    let full = |e| failed(e, name, 4096, None);
    let present: Vec<K> = map.keys().filter_map(std::result::Result::ok).collect();
    for key in present.iter().filter(|key| !wanted.contains_key(key)) {
        removed(map.remove(key), name)?;
    }
    for (key, value) in wanted {
        if map.get(key, 0).ok().as_ref() != Some(value) {
            map.insert(key, value, 0).map_err(full)?;
        }
    }
    Ok(())
}
