//! Refusing (V-1, V-4). TCP gets a RST, everything else ICMP port unreachable.
use crate::{
    csum, maps,
    skb::{self, DROP, Packet, REDIRECT, Skb},
    unreachable,
};
use aya_ebpf::helpers::{bpf_l3_csum_replace, bpf_redirect};
use sheave_ebpf::{addr::Addr, proto, tcp};

/// Refuses what `packet` opens.
#[inline(never)]
pub fn refuse(skb: Skb, packet: &Packet) -> i32 {
    match packet.tuple.proto {
        proto::TCP => reset(skb, packet).unwrap_or(DROP),
        _ => unreachable::answer(skb, packet),
    }
}

/// Turns a SYN into the RST that answers it and sends it back the way it came. Nothing moves, so checksums change by
/// the fields alone, whether they are complete or left to the device. Swapping what is summed changes no sum.
#[inline(always)]
fn reset(skb: Skb, packet: &Packet) -> Option<i32> {
    let [seq, ack]: [u32; 2] = skb::load(skb, packet.l4 + 4)?;
    let answer = u32::from_be(seq).wrapping_add(1).to_be();
    let [offset, flags]: [u8; 2] = skb::load(skb, packet.l4 + 12)?;
    let flags_then = u16::from_ne_bytes([offset, flags]);
    let flags_now = u16::from_ne_bytes([offset, tcp::RST | tcp::ACK]);

    let checksum = packet.l4 + 16;
    csum::replace(skb, checksum, seq.into(), 0, 4)?;
    csum::replace(skb, checksum, ack.into(), answer.into(), 4)?;
    csum::replace(skb, checksum, flags_then.into(), flags_now.into(), 2)?;
    skb::store(skb, packet.l4 + 4, &[0, answer])?;
    skb::store(skb, packet.l4 + 12, &flags_now)?;
    skb::store(skb, packet.l4, &[packet.tuple.dst_port, packet.tuple.src_port])?;
    turn_round(skb, &packet.tuple.src, &packet.tuple.dst, packet.is_v6)?;
    Some(send_back(skb))
}

/// Sends a packet that was turned round out of the device that it came through.
#[inline(always)]
pub fn send_back(skb: Skb) -> i32 {
    // SAFETY: a plain helper call.
    let verdict = unsafe { bpf_redirect(skb::ifindex(skb), 0) };
    if verdict == i64::from(REDIRECT) { REDIRECT } else { DROP }
}

/// Swaps link and network addresses, and gives the packet a fresh hop limit.
#[inline(always)]
pub fn turn_round(skb: Skb, src: &Addr, dst: &Addr, is_v6: bool) -> Option<()> {
    const HOPS: u8 = 64;
    turn_link_round(skb)?;
    let header = maps::link_header();
    if is_v6 {
        skb::store(skb, header + 8, &dst.words)?;
        skb::store(skb, header + 24, &src.words)?;
        return skb::store(skb, header + 7, &HOPS);
    }
    skb::store(skb, header + 12, &[dst.words[3], src.words[3]])?;
    let [then, protocol]: [u8; 2] = skb::load(skb, header + 8)?;
    let (then, now) = (u16::from_ne_bytes([then, protocol]), u16::from_ne_bytes([HOPS, protocol]));
    // SAFETY: a plain helper call.
    if unsafe { bpf_l3_csum_replace(skb, header + 10, then.into(), now.into(), 2) } != 0 {
        return None;
    }
    skb::store(skb, header + 8, &now)
}

/// Swaps link addresses, where there are any.
#[inline(always)]
pub fn turn_link_round(skb: Skb) -> Option<()> {
    if maps::link_header() == 0 {
        return Some(());
    }
    let [a, b, c, d, e, f]: [u16; 6] = skb::load(skb, 0)?;
    skb::store(skb, 0, &[d, e, f, a, b, c])
}
