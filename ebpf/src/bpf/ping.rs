//! Answering pings of virtual addresses, where the operator wants it (F32): who debugs a network pings first.
use crate::{
    count, csum, maps, refuse,
    skb::{self, NEXT, Skb},
};
use sheave_ebpf::{counter::Counter, frontend::FrontendKey, proto};

/// Echo request and reply.
const V4: (u8, u8) = (8, 0);
const V6: (u8, u8) = (128, 129);

/// Turns an echo request to a virtual address into its reply and sends it back; a verdict.
#[inline(never)]
pub fn answer(skb: Skb) -> i32 {
    let Some(header) = skb::header(skb) else { return NEXT };
    let ((request, reply), protocol) = if header.is_v6 { (V6, proto::ICMPV6) } else { (V4, proto::ICMP) };
    // A reply in fragments would need every one of them.
    if header.proto != protocol || header.fragment != 0 || header.more {
        return NEXT;
    }
    let Some([kind, code]) = skb::load::<[u8; 2]>(skb, header.l4) else { return NEXT };
    let key = FrontendKey { addr: header.dst, port: 0, proto: protocol, zero: 0 };
    if kind != request || maps::frontend(&key).is_none() {
        return NEXT;
    }
    let (then, now) = (u16::from_ne_bytes([kind, code]), u16::from_ne_bytes([reply, code]));
    let answered = csum::replace(skb, header.l4 + 2, then.into(), now.into(), 2)
        .and_then(|()| skb::store(skb, header.l4, &now))
        .and_then(|()| refuse::turn_round(skb, &header.src, &header.dst, header.is_v6));
    if answered.is_none() {
        return NEXT;
    }
    count::bump(Counter::PacketPing);
    refuse::send_back(skb)
}
