//! This node's own UDP sockets, whose port may be a NodePort's number, too: what answers them is no client's. TCP needs
//! none of this, since there an answer is never a bare SYN.
#![expect(clippy::undocumented_unsafe_blocks, reason = "helper calls, and fields of a socket that is not null")]

use crate::{
    count, maps,
    skb::{self, Packet, Skb},
    sock_addr,
};
use aya_ebpf::{
    helpers::{bpf_sk_lookup_udp, bpf_sk_release},
    programs::SockAddrContext,
};
use sheave_ebpf::{addr::Addr, counter::Counter, socket::OwnPeer};

/// Remembers whom an unconnected socket sends to, if its port is among the NodePorts: the packet will not tell its answer
/// from a client's datagram. For all of them, since the number may become a NodePort before the answer comes.
#[inline(always)]
pub fn note(ctx: &SockAddrContext, addr: &Addr, port: u16) {
    let own_port = sock_addr::own_port(ctx);
    if !maps::is_among_node_ports(own_port) || maps::is_a_pods(ctx) {
        return;
    }
    let peer = OwnPeer { addr: *addr, port, own_port: (own_port as u16).to_be(), zero: 0 };
    if !maps::is_own_peer(&peer) && maps::insert_own_peer(&peer).is_err() {
        count::bump(Counter::SocketNoPeer);
    }
}

/// Whether a datagram is what a socket of this node waits for: a connected one's, or from somebody that an unconnected
/// one has sent to. An entry whose socket is closed means nothing.
#[inline(never)]
pub fn awaits(skb: Skb, packet: &Packet) -> bool {
    const CURRENT_NETNS: u64 = u64::MAX;
    const TCP_ESTABLISHED: u32 = 1; // of a datagram socket: connected
    let tuple = &packet.tuple;
    let ports = skb::ports(tuple);
    let (src, dst) = (&tuple.src.words, &tuple.dst.words);
    // struct bpf_sock_tuple: addresses of one family or the other, then the ports.
    let (mut sought, length) = if packet.is_v6 {
        ([src[0], src[1], src[2], src[3], dst[0], dst[1], dst[2], dst[3], ports], 36)
    } else {
        ([src[3], dst[3], ports, 0, 0, 0, 0, 0, 0], 12)
    };
    let socket = unsafe { bpf_sk_lookup_udp(skb.cast(), sought.as_mut_ptr().cast(), length, CURRENT_NETNS, 0) };
    if socket.is_null() {
        return false;
    }
    let is_connected = unsafe { (*socket).state } == TCP_ESTABLISHED;
    unsafe { bpf_sk_release(socket.cast()) };
    is_connected
        || maps::is_own_peer(&OwnPeer { addr: tuple.src, port: tuple.src_port, own_port: tuple.dst_port, zero: 0 })
}
