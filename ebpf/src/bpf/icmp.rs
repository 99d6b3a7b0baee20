//! ICMP errors about packets that we translate: what they quote is translated back, so that both ends learn of small
//! MTUs and closed ports (F33).
//!
//! An error travels against the packet it quotes. Where that packet's source was given, the error arrives: its
//! destination and the quoted source change. Where that packet's destination was given, the error leaves: the quoted
//! destination changes, and the error's source where it is the same.
use crate::skb::{self, ICMP_HEADER, Packet, Skb};
use aya_ebpf::helpers::{bpf_csum_diff, bpf_l3_csum_replace};
use sheave_ebpf::{addr::Addr, proto};

/// The error arrives. `None`: the packet is as it was, or too broken to go on.
#[inline(never)]
pub fn set_destination(skb: Skb, packet: &Packet, addr: &Addr, port: u16) -> Option<()> {
    let old = (packet.tuple.dst, packet.tuple.dst_port);
    let at = Places::of(packet, false);
    // An error about a packet from this address, sent to another one, is nobody's honest error.
    if !outer(skb, packet, at.outer)?.is(&old.0) {
        return None;
    }
    quote(skb, packet, &at, (&old.0, old.1), (addr, port))?;
    envelope(skb, packet, at.outer, &old.0, addr)
}

/// The error leaves. `None`: the packet is as it was, or too broken to go on.
#[inline(never)]
pub fn set_source(skb: Skb, packet: &Packet, addr: &Addr, port: u16) -> Option<()> {
    let old = (packet.tuple.src, packet.tuple.src_port);
    let at = Places::of(packet, true);
    let is_of_backend = outer(skb, packet, at.outer)?.is(&old.0);
    quote(skb, packet, &at, (&old.0, old.1), (addr, port))?;
    // A router in between speaks for itself.
    if is_of_backend { envelope(skb, packet, at.outer, &old.0, addr) } else { Some(()) }
}

/// Where things stand in the packet.
struct Places {
    /// The error's own address.
    outer: u32,
    /// The quoted address and port.
    addr: u32,
    port: u32,
}

impl Places {
    /// Source outside and destination inside, or the other way round.
    #[inline(always)]
    fn of(packet: &Packet, leaving: bool) -> Self {
        let (src, dst) = if packet.is_v6 { (8, 24) } else { (12, 16) };
        let (outer, inner) = if leaving { (src, dst) } else { (dst, src) };
        let port = if leaving { 2 } else { 0 };
        Self { outer: crate::maps::link_header() + outer, addr: packet.quoted + inner, port: packet.l4 + port }
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

/// Changes what is quoted. The ICMP checksum covers every byte of it.
#[inline(always)]
fn quote(skb: Skb, packet: &Packet, at: &Places, old: (&Addr, u16), new: (&Addr, u16)) -> Option<()> {
    let icmp = checksum(packet);
    transport_checksum(skb, packet, icmp, old, new)?;
    skb::csum_l4(skb, icmp, old.1.into(), new.1.into(), 2)?;
    skb::store(skb, at.port, &new.1)?;
    if packet.is_v6 {
        skb::csum_l4(skb, icmp, 0, skb::difference(old.0, new.0), 0)?;
        return skb::store(skb, at.addr, &new.0.words);
    }
    // The quoted header's sum stays what it is, so the ICMP checksum does too.
    // SAFETY: a plain helper call.
    if unsafe { bpf_l3_csum_replace(skb, packet.quoted + 10, old.0.words[3].into(), new.0.words[3].into(), 4) } != 0 {
        return None;
    }
    skb::store(skb, at.addr, &new.0.words[3])
}

/// The quoted transport checksum, where the quote is long enough to have it.
#[inline(always)]
fn transport_checksum(skb: Skb, packet: &Packet, icmp: u32, old: (&Addr, u16), new: (&Addr, u16)) -> Option<()> {
    let at = match packet.tuple.proto {
        proto::TCP => packet.l4 + 16,
        proto::UDP => packet.l4 + 6,
        _ => return Some(()),
    };
    let Some(then) = skb::load::<u16>(skb, at) else { return Some(()) };
    if then == 0 && packet.tuple.proto == proto::UDP {
        return Some(());
    }
    let mut sum = u64::from(!then);
    let (before, after) = ([u32::from(old.1)], [u32::from(new.1)]);
    // SAFETY: live arrays of the lengths given.
    unsafe {
        sum = bpf_csum_diff(before.as_ptr().cast_mut(), 4, after.as_ptr().cast_mut(), 4, sum as u32) as u64;
    }
    sum = u64::from(sum as u32) + skb::difference(old.0, new.0);
    let now = !skb::fold(sum);
    skb::csum_l4(skb, icmp, then.into(), now.into(), 2)?;
    skb::store(skb, at, &now)
}

/// The error's own address.
#[inline(always)]
fn envelope(skb: Skb, packet: &Packet, at: u32, old: &Addr, new: &Addr) -> Option<()> {
    if packet.is_v6 {
        skb::replace_pseudo(skb, checksum(packet), 0, true, old, new)?;
    }
    skb::set_address(skb, packet.is_v6, at, old, new)
}
