//! Every map and every constant, with wrappers that copy values out of hash maps at once: the kernel reuses a hash
//! element under a reader's pointer as soon as it is replaced or deleted.
#![expect(clippy::undocumented_unsafe_blocks, reason = "every block copies one value out of a live map element")]

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC, bpf_sock},
    btf_maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, SkStorage, lpm_trie::Key},
    helpers::{bpf_get_netns_cookie, bpf_sk_storage_get},
    macros::btf_map,
    programs::{SockAddrContext, SockContext},
};
use core::ptr;
use sheave_ebpf::{
    addr::Addr,
    affinity::AffinityKey,
    backend::Backend,
    counter,
    frontend::{Frontend, FrontendKey},
    meta,
    names::ServiceName,
    service::{Config, Scope, WORDS_PER_SERVICE, Word, config_index, word_index},
    socket::{Peer, PeerKey, SocketState},
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
static SOURCE_RANGES: LpmTrie<SourceRange, u32, 65_536> = LpmTrie::new();
#[btf_map]
static SERVICE_CIDRS: LpmTrie<Addr, u32, 1024> = LpmTrie::new();
/// No program reads it; it is here so that the loader creates and pins it with the others.
#[btf_map]
static NAMES: HashMap<u32, ServiceName, FRONTEND_COUNT, ON_DEMAND> = HashMap::new();
/// No program reads it.
#[btf_map]
static META: Array<u64, { meta::SIZE as usize }, MMAPABLE> = Array::new();
#[btf_map]
static COUNTERS: PerCpuArray<u64, { counter::SIZE as usize }> = PerCpuArray::new();

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
static HAS_SERVICE_CIDRS: Global<u32> = Global::new(0);
#[unsafe(no_mangle)]
static TRACK_TCP: Global<u32> = Global::new(0);

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
    has_service_cidrs: HAS_SERVICE_CIDRS;
    track_tcp: TRACK_TCP;
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

#[inline(always)]
pub fn in_source_ranges(range: &SourceRange) -> bool {
    SOURCE_RANGES.get(&Key::new(FULL_BITS, *range)).is_some()
}

#[inline(always)]
pub fn in_service_cidrs(addr: &Addr) -> bool {
    SERVICE_CIDRS.get(&Key::new(128, *addr)).is_some()
}

#[inline(always)]
pub fn counter(index: u32) -> Option<*mut u64> {
    COUNTERS.get_ptr_mut(index)
}

/// The socket's state, or null.
#[inline(always)]
pub fn state(ctx: &SockAddrContext) -> *mut SocketState {
    unsafe { SOCKETS.get_ptr_mut(ctx) }
}

/// The socket's state, made from `initial` where there is none; null when memory is short.
#[inline(always)]
pub fn state_or(ctx: &SockAddrContext, initial: &mut SocketState) -> *mut SocketState {
    unsafe { SOCKETS.get_or_insert_ptr_mut(ctx, Some(initial)) }
}

/// The state of the socket that is the context. aya-ebpf's wrapper takes a `SockAddrContext` only.
#[inline(always)]
pub fn state_of(sock: *mut bpf_sock) -> *mut SocketState {
    let map = ptr::from_ref(&SOCKETS).cast_mut().cast();
    unsafe { bpf_sk_storage_get(map, sock.cast(), ptr::null_mut(), 0).cast() }
}
