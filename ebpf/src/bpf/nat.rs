//! Masquerading a client as this node: which address and port.
use crate::{
    conntrack::{self, Entry},
    count, maps, select,
    skb::{self, Packet, Skb, TCP_RST, TCP_SYN},
    watch,
};
use aya_ebpf::bindings::BPF_NOEXIST;
use sheave_ebpf::{
    addr::Addr,
    conntrack::{Flow, HOOK_EGRESS, HOOK_INGRESS, Phase, ROLE_MASQUERADE, ROLE_RETURN, Tuple, seen},
    counter::Counter,
    device::Device,
    frontend::FrontendKey,
    proto,
};

/// Ports tried before the range counts as exhausted. With half of the range taken, 32 failures in a row are as likely
/// as one in four billion.
const TRIES: u32 = 32;

/// Whether a port (network order) is one that masquerades clients.
#[inline(always)]
pub fn is_ours(port: u16) -> bool {
    let (first, count) = maps::snat_ports();
    u32::from(u16::from_be(port)).wrapping_sub(first) < count
}

/// Whether what arrives at a masquerading port answers the flow that has the port. netfilter takes such ports as well, without
/// asking: for what kube-proxy masquerades, and for a connection of this node's own whose port is taken. Where both use one
/// towards the same backend, TCP tells whose connection that has (F37). A SYN within another connection is answered by a bare
/// ACK; a SYN-ACK after the flow's end is for another's SYN. Either way the flow gives the port up.
#[inline(always)]
pub fn is_answer(packet: &Packet, entry: &Entry) -> bool {
    if packet.tuple.proto != proto::TCP || !packet.is_ordinary() {
        return true;
    }
    let is_first = seen::flags(entry.flow.seen) == 0;
    let is_expected = if is_first { packet.tcp & (TCP_SYN | TCP_RST) != 0 } else { packet.tcp & TCP_SYN == 0 };
    if !is_expected && gives_up(packet, &entry.flow) {
        return false;
    }
    if is_first {
        entry.touch(packet, select::now());
    }
    true
}

/// Gives the port up if the packet cannot be the flow's. The client's next packet is masqueraded anew.
#[inline(never)]
fn gives_up(packet: &Packet, flow: &Flow) -> bool {
    let reply = packet.tuple.after_ingress(flow).at(HOOK_EGRESS);
    let (dialled, replied) = conntrack::seen_of(&reply);
    let is_anothers = if packet.tcp & TCP_SYN == 0 {
        replied & seen::ANY == 0
    } else {
        Phase::of(proto::TCP, dialled, replied) as u8 == Phase::Closed as u8
    };
    if is_anothers {
        // Whoever takes the port next must not share it.
        maps::remove_flow(&reply.reversed());
        maps::remove_flow(&packet.tuple);
        count::bump(Counter::SnatGivenUp);
    }
    is_anothers
}

/// The address that a device lends to a packet of a family; `None` when it has none.
#[inline(always)]
pub fn address(device: &Device, is_v6: bool) -> Option<Addr> {
    let addr = if is_v6 { device.v6 } else { device.v4 };
    let [a, b, _, d] = addr.words;
    if (a | b | d) == 0 { None } else { Some(addr) }
}

/// The first packet of a flow whose client is masqueraded leaves: chooses a port and remembers it. False: the packet is to
/// be dropped, which is counted here.
#[inline(never)]
pub fn masquerade(skb: Skb, packet: &Packet, flow: &mut Flow) -> bool {
    let Some(addr) = maps::device(skb::ifindex(skb)).and_then(|device| address(&device, packet.is_v6)) else {
        watch::kept_back(packet, Counter::SnatNoAddress);
        return false;
    };
    let Some(port) = choose(packet, &addr) else { return false };
    *flow = entry(packet, &addr, port, ROLE_MASQUERADE);
    if maps::insert_flow(&packet.tuple, flow, BPF_NOEXIST).is_err() {
        // Another CPU was faster with the flow's next packet: its choice holds.
        maps::remove_flow(&back(packet, &addr, port));
        let Some(theirs) = conntrack::find(&packet.tuple) else {
            watch::kept_back(packet, Counter::ConntrackFull);
            return false;
        };
        *flow = theirs.flow;
    }
    true
}

/// A free port, network order, at random; taken when this returns.
#[inline(always)]
fn choose(packet: &Packet, addr: &Addr) -> Option<u16> {
    let to_client = entry(packet, &packet.tuple.src, packet.tuple.src_port, ROLE_RETURN);
    if packet.tuple.proto == proto::SCTP {
        // Its checksum covers the ports and cannot be made good here: the client's own port, or none.
        let port = packet.tuple.src_port;
        if maps::insert_flow(&back(packet, addr, port), &to_client, BPF_NOEXIST).is_err() {
            watch::kept_back(packet, Counter::PacketSctpPort);
            return None;
        }
        return Some(port);
    }
    for _ in 0..TRIES {
        let port = draw(maps::snat_ports());
        if try_port(packet, addr, port, &to_client) {
            return Some(port);
        }
        count::bump(Counter::SnatRetry);
    }
    watch::kept_back(packet, Counter::SnatExhausted);
    None
}

/// One of the ports from `first` on, so many, at random; network order.
#[inline(always)]
pub fn draw((first, count): (u32, u32)) -> u16 {
    ((first + select::below(count, select::random())) as u16).to_be()
}

/// Takes a port if no flow has it. A frontend's port would make the reply a new connection to that frontend.
#[inline(never)]
fn try_port(packet: &Packet, addr: &Addr, port: u16, to_client: &Flow) -> bool {
    let frontend = FrontendKey { addr: *addr, port, proto: packet.tuple.proto, zero: 0 };
    if maps::frontend(&frontend).is_some() {
        return false;
    }
    maps::insert_flow(&back(packet, addr, port), to_client, BPF_NOEXIST).is_ok()
}

/// The reply to the masqueraded client, as it arrives.
#[inline(always)]
fn back(packet: &Packet, addr: &Addr, port: u16) -> Tuple {
    packet.tuple.from(*addr, port).reversed().at(HOOK_INGRESS)
}

/// An entry of the packet or of its reply: the backend's port is at the other end of both.
#[inline(always)]
fn entry(packet: &Packet, to: &Addr, to_port: u16, flags: u32) -> Flow {
    let now = select::now();
    Flow {
        to: *to,
        seen: seen::word(0, now),
        service: 0,
        backend: 0,
        created: now,
        to_port,
        other_port: packet.tuple.dst_port,
        flags,
        zero: 0,
    }
}
