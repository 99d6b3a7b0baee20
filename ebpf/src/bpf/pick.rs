//! An unconnected UDP socket keeps its backend for each service that it talks to, as a flow of kube-proxy's conntrack
//! would, while the backend serves (F50). The last one is in the socket's storage; resolvers that ask
//! several servers in turn find the others in `PICKS`.
use crate::{maps, sock_addr};
use aya_ebpf::programs::SockAddrContext;
use sheave_ebpf::{
    backend::RETIRED,
    socket::{NO_PICK, PickKey, SocketState},
};

/// The backend of this socket's earlier datagrams to the service word of index `word`.
#[inline(always)]
pub fn kept(ctx: &SockAddrContext, state: *mut SocketState, word: u32, service: u32) -> Option<u32> {
    let last = last(state);
    let id = match last {
        NO_PICK => return None,
        _ if word_of(last) == word => last as u32,
        _ => maps::pick(&key(ctx, word))?,
    };
    // SAFETY: array slots are stable and aligned.
    let retired = unsafe { maps::connections(id)?.read_volatile() } & RETIRED != 0;
    let backend = maps::backend(id)?;
    (!retired && backend.port != 0 && backend.service == service).then_some(id)
}

/// Keeps `id`; what was kept for another service goes to `PICKS`. `state` must not be null.
#[inline(always)]
pub fn keep(ctx: &SockAddrContext, state: *mut SocketState, word: u32, id: u32) {
    let last = last(state);
    if last != NO_PICK && word_of(last) != word {
        let other = key(ctx, word_of(last));
        // Who alternates writes once: afterwards the entry is there already.
        if maps::pick(&other) != Some(last as u32) {
            let _full = maps::insert_pick(&other, last as u32); // an LRU map evicts; it then chooses anew
        }
    }
    // SAFETY: storage outlives this run; one aligned word, written whole.
    unsafe { (&raw mut (*state).pick).write_volatile(u64::from(word) << 32 | u64::from(id)) }
}

/// The backend of the last datagram to a service; no backend's id where there was none.
#[inline(always)]
pub fn last_backend(state: &SocketState) -> u32 {
    state.pick as u32
}

#[inline(always)]
fn last(state: *mut SocketState) -> u64 {
    if state.is_null() {
        return NO_PICK;
    }
    // SAFETY: storage outlives this run; one aligned word, read whole.
    unsafe { (&raw const (*state).pick).read_volatile() }
}

#[inline(always)]
fn word_of(pick: u64) -> u32 {
    (pick >> 32) as u32
}

#[inline(always)]
fn key(ctx: &SockAddrContext, word: u32) -> PickKey {
    PickKey { cookie: sock_addr::cookie(ctx), word, zero: 0 }
}
