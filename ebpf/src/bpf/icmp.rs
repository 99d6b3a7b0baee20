//! ICMP errors about packets that we translate: what they quote is translated back, so that both ends learn of small
//! MTUs and closed ports (F33).
//!
//! An error travels against the packet it quotes. Where that packet's source was given, the error arrives: its
//! destination and the quoted source change. Where that packet's destination was given, the error leaves: the quoted
//! destination changes, and the error's source where it is the same. The other end's port changes where the client was
//! given another one.
use crate::{
    csum,
    skb::{self, ICMP_HEADER, Packet, Skb},
};
use aya_ebpf::helpers::bpf_l3_csum_replace;
use sheave_ebpf::{
    addr::Addr,
    conntrack::{Flow, Tuple},
    proto,
};

/// The error arrives. `None`: the packet is as it was, or too broken to go on.
#[inline(never)]
pub fn set_destination(skb: Skb, packet: &Packet, flow: &Flow) -> Option<()> {
    let old = &packet.tuple.dst;
    let at = Places::of(packet, false);
    // An error about a packet from this address, sent to another one, is nobody's honest error.
    if !outer(skb, packet, at.outer)?.is(old) {
        return None;
    }
    quote(skb, packet, at.quoted, &packet.tuple.after_ingress(flow), (old, &flow.to))?;
    envelope(skb, packet, at.outer, old, &flow.to)
}

/// The error leaves. `None`: the packet is as it was, or too broken to go on.
#[inline(never)]
pub fn set_source(skb: Skb, packet: &Packet, flow: &Flow) -> Option<()> {
    let old = &packet.tuple.src;
    let at = Places::of(packet, true);
    let is_of_backend = outer(skb, packet, at.outer)?.is(old);
    quote(skb, packet, at.quoted, &packet.tuple.after_egress(flow), (old, &flow.to))?;
    // A router in between speaks for itself.
    if is_of_backend { envelope(skb, packet, at.outer, old, &flow.to) } else { Some(()) }
}

/// Where things stand in the packet.
struct Places {
    /// The error's own address.
    outer: u32,
    /// The quoted address that changes.
    quoted: u32,
}

impl Places {
    /// Source outside and destination inside, or the other way round.
    #[inline(always)]
    fn of(packet: &Packet, leaving: bool) -> Self {
        let (src, dst) = if packet.is_v6 { (8, 24) } else { (12, 16) };
        let (outer, inner) = if leaving { (src, dst) } else { (dst, src) };
        Self { outer: crate::maps::link_header() + outer, quoted: packet.quoted + inner }
    }
}

#[inline(always)]
fn outer(skb: Skb, packet: &Packet, at: u32) -> Option<Addr> {
    if packet.is_v6 {
        return Some(Addr { words: skb::load(skb, at)? });
    }
    Some(Addr::v4(skb::load(skb, at)?))
}

/// Offset of the ICMP checksum.
#[inline(always)]
fn checksum(packet: &Packet) -> u32 {
    packet.quoted - ICMP_HEADER + 2
}

/// Makes what is quoted a packet that `tuple` answers, which has the second address, at `at`, in place of the first. The
/// ICMP checksum covers every byte of it.
#[inline(always)]
fn quote(skb: Skb, packet: &Packet, at: u32, tuple: &Tuple, (old, new): (&Addr, &Addr)) -> Option<()> {
    let icmp = checksum(packet);
    let ports = (skb::ports(&packet.tuple.reversed()), skb::ports(&tuple.reversed()));
    transport_checksum(skb, packet, icmp, ports, (old, new))?;
    csum::replace(skb, icmp, ports.0.into(), ports.1.into(), 4)?;
    skb::store(skb, packet.l4, &ports.1)?;
    if packet.is_v6 {
        csum::replace(skb, icmp, 0, csum::rise(true, old, new).into(), 0)?;
        return skb::store(skb, at, &new.words);
    }
    // The quoted header's sum stays what it is, so the ICMP checksum does too.
    // SAFETY: a plain helper call.
    if unsafe { bpf_l3_csum_replace(skb, packet.quoted + 10, old.words[3].into(), new.words[3].into(), 4) } != 0 {
        return None;
    }
    skb::store(skb, at, &new.words[3])
}

/// The quoted transport checksum, where the quote is long enough to have it.
#[inline(always)]
fn transport_checksum(
    skb: Skb,
    packet: &Packet,
    icmp: u32,
    ports: (u32, u32),
    (old, new): (&Addr, &Addr),
) -> Option<()> {
    let at = match packet.tuple.proto {
        proto::TCP => packet.l4 + 16,
        proto::UDP => packet.l4 + 6,
        _ => return Some(()),
    };
    let Some(then) = skb::load::<u16>(skb, at) else { return Some(()) };
    if then == 0 && packet.tuple.proto == proto::UDP {
        return Some(());
    }
    let rise = u64::from(!ports.0) + u64::from(ports.1) + u64::from(csum::rise(packet.is_v6, old, new));
    let now = !csum::fold(u64::from(!then) + rise);
    csum::replace(skb, icmp, then.into(), now.into(), 2)?;
    skb::store(skb, at, &now)
}

/// The error's own address.
#[inline(always)]
fn envelope(skb: Skb, packet: &Packet, at: u32, old: &Addr, new: &Addr) -> Option<()> {
    if packet.is_v6 {
        csum::replace_pseudo(skb, checksum(packet), 0, true, csum::rise(true, old, new))?;
    }
    skb::set_address(skb, packet.is_v6, at, old, new)
}
