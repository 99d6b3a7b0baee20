//! Access to packets: what one is, and replacing an address and port of it with checksums kept right. Everything goes
//! through helpers, which find bytes wherever they lie and refuse what is beyond the end.
#![expect(clippy::undocumented_unsafe_blocks, reason = "every block is one helper call, or one field of the context")]

use crate::{csum, maps};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_MARK_MANGLED_0},
    helpers::{bpf_l3_csum_replace, bpf_skb_load_bytes, bpf_skb_store_bytes},
};
use core::{mem::MaybeUninit, ptr};
use sheave_ebpf::{
    addr::Addr,
    conntrack::{Flow, FragmentKey, Ports, Tuple},
    proto,
};

/// The context.
pub type Skb = *mut __sk_buff;

/// TCX_NEXT, or TC_ACT_UNSPEC: whoever else is attached sees the packet too.
pub const NEXT: i32 = -1;
/// TC_ACT_SHOT.
pub const DROP: i32 = 2;
/// TC_ACT_REDIRECT.
pub const REDIRECT: i32 = 7;

const ETH_P_IP: u16 = 0x0800;
const ETH_P_IPV6: u16 = 0x86dd;

/// Bytes of a TCP, UDP and SCTP header that must be there before anything is changed.
const TCP_HEADER: u32 = 20;
const UDP_HEADER: u32 = 8;
const SCTP_HEADER: u32 = 12;
/// Between an ICMP error's own header and what it quotes.
pub const ICMP_HEADER: u32 = 8;

/// A packet that may be translated.
#[derive(Clone, Copy)]
pub struct Packet {
    /// Who sends what to whom; `hook` is the caller's. Of an ICMP error: the packet that would answer the quoted one,
    /// so that it is found like every other packet of its flow.
    pub tuple: Tuple,
    /// Offset of the transport header; of an ICMP error: of the quoted one.
    pub l4: u32,
    /// Of an ICMP error: offset of the quoted IP header. Else 0.
    pub quoted: u32,
    /// Names the fragments of one packet.
    pub id: u32,
    /// The third word of the outermost IPv4 header: time to live, protocol, checksum.
    third: u32,
    pub part: Part,
    /// TCP's flags; 0 otherwise.
    pub tcp: u8,
    pub is_v6: bool,
}

/// How much of a packet there is.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Part {
    Whole,
    /// The first of several fragments.
    First,
    /// Without a transport header; the ports are remembered from the first.
    Later,
}

impl Packet {
    /// Whether it can open a flow.
    #[inline(always)]
    pub fn is_ordinary(&self) -> bool {
        self.quoted == 0 && self.part as u8 != Part::Later as u8
    }

    /// Whether it is a fragment of a packet that [was stopped](stop_fragments).
    #[inline(always)]
    pub fn is_stopped(&self) -> bool {
        self.part as u8 == Part::Later as u8 && self.tuple.src_port == 0 && self.tuple.dst_port == 0
    }

    #[inline(always)]
    fn fragment_key(&self) -> FragmentKey {
        let Tuple { src, dst, proto, hook, .. } = self.tuple;
        FragmentKey { src, dst, id: self.id, proto, hook, zero: 0 }
    }
}

/// What an IP header says.
pub struct Header {
    pub src: Addr,
    pub dst: Addr,
    pub is_v6: bool,
    pub proto: u8,
    /// Offset of what follows it.
    pub l4: u32,
    /// Offset of this fragment, 0 in the first one and in what is none.
    pub fragment: u16,
    /// More fragments follow.
    pub more: bool,
    /// Names the fragments of one packet.
    pub id: u32,
    /// IPv4: the third word, time to live, protocol and checksum.
    third: u32,
}

/// Bytes of the packet. `None` when they are not all there.
#[inline(always)]
pub fn load<T: Copy>(skb: Skb, at: u32) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    let r = unsafe { bpf_skb_load_bytes(skb.cast(), at, value.as_mut_ptr().cast(), size_of::<T>() as u32) };
    if r == 0 { Some(unsafe { value.assume_init() }) } else { None }
}

/// Words of a header near the beginning of the packet, where they nearly always lie in one piece: read in place, which
/// saves a call and a copy; a helper brings them when they do not.
#[inline(always)]
fn words<const N: usize>(skb: Skb, at: u32) -> Option<[u32; N]> {
    // VERIFIER: where a packet is read in place, the place must be known to be small.
    const NEAR: u32 = 256;
    let (begin, end) = unsafe {
        ((&raw const (*skb).data).read_volatile() as usize, (&raw const (*skb).data_end).read_volatile() as usize)
    };
    if at < NEAR && begin + at as usize + size_of::<[u32; N]>() <= end {
        // Network headers are aligned to 4 where the hardware cares.
        return Some(unsafe { *((begin + at as usize) as *const [u32; N]) });
    }
    load(skb, at)
}

#[inline(always)]
pub fn store<T: Copy>(skb: Skb, at: u32, value: &T) -> Option<()> {
    let r = unsafe { bpf_skb_store_bytes(skb, at, ptr::from_ref(value).cast(), size_of::<T>() as u32, 0) };
    if r == 0 { Some(()) } else { None }
}

#[inline(always)]
pub fn ifindex(skb: Skb) -> u32 {
    unsafe { (&raw const (*skb).ifindex).read_volatile() }
}

#[inline(always)]
pub fn mark(skb: Skb) -> u32 {
    unsafe { (&raw const (*skb).mark).read_volatile() }
}

#[inline(always)]
pub fn set_mark(skb: Skb, mark: u32) {
    unsafe { (&raw mut (*skb).mark).write_volatile(mark) }
}

/// Whether the link brought the packet to this host, and to no other one.
#[inline(always)]
pub fn is_for_this_host(skb: Skb) -> bool {
    const PACKET_HOST: u32 = 0;
    unsafe { (&raw const (*skb).pkt_type).read_volatile() == PACKET_HOST }
}

/// Bytes of the whole packet.
#[inline(always)]
pub fn length(skb: Skb) -> u32 {
    unsafe { (&raw const (*skb).len).read_volatile() }
}

#[inline(always)]
fn ethertype(skb: Skb) -> u16 {
    u16::from_be(unsafe { (&raw const (*skb).protocol).read_volatile() } as u16)
}

/// Whether the packet belongs to a VLAN that has a device of its own: that one's programs see it too, without the tag.
#[inline(always)]
pub fn is_tagged(skb: Skb) -> bool {
    const ID: u32 = 0xfff; // 0 is a priority alone
    unsafe {
        (&raw const (*skb).vlan_present).read_volatile() != 0 && (&raw const (*skb).vlan_tci).read_volatile() & ID != 0
    }
}

/// The packet's outermost IP header. `None` for every other protocol.
#[inline(always)]
pub fn header(skb: Skb) -> Option<Header> {
    let at = maps::link_header();
    match ethertype(skb) {
        ETH_P_IP => header_v4(at, &words(skb, at)?),
        ETH_P_IPV6 => header_v6(skb, at, &words(skb, at)?),
        _ => None,
    }
}

#[inline(always)]
fn header_v4(at: u32, words: &[u32; 5]) -> Option<Header> {
    let first = words[0].to_ne_bytes()[0];
    let length = u32::from(first & 0xf) * 4;
    if first >> 4 != 4 || length < 20 {
        return None;
    }
    let [id0, id1, fragment0, fragment1] = words[1].to_ne_bytes();
    let fragment = u16::from_be_bytes([fragment0, fragment1]);
    Some(Header {
        src: Addr::v4(words[3]),
        dst: Addr::v4(words[4]),
        is_v6: false,
        proto: words[2].to_ne_bytes()[1],
        l4: at + length,
        fragment: fragment & 0x1fff,
        more: fragment & 0x2000 != 0,
        id: u32::from(u16::from_be_bytes([id0, id1])),
        third: words[2],
    })
}

#[inline(always)]
fn header_v6(skb: Skb, at: u32, words: &[u32; 10]) -> Option<Header> {
    if words[0].to_ne_bytes()[0] >> 4 != 6 {
        return None;
    }
    let mut header = Header {
        src: Addr { words: [words[2], words[3], words[4], words[5]] },
        dst: Addr { words: [words[6], words[7], words[8], words[9]] },
        is_v6: true,
        proto: words[1].to_ne_bytes()[2],
        l4: at + 40,
        fragment: 0,
        more: false,
        id: 0,
        third: 0,
    };
    if !is_transport(header.proto) {
        extension_headers(skb, &mut header)?;
    }
    Some(header)
}

#[inline(always)]
const fn is_transport(protocol: u8) -> bool {
    matches!(protocol, proto::TCP | proto::UDP | proto::SCTP | proto::ICMPV6)
}

/// Skips IPv6 extension headers. More than these in a row are nobody's honest packet.
#[inline(never)]
fn extension_headers(skb: Skb, header: &mut Header) -> Option<()> {
    const HOP_BY_HOP: u8 = 0;
    const ROUTING: u8 = 43;
    const FRAGMENT: u8 = 44;
    const DESTINATION: u8 = 60;
    for _ in 0..5 {
        match header.proto {
            HOP_BY_HOP | ROUTING | DESTINATION => {
                let [next, length]: [u8; 2] = load(skb, header.l4)?;
                header.proto = next;
                header.l4 += 8 + u32::from(length) * 8;
            }
            FRAGMENT => {
                let [w0, w1]: [u32; 2] = load(skb, header.l4)?;
                let [next, _, offset0, offset1] = w0.to_ne_bytes();
                let offset = u16::from_be_bytes([offset0, offset1]);
                header.proto = next;
                header.l4 += 8;
                header.fragment = offset >> 3;
                header.more = offset & 1 != 0;
                header.id = w1;
                if header.fragment != 0 {
                    return Some(()); // what follows is no header
                }
            }
            _ => return Some(()),
        }
    }
    None
}

/// The packet, if it is of a protocol with ports and whole enough to be changed, or an ICMP error about such a packet.
/// `room` is the caller's to provide, and needs no value.
#[inline(always)]
pub fn parse(skb: Skb, hook: u8, room: &mut MaybeUninit<Packet>) -> Option<&Packet> {
    if !parse_into(skb, hook, room) {
        return None;
    }
    Some(unsafe { room.assume_init_ref() })
}

/// A function of its own, so that its stack is free again when the packet is dealt with. VERIFIER: the answer is a register,
/// whose value is known; that of an `Option`'s tag on the stack is not.
#[inline(never)]
fn parse_into(skb: Skb, hook: u8, room: &mut MaybeUninit<Packet>) -> bool {
    let Some(header) = header(skb) else { return false };
    let parsed = if header.fragment != 0 {
        later(&header, hook)
    } else if header.proto == proto::ICMP || header.proto == proto::ICMPV6 {
        error(skb, &header, hook)
    } else {
        with_ports(skb, &header, hook)
    };
    if let Some(packet) = parsed {
        room.write(packet);
    }
    parsed.is_some()
}

#[inline(always)]
fn with_ports(skb: Skb, header: &Header, hook: u8) -> Option<Packet> {
    let needs = match header.proto {
        proto::TCP => TCP_HEADER,
        proto::UDP => UDP_HEADER,
        proto::SCTP => SCTP_HEADER,
        _ => return None,
    };
    if header.l4 + needs > length(skb) {
        return None;
    }
    let (ports, tcp) = if header.proto == proto::TCP {
        let [ports, _, _, flags] = words(skb, header.l4)?;
        (ports, flags.to_ne_bytes()[1])
    } else {
        let [ports] = words(skb, header.l4)?;
        (ports, 0)
    };
    let [s0, s1, d0, d1] = ports.to_ne_bytes();
    let (src_port, dst_port) = (u16::from_ne_bytes([s0, s1]), u16::from_ne_bytes([d0, d1]));
    let part = if header.more { Part::First } else { Part::Whole };
    Some(Packet { part, tcp, ..packet_of(header, hook, src_port, dst_port) })
}

/// A fragment behind the first one; `None` when that one was not seen, or was none of ours.
#[inline(always)]
fn later(header: &Header, hook: u8) -> Option<Packet> {
    let packet = Packet { part: Part::Later, ..packet_of(header, hook, 0, 0) };
    let ports = maps::fragment(&packet.fragment_key())?;
    Some(Packet { tuple: Tuple { src_port: ports.src, dst_port: ports.dst, ..packet.tuple }, ..packet })
}

/// An ICMP error that quotes a packet with ports.
#[inline(always)]
fn error(skb: Skb, header: &Header, hook: u8) -> Option<Packet> {
    let kind: u8 = load(skb, header.l4)?;
    let is_error = match header.is_v6 {
        false => matches!(kind, 3 | 11 | 12), // unreachable (too big as well), time exceeded, parameter problem
        true => matches!(kind, 1..=4),        // the same, too big on its own
    };
    if !is_error {
        return None;
    }
    let at = header.l4 + ICMP_HEADER;
    let quoted = if header.is_v6 { header_v6(skb, at, &load(skb, at)?)? } else { header_v4(at, &load(skb, at)?)? };
    if quoted.fragment != 0 || !matches!(quoted.proto, proto::TCP | proto::UDP | proto::SCTP) {
        return None;
    }
    let [src_port, dst_port]: [u16; 2] = load(skb, quoted.l4)?;
    let packet = packet_of(&quoted, hook, src_port, dst_port);
    Some(Packet { tuple: packet.tuple.reversed(), quoted: at, ..packet })
}

#[inline(always)]
fn packet_of(header: &Header, hook: u8, src_port: u16, dst_port: u16) -> Packet {
    Packet {
        tuple: Tuple { src: header.src, dst: header.dst, src_port, dst_port, proto: header.proto, hook, zero: 0 },
        l4: header.l4,
        quoted: 0,
        id: header.id,
        third: header.third,
        part: Part::Whole,
        tcp: 0,
        is_v6: header.is_v6,
    }
}

/// Whether the packet is ICMP of its family, by one byte of it.
#[inline(always)]
pub fn is_icmp(skb: Skb) -> bool {
    let at = maps::link_header();
    match ethertype(skb) {
        ETH_P_IP => load::<u8>(skb, at + 9) == Some(proto::ICMP),
        ETH_P_IPV6 => load::<u8>(skb, at + 6) == Some(proto::ICMPV6),
        _ => false,
    }
}

/// Remembers the ports for the fragments that follow.
#[inline(always)]
fn remember_fragments(packet: &Packet) {
    if packet.part as u8 == Part::First as u8 {
        let ports = Ports { src: packet.tuple.src_port, dst: packet.tuple.dst_port };
        let _full = maps::insert_fragment(&packet.fragment_key(), &ports);
    }
}

/// What became of an earlier packet's fragments does not bind another one of that number.
#[inline(never)]
pub fn forget_fragments(packet: &Packet) {
    if packet.quoted == 0 && packet.part as u8 == Part::First as u8 {
        maps::remove_fragment(&packet.fragment_key());
    }
}

/// The first fragment goes no further, and neither shall those that follow: the network may lead them back here (F31), and
/// no packet that is served has two ports of 0.
#[inline(never)]
pub fn stop_fragments(packet: &Packet) {
    if packet.part as u8 == Part::First as u8 {
        // LLVM would make one of a constant and of the global that has the same value until the loader sets it.
        let none = packet.tuple.zero;
        let _full = maps::insert_fragment(&packet.fragment_key(), &Ports { src: none, dst: none });
    }
}

/// Replaces the destination as the packet's entry says. `None`: the packet is as it was, or too broken to go on.
#[inline(never)]
pub fn set_destination(skb: Skb, packet: &Packet, flow: &Flow) -> Option<()> {
    replace(skb, packet, &packet.tuple.after_ingress(flow), &packet.tuple.dst, &flow.to)
}

/// Replaces the source as the packet's entry says. `None`: the packet is as it was, or too broken to go on.
#[inline(always)]
pub fn set_source(skb: Skb, packet: &Packet, flow: &Flow) -> Option<()> {
    replace(skb, packet, &packet.tuple.after_egress(flow), &packet.tuple.src, &flow.to)
}

/// Makes the packet one of `tuple`, which has the address `new` in place of `old`.
#[inline(always)]
fn replace(skb: Skb, packet: &Packet, tuple: &Tuple, old: &Addr, new: &Addr) -> Option<()> {
    remember_fragments(packet);
    // UDP may carry no checksum: the flag leaves 0 alone and never produces it. SCTP's does not cover addresses.
    let checksum = match packet.tuple.proto {
        _ if packet.part as u8 == Part::Later as u8 => None,
        proto::TCP => Some((packet.l4 + 16, 0)),
        proto::UDP => Some((packet.l4 + 6, u64::from(BPF_F_MARK_MANGLED_0))),
        _ => None,
    };
    let rise = csum::rise(packet.is_v6, old, new);
    if let Some((at, flags)) = checksum {
        csum::replace_pseudo(skb, at, flags, packet.is_v6, rise)?;
        let (old, new) = (ports(&packet.tuple), ports(tuple));
        if old != new {
            csum::replace(skb, at, old.into(), new.into(), flags | 4)?;
        }
    }
    set_ends(skb, packet, tuple, rise)
}

/// Both ports of a tuple, as they stand in a packet.
#[inline(always)]
pub fn ports(tuple: &Tuple) -> u32 {
    let ([s0, s1], [d0, d1]) = (tuple.src_port.to_ne_bytes(), tuple.dst_port.to_ne_bytes());
    u32::from_ne_bytes([s0, s1, d0, d1])
}

/// The addresses of an IPv6 header and the ports behind it.
#[derive(Clone, Copy)]
#[repr(C)]
struct Ends {
    src: Addr,
    dst: Addr,
    ports: u32,
}

/// Writes a tuple into the outermost header and what follows, with IPv4's checksum, which stands before the addresses.
/// Without options or extension headers they stand side by side: one store, for nearly every packet.
#[inline(always)]
fn set_ends(skb: Skb, packet: &Packet, tuple: &Tuple, rise: u32) -> Option<()> {
    let at = maps::link_header() + 8;
    let has_ports = packet.part as u8 != Part::Later as u8;
    if packet.is_v6 {
        if has_ports && packet.l4 == at + 32 {
            return store(skb, at, &Ends { src: tuple.src, dst: tuple.dst, ports: ports(tuple) });
        }
        store(skb, at, &[tuple.src, tuple.dst])?;
    } else {
        let [ttl, protocol, c0, c1] = packet.third.to_ne_bytes();
        let sum = u64::from(!u16::from_ne_bytes([c0, c1])) + u64::from(rise);
        let [c0, c1] = (!csum::fold(sum)).to_ne_bytes();
        let third = u32::from_ne_bytes([ttl, protocol, c0, c1]);
        let (src, dst) = (tuple.src.words[3], tuple.dst.words[3]);
        if has_ports && packet.l4 == at + 12 {
            return store(skb, at, &[third, src, dst, ports(tuple)]);
        }
        store(skb, at, &[third, src, dst])?;
    }
    if has_ports { store(skb, packet.l4, &ports(tuple)) } else { Some(()) }
}

/// An address of the outermost header and, for IPv4, its checksum.
#[inline(always)]
pub fn set_address(skb: Skb, is_v6: bool, at: u32, old: &Addr, new: &Addr) -> Option<()> {
    if is_v6 {
        return store(skb, at, &new.words);
    }
    let header = maps::link_header();
    let r = unsafe { bpf_l3_csum_replace(skb, header + 10, old.words[3].into(), new.words[3].into(), 4) };
    if r != 0 {
        return None;
    }
    store(skb, at, &new.words[3])
}
