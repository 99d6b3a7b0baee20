//! The socket path: what a process dials is turned into a backend, and what it sees is turned back.
use crate::{
    atomic, count, maps, own, pick, select,
    sock_addr::{self, Family, GO_ON, fail},
    watch,
};
use aya_ebpf::{
    bindings::bpf_sock,
    programs::{SockAddrContext, SockContext},
};
use sheave_ebpf::{
    addr::Addr,
    affinity::{AffinityKey, CLIENT_NETNS},
    backend::{Backend, NO_BACKEND},
    counter::Counter,
    frontend::{Frontend, FrontendKey, KIND_CLUSTER_IP, KIND_LOAD_BALANCER, KIND_LOOPBACK},
    proto,
    service::{
        Config, FLAG_HOST_ALLOWED, FLAG_PODS_ALLOWED, FLAG_PODS_BY_PACKET, FLAG_SOURCE_RANGES, Scope, VERDICT_DROP,
        VERDICT_FORWARD, VERDICT_REJECT, Word, word_index,
    },
    socket::{CONNECTED, HAS_PEERS, NO_PICK, NO_SERVICE, Peer, PeerKey, SocketState},
    source_range::SourceRange,
};

const ECONNREFUSED: i32 = 111;
const ETIMEDOUT: i32 = 110;

/// What becomes of a connect or datagram.
#[must_use]
enum Route {
    /// Not ours.
    Untouched,
    /// Fails at once.
    Refused,
    /// Meets silence; this service's, or nobody's.
    Silent { service: u32 },
    /// Goes into the run of this word.
    Run { service: u32, scope: Scope, word: Word, config: Config, client: AffinityKey },
}

/// Connect of TCP and UDP sockets.
#[inline(always)]
pub fn connect<F: Family>(ctx: &SockAddrContext) -> i32 {
    let key = dialled::<F>(ctx);
    let mptcp = sock_addr::mptcp(ctx);
    let socket = if mptcp.is_null() { sock_addr::socket(ctx) } else { mptcp };
    match route::<F>(ctx, &key) {
        // A UDP socket stays with whom it was connected to before.
        Route::Refused => fail(ECONNREFUSED),
        Route::Untouched => {
            // A further path of an MPTCP connection goes straight to the backend, and ends nothing.
            if mptcp.is_null() {
                forget(socket);
                forget_promise(ctx, maps::state(socket), &key);
            }
            GO_ON
        }
        Route::Silent { service } => {
            if !maps::has_discard() {
                return fail(ETIMEDOUT);
            }
            let discard = sock_addr::discard_for(&key.addr);
            // The agent closes sockets that wait here when there is somebody to talk to.
            let peers = promise(ctx, &key, service, &discard, key.port);
            remember(socket, &key, NO_BACKEND, peers);
            F::set_addr(ctx.sock_addr, &discard);
            GO_ON
        }
        Route::Run { service, word, config, client, scope: _ } => {
            let chosen = select::backend(word, config, &client, select::random());
            let Some((id, backend)) = chosen.and_then(|id| Some((id, maps::backend(id)?))) else {
                watch::not_sent(&key, Counter::SocketBroken, service);
                forget(socket);
                return GO_ON;
            };
            let peers = if key.proto == proto::UDP || maps::track_tcp() {
                promise(ctx, &key, service, &backend.addr, backend.port)
            } else {
                0
            };
            remember(socket, &key, id, peers);
            redirect::<F>(ctx, backend);
            watch::sent(&key, Counter::SocketConnect, backend);
            GO_ON
        }
    }
}

/// A datagram with an address: of an unconnected socket, or of a connected one that names somebody else.
#[inline(always)]
pub fn sendmsg<F: Family>(ctx: &SockAddrContext) -> i32 {
    let key = dialled::<F>(ctx);
    let mut state = maps::state(sock_addr::socket(ctx));
    if !state.is_null() && !sock_addr::is_connected(ctx) {
        uncount(state); // connect(AF_UNSPEC) ran no program
    }
    match route::<F>(ctx, &key) {
        Route::Untouched => {
            forget_promise(ctx, state, &key);
            own::note(ctx, &key.addr, key.port);
            GO_ON
        }
        Route::Refused => fail(ECONNREFUSED),
        Route::Silent { service: _ } => {
            if !maps::has_discard() {
                return fail(ETIMEDOUT);
            }
            F::set_addr(ctx.sock_addr, &sock_addr::discard_for(&key.addr));
            GO_ON
        }
        Route::Run { service, scope, word, config, client } => {
            if state.is_null() {
                let mut initial =
                    SocketState { addr: Addr { words: [0; 4] }, port: 0, flags: 0, backend: NO_BACKEND, pick: NO_PICK };
                state = maps::state_or(sock_addr::socket(ctx), &mut initial);
            }
            let flow = word_index(service, scope);
            let known = pick::kept(ctx, state, flow, service);
            let chosen = match known {
                Some(id) => Some(id),
                None => select::backend(word, config, &client, select::random()),
            };
            let Some((id, backend)) = chosen.and_then(|id| Some((id, maps::backend(id)?))) else {
                watch::not_sent(&key, Counter::SocketBroken, service);
                return GO_ON;
            };
            let peers = promise(ctx, &key, service, &backend.addr, backend.port);
            if state.is_null() {
                count::bump(Counter::SocketNoStorage);
            } else {
                pick::keep(ctx, state, flow, id);
                // SAFETY: storage outlives this run; the store is whole, and idempotent between threads.
                unsafe { (*state).flags |= peers }
            }
            redirect::<F>(ctx, backend);
            own::note(ctx, &backend.addr, backend.port);
            // Told once, not with every datagram.
            if known.is_some() {
                count::bump(Counter::SocketSend);
            } else {
                watch::sent(&key, Counter::SocketSend, backend);
            }
            GO_ON
        }
    }
}

/// The source of a received datagram becomes what the socket dialled to get there.
#[inline(always)]
pub fn recvmsg<F: Family>(ctx: &SockAddrContext) -> i32 {
    let state = maps::state(sock_addr::socket(ctx));
    if state.is_null() {
        return GO_ON;
    }
    // SAFETY: storage outlives this run.
    let flags = unsafe { (*state).flags };
    let from = dialled::<F>(ctx);
    if flags & HAS_PEERS != 0
        && let Some(peer) = maps::peer(&peer_key(sock_addr::cookie(ctx), &from.addr, from.port, from.proto))
    {
        show::<F>(ctx, &peer.addr, peer.port);
        return GO_ON;
    }
    // The entry was evicted, or never made: a connected socket still knows.
    if flags & CONNECTED != 0 {
        // SAFETY: storage outlives this run.
        let id = unsafe { (*state).backend };
        if let Some(backend) = maps::backend(id)
            && backend.port == from.port
            && same(&backend.addr, &from.addr)
        {
            show_connected::<F>(ctx, state);
        }
    }
    GO_ON
}

/// The peer becomes what the socket dialled (case 13).
#[inline(always)]
pub fn getpeername<F: Family>(ctx: &SockAddrContext) -> i32 {
    let state = maps::state(sock_addr::socket(ctx));
    // SAFETY: storage outlives this run.
    if !state.is_null() && unsafe { (*state).flags } & CONNECTED != 0 {
        show_connected::<F>(ctx, state);
    }
    GO_ON
}

/// The last close: the backend has a connection less, and what the socket was promised is of no use to anybody. Without
/// that, sockets that live for one question would push those that live long out of `PEERS`.
#[inline(always)]
pub fn release(ctx: &SockContext) -> i32 {
    let state = maps::state(ctx.sock);
    if !state.is_null() {
        break_promise(ctx, state);
        uncount(state);
    }
    GO_ON
}

/// What the call names, as a key. All of 127.0.0.0/8 and the unspecified addresses are one loopback address.
#[inline(always)]
fn dialled<F: Family>(ctx: &SockAddrContext) -> FrontendKey {
    FrontendKey { addr: F::addr(ctx.sock_addr), port: sock_addr::port(ctx), proto: sock_addr::protocol(ctx), zero: 0 }
}

/// Loopback as NodePorts know it: connecting to 0.0.0.0 or :: means loopback (F39).
#[inline(always)]
pub fn loopback(addr: &Addr) -> Option<Addr> {
    let [a, b, c, d] = addr.words;
    if addr.is_v4() {
        const V4_LOOPBACK: u32 = u32::from_ne_bytes([127, 0, 0, 1]);
        return (d == 0 || d.to_ne_bytes()[0] == 127).then_some(Addr::v4(V4_LOOPBACK));
    }
    const ONE: u32 = 1_u32.to_be();
    (a | b | c == 0 && (d == 0 || d == ONE)).then_some(Addr { words: [0, 0, 0, ONE] })
}

#[inline(always)]
fn route<F: Family>(ctx: &SockAddrContext, key: &FrontendKey) -> Route {
    if maps::host_only() && !maps::is_host(maps::netns(ctx)) {
        return Route::Untouched;
    }
    let Some(frontend) = lookup(ctx, key) else { return unknown(key) };
    let netns = maps::netns(ctx); // asked for what is a Service's alone
    let host = maps::is_host(netns);
    let config = maps::config(frontend.service);
    if frontend.kind == KIND_LOAD_BALANCER && config.flags() & FLAG_SOURCE_RANGES != 0 {
        match admission::<F>(ctx, frontend.service, config, host) {
            Admission::Granted => {}
            Admission::ByPacket => return Route::Untouched,
            Admission::Denied => {
                watch::not_sent(key, Counter::SocketSourceRange, frontend.service);
                return Route::Silent { service: frontend.service }; // V-6: before everything else, and silent
            }
        }
    }
    let scope = if frontend.kind == KIND_CLUSTER_IP { Scope::Cluster } else { Scope::Inside };
    let Some(word) = maps::word(frontend.service, scope) else {
        watch::not_sent(key, Counter::SocketBroken, frontend.service);
        return Route::Untouched;
    };
    match word.verdict() {
        VERDICT_FORWARD => {
            let client = AffinityKey {
                service: frontend.service,
                kind: CLIENT_NETNS,
                client: [netns as u32, (netns >> 32) as u32, 0, 0],
            };
            Route::Run { service: frontend.service, scope, word, config, client }
        }
        VERDICT_REJECT => {
            watch::not_sent(key, Counter::SocketReject, frontend.service);
            Route::Refused
        }
        VERDICT_DROP => {
            watch::not_sent(key, Counter::SocketDrop, frontend.service);
            Route::Silent { service: frontend.service }
        }
        _ => Route::Untouched, // the word was never written: the service is being removed
    }
}

/// Ping sockets connect too.
#[inline(always)]
fn is_transport(proto: u8) -> bool {
    proto == proto::TCP || proto == proto::UDP
}

/// What is no frontend: nobody's business, unless its address is a Service's or could be.
#[inline(always)]
fn unknown(key: &FrontendKey) -> Route {
    if !is_transport(key.proto) || !maps::is_near_a_guarded_address(&key.addr) {
        return Route::Untouched;
    }
    if maps::frontend(&key.of_unknown_port()).is_some() {
        watch::not_sent(key, Counter::SocketUnknownPort, NO_SERVICE);
        return Route::Refused; // V-4
    }
    if maps::in_service_cidrs(&key.addr) {
        watch::not_sent(key, Counter::SocketUnknownAddress, NO_SERVICE);
        return Route::Silent { service: NO_SERVICE }; // V-5
    }
    Route::Untouched
}

/// The frontend that a key names.
#[inline(always)]
fn lookup(ctx: &SockAddrContext, key: &FrontendKey) -> Option<Frontend> {
    if let Some(loopback) = loopback(&key.addr) {
        // In a pod 127.0.0.1 is the pod (case 20).
        if !maps::loopback_node_ports() || !maps::is_host(maps::netns(ctx)) {
            return None;
        }
        let frontend = maps::frontend(&FrontendKey { addr: loopback, ..*key })?;
        return (frontend.kind == KIND_LOOPBACK).then_some(frontend);
    }
    if is_transport(key.proto) { maps::frontend(key) } else { None }
}

/// What loadBalancerSourceRanges say of a socket.
enum Admission {
    Granted,
    Denied,
    /// Its pod's device will tell.
    ByPacket,
}

/// By the socket's address when it is bound, else by where it lives (F22).
#[inline(always)]
fn admission<F: Family>(ctx: &SockAddrContext, service: u32, config: Config, host: bool) -> Admission {
    let granted = if let Some(addr) = sock_addr::source::<F>(ctx) {
        maps::in_source_ranges(&SourceRange { service: service.to_be(), addr })
    } else if host {
        config.flags() & FLAG_HOST_ALLOWED != 0
    } else if config.flags() & FLAG_PODS_BY_PACKET != 0 {
        return Admission::ByPacket;
    } else {
        config.flags() & FLAG_PODS_ALLOWED != 0
    };
    if granted { Admission::Granted } else { Admission::Denied }
}

/// Enters what the socket dialled to get to `addr` and `port`; says which flag that sets.
#[inline(always)]
fn promise(ctx: &SockAddrContext, key: &FrontendKey, service: u32, addr: &Addr, port: u16) -> u16 {
    let entry = peer_key(sock_addr::cookie(ctx), addr, port, key.proto);
    if let Some(old) = maps::peer(&entry)
        && old.port == key.port
        && old.service == service
        && same(&old.addr, &key.addr)
    {
        return HAS_PEERS; // the common case of a second datagram: nothing to write
    }
    let peer = Peer { addr: key.addr, port: key.port, zero: 0, service };
    if maps::insert_peer(&entry, &peer).is_err() {
        count::bump(Counter::SocketNoPeer);
    }
    HAS_PEERS
}

/// A datagram goes straight to an address that the socket also reaches through a Service: its answer is its own.
#[inline(always)]
fn forget_promise(ctx: &SockAddrContext, state: *mut SocketState, key: &FrontendKey) {
    // SAFETY: storage outlives this run.
    if !state.is_null() && unsafe { (*state).flags } & HAS_PEERS != 0 {
        maps::remove_peer(&peer_key(sock_addr::cookie(ctx), &key.addr, key.port, key.proto));
    }
}

/// The socket closes: its entry for whom it talked to last goes. What is left of others is evicted some day.
#[inline(always)]
fn break_promise(ctx: &SockContext, state: *mut SocketState) {
    // SAFETY: storage outlives this run.
    let state = unsafe { &*state };
    if state.flags & HAS_PEERS == 0 {
        return;
    }
    let id = if state.flags & CONNECTED != 0 { state.backend } else { pick::last_backend(state) };
    let (addr, port) = match maps::backend(id) {
        Some(backend) => (backend.addr, backend.port),
        None => (sock_addr::discard_for(&state.addr), state.port),
    };
    maps::remove_peer(&peer_key(sock_addr::cookie_of(ctx), &addr, port, sock_addr::protocol_of(ctx)));
}

#[inline(always)]
fn peer_key(cookie: u64, addr: &Addr, port: u16, proto: u8) -> PeerKey {
    PeerKey { cookie, addr: *addr, port, proto, zero: 0, zero2: 0 }
}

/// Keeps what was dialled, and counts the connection.
#[inline(always)]
fn remember(socket: *mut bpf_sock, key: &FrontendKey, backend: u32, peers: u16) {
    forget(socket);
    let mut fresh = SocketState { addr: key.addr, port: key.port, flags: CONNECTED | peers, backend, pick: NO_PICK };
    let state = maps::state_or(socket, &mut fresh);
    if state.is_null() {
        count::bump(Counter::SocketNoStorage);
        return;
    }
    // SAFETY: storage outlives this run. A socket that connected before, or sent datagrams, has its state already.
    unsafe {
        (*state).addr = key.addr;
        (*state).port = key.port;
        (*state).backend = backend;
        (*state).flags = CONNECTED | peers | ((*state).flags & HAS_PEERS);
    }
    add_connection(backend, 1);
}

/// A new connect undoes an earlier translation of the same socket: UDP may connect again and again, and TCP after a
/// failure. What it dialled must not stick to the next address.
#[inline(always)]
fn forget(socket: *mut bpf_sock) {
    let state = maps::state(socket);
    if !state.is_null() {
        uncount(state);
    }
}

#[inline(always)]
fn uncount(state: *mut SocketState) {
    // SAFETY: storage outlives this run.
    unsafe {
        if (*state).flags & CONNECTED != 0 {
            (*state).flags &= !CONNECTED;
            add_connection((*state).backend, -1);
        }
    }
}

#[inline(always)]
fn add_connection(backend: u32, by: i64) {
    if backend != NO_BACKEND
        && let Some(count) = maps::connections(backend)
    {
        // SAFETY: array slots are stable and 8-byte aligned.
        unsafe { atomic::add(count, by) }
    }
}

#[inline(always)]
fn redirect<F: Family>(ctx: &SockAddrContext, backend: &Backend) {
    show::<F>(ctx, &backend.addr, backend.port);
}

#[inline(always)]
fn show<F: Family>(ctx: &SockAddrContext, addr: &Addr, port: u16) {
    F::set_addr(ctx.sock_addr, addr);
    sock_addr::set_port(ctx, port);
}

#[inline(always)]
fn show_connected<F: Family>(ctx: &SockAddrContext, state: *mut SocketState) {
    // SAFETY: storage outlives this run.
    let state = unsafe { &*state };
    show::<F>(ctx, &state.addr, state.port);
}

/// VERIFIER: word by word; comparing arrays becomes a call of memcmp, a loop the verifier walks in full.
#[inline(always)]
fn same(a: &Addr, b: &Addr) -> bool {
    a.words[0] == b.words[0] && a.words[1] == b.words[1] && a.words[2] == b.words[2] && a.words[3] == b.words[3]
}
