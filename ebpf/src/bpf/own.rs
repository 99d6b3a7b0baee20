//! This node's own sockets.
#![expect(clippy::undocumented_unsafe_blocks, reason = "helper calls, and fields of a socket that is not null")]

use crate::skb::{self, Packet, Skb};
use aya_ebpf::helpers::{bpf_sk_lookup_udp, bpf_sk_release};

/// Whether a datagram is what a connected socket of this node waits for: its port may be a NodePort's number, too. TCP
/// needs no such question, since there an answer is never a bare SYN.
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
}
