//! ICMP port unreachable, for clients of UDP and SCTP (V-1, V-4): the error is made here, in place of the packet that it is
//! about. So it is the address dialled that says it, whatever the host's firewall thinks of packets to the host.
use crate::{
    count, csum, maps, refuse,
    skb::{DROP, Packet, Skb},
};
use aya_ebpf::{
    bindings::BPF_F_RECOMPUTE_CSUM,
    helpers::{bpf_csum_diff, bpf_ktime_get_ns, bpf_skb_change_tail, bpf_skb_load_bytes, bpf_skb_store_bytes},
};
use core::{mem::MaybeUninit, ptr, slice};
use sheave_ebpf::{addr::Addr, counter::Counter, proto};

/// The type of the chunk that opens an association, the only packet that is answered: others are of one that this node
/// does not know, and netfilter calls them invalid.
const INIT: u8 = 1;
/// Words of a network header.
const V4: usize = 5;
const V6: usize = 10;
/// Words of an ICMP error's own header.
const ICMP: usize = 2;
/// Words of an IPv6 header that says which fragment this is.
const FRAGMENT: usize = 2;
/// Words that are quoted of UDP: its header, by which the client knows its socket.
const UDP: usize = 2;
/// Of SCTP: its header, and all of an INIT that is not optional, with the tag by which the client knows its association (RFC
/// 9260, section 10).
const SCTP: usize = 8;
const HOPS: u8 = 64;

/// An error, in words: headers of its own, and what it quotes.
#[repr(C)]
struct Error<const HEADER: usize, const QUOTE: usize> {
    header: [u32; HEADER],
    icmp: [u32; ICMP],
    quote: [u32; QUOTE],
}

impl<const HEADER: usize, const QUOTE: usize> Error<HEADER, QUOTE> {
    #[inline(always)]
    fn words(&self) -> &[u32] {
        // SAFETY: arrays of words, one behind the other.
        unsafe { slice::from_raw_parts(ptr::from_ref(self).cast(), HEADER + ICMP + QUOTE) }
    }
}

/// Answers what `packet` opens, or drops it; a verdict.
#[inline(always)]
pub fn answer(skb: Skb, packet: &Packet) -> i32 {
    let is_fragment = packet.l4 == maps::link_header() + 4 * (V6 + FRAGMENT) as u32;
    match (packet.is_v6, packet.tuple.proto) {
        (false, proto::SCTP) => v4::<{ V4 + SCTP }>(skb, packet),
        (false, _) => v4::<{ V4 + UDP }>(skb, packet),
        (true, proto::SCTP) => v6::<{ V6 + SCTP }>(skb, packet),
        (true, _) if is_fragment => v6::<{ V6 + FRAGMENT + UDP }>(skb, packet),
        (true, _) => v6::<{ V6 + UDP }>(skb, packet),
    }
}

/// An error that quotes so many words.
#[inline(never)]
fn v4<const QUOTE: usize>(skb: Skb, packet: &Packet) -> i32 {
    const DONT_FRAGMENT: u8 = 0x40;
    const CONTROL: u8 = 0xc0; // precedence of errors (RFC 1812, 4.3.2.5)
    let (src, dst) = (packet.tuple.src.words[3], packet.tuple.dst.words[3]);
    let length = ((V4 + ICMP + QUOTE) * 4) as u8;
    let header =
        [word([0x45, CONTROL, 0, length]), word([0, 0, DONT_FRAGMENT, 0]), word([HOPS, proto::ICMP, 0, 0]), dst, src];
    let mut room = MaybeUninit::<Error<V4, QUOTE>>::uninit();
    let Some(error) = about(skb, packet, &mut room, (header, [3, 3])) else { return DROP };
    error.header[2] |= checksum(&error.header, 0);
    error.icmp[0] |= checksum(&error.words()[V4..], 0);
    send(skb, error.words()).unwrap_or(DROP)
}

/// The same for IPv6.
#[inline(never)]
fn v6<const QUOTE: usize>(skb: Skb, packet: &Packet) -> i32 {
    let ([a, b, c, d], [e, f, g, h]) = (packet.tuple.dst.words, packet.tuple.src.words);
    let length = ((ICMP + QUOTE) * 4) as u8;
    let header = [word([0x60, 0, 0, 0]), word([0, length, proto::ICMPV6, HOPS]), a, b, c, d, e, f, g, h];
    let mut room = MaybeUninit::<Error<V6, QUOTE>>::uninit();
    let Some(error) = about(skb, packet, &mut room, (header, [1, 4])) else { return DROP };
    // The pseudo header: both addresses, the length and the protocol.
    error.icmp[0] |= checksum(&error.words()[2..], word([0, 0, 0, length + proto::ICMPV6]));
    send(skb, error.words()).unwrap_or(DROP)
}

#[inline(always)]
const fn word(bytes: [u8; 4]) -> u32 {
    u32::from_ne_bytes(bytes)
}

/// An error of this header and type about the packet, if that is to be answered: a plain one, from one host (RFC 1122,
/// 3.2.2).
#[inline(always)]
fn about<'a, const HEADER: usize, const QUOTE: usize>(
    skb: Skb,
    packet: &Packet,
    room: &'a mut MaybeUninit<Error<HEADER, QUOTE>>,
    (header, [kind, code]): ([u32; HEADER], [u8; 2]),
) -> Option<&'a mut Error<HEADER, QUOTE>> {
    let at = maps::link_header();
    let is_sctp = packet.tuple.proto == proto::SCTP;
    let quoted = if is_sctp { SCTP } else { UDP };
    let is_plain = packet.l4 + 4 * quoted as u32 == at + 4 * QUOTE as u32;
    if !is_plain || !is_one_host(&packet.tuple.src) {
        return None;
    }
    let error = room.as_mut_ptr();
    // SAFETY: every field is written, the last one by the helper unless it fails.
    let error = unsafe {
        (*error).header = header;
        (*error).icmp = [word([kind, code, 0, 0]), 0];
        let quote = (&raw mut (*error).quote).cast();
        if bpf_skb_load_bytes(skb.cast(), at, quote, size_of::<[u32; QUOTE]>() as u32) != 0 {
            return None;
        }
        &mut *error
    };
    let chunk = error.quote.get(HEADER + 3).map_or(0, |word| word.to_ne_bytes()[0]);
    if (!is_sctp || chunk == INIT) && may_send() { Some(error) } else { None }
}

/// Whether one more error may be sent: a client that gives another's address as its own has them sent there. Of two CPUs
/// that ask at once, one may go free.
#[inline(always)]
fn may_send() -> bool {
    // The limits that Linux 3.18 gave its own errors (icmp_msgs_per_sec, icmp_msgs_burst), which it has raised since.
    const PRICE: u64 = 1_000_000; // in ns
    const BURST: u64 = 50;
    let paid = maps::errors_paid();
    // SAFETY: a plain helper call, and an aligned word, read and written whole.
    unsafe {
        let now = bpf_ktime_get_ns();
        let due = paid.read_volatile().max(now);
        if due - now >= BURST * PRICE {
            count::bump(Counter::PacketErrorLimit);
            return false;
        }
        paid.write_volatile(due + PRICE);
    }
    true
}

#[inline(always)]
fn is_one_host(addr: &Addr) -> bool {
    let [a, b, c, d] = addr.words;
    if addr.is_v4() {
        return matches!(d.to_ne_bytes()[0], 1..224);
    }
    a.to_ne_bytes()[0] != 0xff && (a | b | c | d) != 0
}

/// The Internet checksum of words and of what is summed up in `start`, where it stands in a header: the latter half of a
/// word.
#[inline(always)]
fn checksum(words: &[u32], start: u32) -> u32 {
    let words = (words.as_ptr().cast_mut(), size_of_val(words) as u32);
    // SAFETY: a plain helper call, with the bounds of a live slice.
    let sum = unsafe { bpf_csum_diff(ptr::null_mut(), 0, words.0, words.1, start) };
    let [a, b] = (!csum::fold(u64::from(sum as u32))).to_ne_bytes();
    word([0, 0, a, b])
}

/// Makes the packet the error and sends it back the way it came.
#[inline(always)]
fn send(skb: Skb, error: &[u32]) -> Option<i32> {
    let at = maps::link_header();
    let length = size_of_val(error) as u32;
    // SAFETY: plain helper calls, the second with the bounds of a live slice. The first is made for answers such as this:
    // it gathers the packet in one piece. It leaves a checksum that a device was to fill in; where a pod's device passes
    // that on to a bridge which cannot, the quote is spoilt, and the client hears nothing.
    let r = unsafe {
        bpf_skb_change_tail(skb, at + length, 0)
            | bpf_skb_store_bytes(skb, at, error.as_ptr().cast(), length, BPF_F_RECOMPUTE_CSUM.into())
    };
    if r != 0 {
        return None;
    }
    refuse::turn_link_round(skb)?;
    Some(refuse::send_back(skb))
}
