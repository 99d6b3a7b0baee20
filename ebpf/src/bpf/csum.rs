//! Checksums, kept right by what changes, whether they are complete or left to a device.
#![expect(clippy::undocumented_unsafe_blocks, reason = "one helper call")]

use crate::{maps, skb::Skb};
use aya_ebpf::{bindings::BPF_F_PSEUDO_HDR, helpers::bpf_l4_csum_replace};
use sheave_ebpf::addr::Addr;

/// `BPF_F_IPV6`, Linux 6.16.
const F_IPV6: u64 = 1 << 7;

/// The checksum at `at` after something that it covers changed; `flags` hold its size.
#[inline(always)]
pub fn replace(skb: Skb, at: u32, old: u64, new: u64, flags: u64) -> Option<()> {
    let r = unsafe { bpf_l4_csum_replace(skb, at, old, new, flags) };
    if r == 0 { Some(()) } else { None }
}

/// The transport checksum at `at` after the sum over the pseudo header rose.
#[inline(always)]
pub fn replace_pseudo(skb: Skb, at: u32, flags: u64, is_v6: bool, rise: u32) -> Option<()> {
    // Only IPv4 has a header checksum that evens the change out under CHECKSUM_COMPLETE.
    let v6 = if is_v6 && maps::has_csum_ipv6() { F_IPV6 } else { 0 };
    replace(skb, at, 0, rise.into(), flags | v6 | u64::from(BPF_F_PSEUDO_HDR))
}

/// By how much a sum over an address rises when it is replaced: what `bpf_csum_diff` says, but a call costs more.
#[inline(always)]
pub fn rise(is_v6: bool, old: &Addr, new: &Addr) -> u32 {
    let ([a, b, c, d], [e, f, g, h]) = (old.words, new.words);
    let mut sum = u64::from(!d) + u64::from(h);
    if is_v6 {
        sum += u64::from(!a) + u64::from(!b) + u64::from(!c) + u64::from(e) + u64::from(f) + u64::from(g);
    }
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    ((sum & 0xffff_ffff) + (sum >> 32)) as u32
}

/// A sum of 16-bit words, as 16 bits.
#[inline(always)]
pub const fn fold(sum: u64) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32 & 0xffff);
    let sum = (sum & 0xffff) + (sum >> 16);
    ((sum & 0xffff) + (sum >> 16)) as u16
}
