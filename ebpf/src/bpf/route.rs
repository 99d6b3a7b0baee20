//! Asking the kernel where it would send a packet.
#![expect(clippy::undocumented_unsafe_blocks, reason = "integers all zero, and one helper call")]

use crate::skb::{self, Packet, Skb};
use aya_ebpf::{
    bindings::{
        BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as Fib,
    },
    helpers::bpf_fib_lookup,
};

/// Whether the kernel would send this packet on: it is neither this host's own nor dropped by a route.
#[inline(always)]
pub fn is_sent_on(skb: Skb, packet: &Packet) -> bool {
    const INET: u8 = 2;
    const INET6: u8 = 10;
    let (src, dst) = (&packet.tuple.src, &packet.tuple.dst);
    let mut fib: Fib = unsafe { core::mem::zeroed() };
    fib.ifindex = skb::ifindex(skb);
    fib.l4_protocol = packet.tuple.proto;
    if packet.is_v6 {
        fib.family = INET6;
        fib.__bindgen_anon_3.ipv6_src = src.words;
        fib.__bindgen_anon_4.ipv6_dst = dst.words;
    } else {
        fib.family = INET;
        fib.__bindgen_anon_3.ipv4_src = src.words[3];
        fib.__bindgen_anon_4.ipv4_dst = dst.words[3];
    }
    let found = unsafe { bpf_fib_lookup(skb.cast(), &raw mut fib, size_of::<Fib>() as i32, 0) };
    let forwards = [BPF_FIB_LKUP_RET_SUCCESS, BPF_FIB_LKUP_RET_NO_NEIGH, BPF_FIB_LKUP_RET_FRAG_NEEDED];
    forwards.into_iter().any(|outcome| found == i64::from(outcome))
}
