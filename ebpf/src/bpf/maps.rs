//! Every map and every constant, with wrappers that copy values out of hash maps at once: the kernel reuses a hash
//! element under a reader's pointer as soon as it is replaced or deleted.
#![expect(clippy::undocumented_unsafe_blocks, reason = "every block copies one value out of a live map element")]

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, BPF_SK_STORAGE_GET_F_CREATE, bpf_sock},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf, SkStorage, lpm_trie::Key},
    helpers::{bpf_get_netns_cookie, bpf_sk_storage_get},
    macros::btf_map,
    maps::ring_buf::RingBufEntry,
    programs::{SockAddrContext, SockContext},
};
use core::ptr;
use sheave_ebpf::{
    addr::Addr,
    affinity::AffinityKey,
    backend::Backend,
    conntrack::{Flow, FragmentKey, Ports, Tuple},
    counter,
    device::{self, Device},
    event::{self, Event},
    frontend::{Frontend, FrontendKey},
    meta,
    names::ServiceName,
    service::{Config, Scope, WORDS_PER_SERVICE, Word, config_index, word_index},
    socket::{OwnPeer, Peer, PeerKey, PickKey, SocketState},
    source_range::{FULL_BITS, SourceRange},
};

// Sizes here are the defaults of the agent's flags; the loader overrides them.
const FRONTEND_COUNT: usize = 65_536;
const BACKEND_COUNT: usize = 262_144;
const MMAPABLE: usize = BPF_F_MMAPABLE as usize;
const ON_DEMAND: usize = BPF_F_NO_PREALLOC as usize;

#[btf_map]
static FRONTENDS: HashMap<FrontendKey, Frontend, { 2 * FRONTEND_COUNT }, ON_DEMAND> = HashMap::new();
#[btf_map]
static SERVICES: Array<u64, { FRONTEND_COUNT * WORDS_PER_SERVICE as usize }, MMAPABLE> = Array::new();
#[btf_map]
static TABLES: Array<u64, 1_048_576, MMAPABLE> = Array::new();
#[btf_map]
static BACKENDS: Array<Backend, BACKEND_COUNT, MMAPABLE> = Array::new();
#[btf_map]
static CONNECTIONS: Array<u64, BACKEND_COUNT, MMAPABLE> = Array::new();
#[btf_map]
static CURSORS: Array<u64, FRONTEND_COUNT> = Array::new();
#[btf_map]
static AFFINITY: LruHashMap<AffinityKey, u64, 65_536> = LruHashMap::new();
#[btf_map]
static SOCKETS: SkStorage<SocketState> = SkStorage::new();
#[btf_map]
static PEERS: LruHashMap<PeerKey, Peer, 65_536> = LruHashMap::new();
#[btf_map]
static PICKS: LruHashMap<PickKey, u64, 16_384> = LruHashMap::new();
#[btf_map]
static OWN_PEERS: LruHashMap<OwnPeer, u32, 4_096> = LruHashMap::new();
#[btf_map]
static SOURCE_RANGES: LpmTrie<SourceRange, u32, 65_536> = LpmTrie::new();
#[btf_map]
static SERVICE_CIDRS: LpmTrie<Addr, u32, 1024> = LpmTrie::new();
/// No program reads it; it is here so that the loader creates and pins it with the others.
#[btf_map]
static NAMES: HashMap<u32, ServiceName, FRONTEND_COUNT, ON_DEMAND> = HashMap::new();
#[btf_map]
static META: Array<u64, { meta::SIZE as usize }, MMAPABLE> = Array::new();
#[btf_map]
static COUNTERS: PerCpuArray<u64, { counter::SIZE as usize }> = PerCpuArray::new();
#[btf_map]
static CONNTRACK: LruHashMap<Tuple, Flow, 262_144> = LruHashMap::new();
#[btf_map]
static FRAGMENTS: LruHashMap<FragmentKey, Ports, 8_192> = LruHashMap::new();
#[btf_map]
static DEVICES: HashMap<u32, Device, 4_096, ON_DEMAND> = HashMap::new();
#[btf_map]
static NODE_ADDRESSES: HashMap<Addr, u32, 4_096, ON_DEMAND> = HashMap::new();
#[btf_map]
static POD_RANGES: LpmTrie<Addr, u32, 16_384> = LpmTrie::new();
#[btf_map]
static EVENTS: RingBuf<Event, { event::RING_BYTES as usize }> = RingBuf::new();

// Not pinned: a new agent's programs begin anew.
/// See [`clock`].
#[unsafe(no_mangle)]
static mut CLOCK: u64 = 0;
/// See [`errors_paid`].
#[unsafe(no_mangle)]
static mut ERRORS_PAID: u64 = 0;

#[unsafe(no_mangle)]
static SET_RETVAL: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static HOST_NETNS: Global<u64> = Global::new(0);
#[unsafe(no_mangle)]
static HOST_ONLY: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static LOOPBACK_NODE_PORTS: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static BIND_PROTECTION: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static DISCARD: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static MPTCP: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static TRACK_TCP: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static MARK: Global<u32> = Global::new(0x800);
#[unsafe(no_mangle)]
static SNAT_FIRST: Global<u32> = Global::new(10_000);
#[unsafe(no_mangle)]
static SNAT_COUNT: Global<u32> = Global::new(20_000);
#[unsafe(no_mangle)]
static MASQUERADE_ALL: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static DETECT_PODS: Global<u32> = Global::new(1);
#[unsafe(no_mangle)]
static CLUSTER_IPS_INSIDE_ONLY: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static KEEP_CLIENT: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static ANSWER_PINGS: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static CSUM_IPV6: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static LINK_HEADER: Global<u32> = Global::new(14);
#[unsafe(no_mangle)]
static CURRENT_TASK: Global<u32> = Global::new(0);

macro_rules! switches {
    ($($name:ident: $global:ident;)*) => {
        $(#[inline(always)]
        pub fn $name() -> bool {
            $global.load() == 1
        })*
    };
}
switches! {
    has_set_retval: SET_RETVAL;
    host_only: HOST_ONLY;
    loopback_node_ports: LOOPBACK_NODE_PORTS;
    bind_protection: BIND_PROTECTION;
    has_discard: DISCARD;
    has_mptcp: MPTCP;
    track_tcp: TRACK_TCP;
    masquerade_all: MASQUERADE_ALL;
    detects_pods_by_address: DETECT_PODS;
    cluster_ips_inside_only: CLUSTER_IPS_INSIDE_ONLY;
    keep_client: KEEP_CLIENT;
    answer_pings: ANSWER_PINGS;
    has_csum_ipv6: CSUM_IPV6;
    has_current_task: CURRENT_TASK;
}

/// Whether pods are told from other clients at all.
#[inline(always)]
pub fn detects_pods() -> bool {
    DETECT_PODS.load() != 0
}

/// Mark of a packet whose client is to be masqueraded at egress.
#[inline(always)]
pub fn masquerade_mark() -> u32 {
    MARK.load()
}

/// Mark of a reply whose client was restored at ingress.
#[inline(always)]
pub fn reply_mark() -> u32 {
    MARK.load() << 1
}

/// First port, and number of ports, that masquerade clients.
#[inline(always)]
pub fn snat_ports() -> (u32, u32) {
    (SNAT_FIRST.load(), SNAT_COUNT.load())
}

/// Bytes before the network header.
#[inline(always)]
pub fn link_header() -> u32 {
    LINK_HEADER.load()
}

/// Pointer to a word: a number of ticks and the seconds of the monotonic clock at that time.
#[inline(always)]
pub fn clock() -> *mut u64 {
    &raw mut CLOCK
}

/// Pointer to a word: the time at which all ICMP errors so far are paid for, in ns of the monotonic clock.
#[inline(always)]
pub fn errors_paid() -> *mut u64 {
    &raw mut ERRORS_PAID
}

/// Cookie of the network namespace that the socket of this context lives in. Needs Linux ≥ 5.7.
#[inline(always)]
pub fn netns(ctx: &SockAddrContext) -> u64 {
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) }
}

#[inline(always)]
pub fn is_host(netns: u64) -> bool {
    netns == HOST_NETNS.load()
}

/// Whether the socket of this context is known to be none of the host's: before Linux 5.14 nothing is known.
#[inline(always)]
pub fn is_a_pods(ctx: &SockAddrContext) -> bool {
    HOST_NETNS.load() != 0 && !is_host(netns(ctx))
}

/// As [`netns`] and [`is_host`], where the context is the socket.
#[inline(always)]
pub fn is_host_socket(ctx: &SockContext) -> bool {
    unsafe { bpf_get_netns_cookie(ctx.as_ptr()) == HOST_NETNS.load() }
}

#[inline(always)]
pub fn frontend(key: &FrontendKey) -> Option<Frontend> {
    let value = FRONTENDS.get_ptr(key)?;
    // One load, so that the two halves belong together.
    let whole = unsafe { value.cast::<u64>().read_volatile() };
    Some(Frontend { service: whole as u32, kind: (whole >> 32) as u32 })
}

#[inline(always)]
pub fn word(service: u32, scope: Scope) -> Option<Word> {
    let word = SERVICES.get_ptr(word_index(service, scope))?;
    Some(Word(unsafe { word.read_volatile() }))
}

#[inline(always)]
pub fn config(service: u32) -> Config {
    SERVICES.get_ptr(config_index(service)).map_or(Config(0), |word| Config(unsafe { word.read_volatile() }))
}

/// The backend id in a slot.
#[inline(always)]
pub fn slot(index: u32) -> Option<u32> {
    TABLES.get(index).map(|id| *id as u32)
}

#[inline(always)]
pub fn backend(id: u32) -> Option<&'static Backend> {
    BACKENDS.get(id)
}

/// Pointer to a backend's `CONNECTIONS` word.
#[inline(always)]
pub fn connections(id: u32) -> Option<*mut u64> {
    CONNECTIONS.get_ptr_mut(id)
}

#[inline(always)]
pub fn cursor(service: u32) -> Option<*mut u64> {
    CURSORS.get_ptr_mut(service)
}

/// Pointer to an affinity word: read and write it whole, by one volatile access.
#[inline(always)]
pub fn affinity(key: &AffinityKey) -> Option<*mut u64> {
    AFFINITY.get_ptr_mut(key)
}

#[inline(always)]
pub fn insert_affinity(key: &AffinityKey, word: u64, flags: u64) -> Result<(), i32> {
    AFFINITY.insert(key, &word, flags)
}

#[inline(always)]
pub fn peer(key: &PeerKey) -> Option<Peer> {
    PEERS.get_ptr(key).map(|peer| unsafe { *peer })
}

#[inline(always)]
pub fn insert_peer(key: &PeerKey, peer: &Peer) -> Result<(), i32> {
    PEERS.insert(key, peer, 0)
}

#[inline(always)]
pub fn remove_peer(key: &PeerKey) {
    let _missing = PEERS.remove(key);
}

/// The backend id that a socket sent to when it last used a service.
#[inline(always)]
pub fn pick(key: &PickKey) -> Option<u32> {
    PICKS.get_ptr(key).map(|id| unsafe { *id } as u32)
}

#[inline(always)]
pub fn insert_pick(key: &PickKey, id: u32) -> Result<(), i32> {
    PICKS.insert(key, &u64::from(id), 0)
}

#[inline(always)]
pub fn is_own_peer(peer: &OwnPeer) -> bool {
    OWN_PEERS.get_ptr(peer).is_some()
}

#[inline(always)]
pub fn insert_own_peer(peer: &OwnPeer) -> Result<(), i32> {
    OWN_PEERS.insert(peer, &1, 0)
}

/// Whether a port, in host order, lies between the first NodePort and the last.
#[inline(always)]
pub fn is_among_node_ports(port: u32) -> bool {
    let range = meta_word(meta::NODE_PORTS) as u32;
    range & 0xffff <= port && port <= range >> 16
}

#[inline(always)]
pub fn in_source_ranges(range: &SourceRange) -> bool {
    SOURCE_RANGES.get(&Key::new(FULL_BITS, *range)).is_some()
}

/// Whether an address lies between the first and the last that has an entry for unknown ports, or is a service CIDR's: a
/// compare or two instead of two look-ups, for everything that is no Service's.
#[inline(always)]
pub fn is_near_a_guarded_address(addr: &Addr) -> bool {
    is_within(addr, if addr.is_v4() { meta::GUARDED_V4 } else { meta::GUARDED_V6 })
}

/// The same of addresses whose unknown ports are refused to clients outside alone.
#[inline(always)]
pub fn is_near_one_guarded_outside(addr: &Addr) -> bool {
    is_within(addr, if addr.is_v4() { meta::GUARDED_OUTSIDE_V4 } else { meta::GUARDED_OUTSIDE_V6 })
}

#[inline(always)]
fn is_within(addr: &Addr, [first, last]: [u32; 2]) -> bool {
    let place = addr.place();
    meta_word(first) <= place && place <= meta_word(last)
}

#[inline(always)]
pub fn in_service_cidrs(addr: &Addr) -> bool {
    SERVICE_CIDRS.get(&Key::new(128, *addr)).is_some_and(|silent| *silent == 1)
}

#[inline(always)]
pub fn counter(index: u32) -> Option<*mut u64> {
    COUNTERS.get_ptr_mut(index)
}

/// The socket's state, or null. aya-ebpf's wrappers take the socket of a `SockAddrContext` only.
#[inline(always)]
pub fn state(sock: *mut bpf_sock) -> *mut SocketState {
    storage(sock, ptr::null_mut(), 0)
}

/// The socket's state, made from `initial` where there is none; null when memory is short.
#[inline(always)]
pub fn state_or(sock: *mut bpf_sock, initial: &mut SocketState) -> *mut SocketState {
    storage(sock, initial, BPF_SK_STORAGE_GET_F_CREATE.into())
}

#[inline(always)]
fn storage(sock: *mut bpf_sock, initial: *mut SocketState, flags: u64) -> *mut SocketState {
    let map = ptr::from_ref(&SOCKETS).cast_mut().cast();
    unsafe { bpf_sk_storage_get(map, sock.cast(), initial.cast(), flags).cast() }
}

/// Pointer to an entry. Copy the entry at once; `seen` may be written through it, whole.
#[inline(always)]
pub fn flow(tuple: &Tuple) -> Option<*mut Flow> {
    CONNTRACK.get_ptr_mut(tuple)
}

#[inline(always)]
pub fn insert_flow(tuple: &Tuple, flow: &Flow, flags: u32) -> Result<(), i32> {
    CONNTRACK.insert(tuple, flow, flags.into())
}

/// Whether it was there: of several CPUs that remove one entry, one hears so.
#[inline(always)]
pub fn remove_flow(tuple: &Tuple) -> bool {
    CONNTRACK.remove(tuple).is_ok()
}

/// The ports of the packet that a fragment belongs to.
#[inline(always)]
pub fn fragment(key: &FragmentKey) -> Option<Ports> {
    FRAGMENTS.get_ptr(key).map(|ports| unsafe { *ports })
}

#[inline(always)]
pub fn remove_fragment(key: &FragmentKey) {
    let _absent = FRAGMENTS.remove(key);
}

#[inline(always)]
pub fn insert_fragment(key: &FragmentKey, ports: &Ports) -> Result<(), i32> {
    FRAGMENTS.insert(key, ports, 0)
}

#[inline(always)]
pub fn device(index: u32) -> Option<Device> {
    DEVICES.get_ptr(&index).map(|device| unsafe { *device })
}

#[inline(always)]
pub fn is_own_address(addr: &Addr) -> bool {
    NODE_ADDRESSES.get_ptr(addr).is_some()
}

/// `RANGE_…`, or 0 for what is no pod's address.
#[inline(always)]
pub fn pod_range(addr: &Addr) -> u32 {
    POD_RANGES.get(&Key::new(device::FULL_BITS, *addr)).map_or(0, |range| *range)
}

/// Room for a record; `None` when the reader is behind.
#[inline(always)]
pub fn event() -> Option<RingBufEntry<Event>> {
    EVENTS.reserve(0)
}

/// Pointer to a word of `META`.
#[inline(always)]
pub fn meta(index: u32) -> Option<*mut u64> {
    META.get_ptr_mut(index)
}

/// A word of `META`.
#[inline(always)]
pub fn meta_word(index: u32) -> u64 {
    meta(index).map_or(0, |word| unsafe { word.read_volatile() })
}
