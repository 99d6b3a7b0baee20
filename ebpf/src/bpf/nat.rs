//! Masquerading a client as this node: which address and port.
use crate::{
    conntrack, count, maps, select,
    skb::{self, DROP, NEXT, Packet, Skb},
    watch,
};
use aya_ebpf::bindings::BPF_NOEXIST;
use sheave_ebpf::{
    addr::Addr,
    conntrack::{Flow, HOOK_INGRESS, ROLE_MASQUERADE, ROLE_RETURN, Tuple, seen},
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

/// The address that a device lends to a packet of a family; `None` when it has none.
#[inline(always)]
pub fn address(device: &Device, is_v6: bool) -> Option<Addr> {
    let addr = if is_v6 { device.v6 } else { device.v4 };
    let [a, b, _, d] = addr.words;
    if (a | b | d) == 0 { None } else { Some(addr) }
}

/// The first packet of a flow whose client is masqueraded leaves: chooses a port, remembers it, rewrites.
#[inline(never)]
pub fn masquerade(skb: Skb, packet: &Packet) -> i32 {
    let Some(addr) = maps::device(skb::ifindex(skb)).and_then(|device| address(&device, packet.is_v6)) else {
        watch::kept_back(packet, Counter::SnatNoAddress);
        return DROP;
    };
    let Some(port) = choose(packet, &addr) else { return DROP };
    let forward = entry(packet, &addr, port, ROLE_MASQUERADE);
    if maps::insert_flow(&packet.tuple, &forward, BPF_NOEXIST).is_err() {
        // Another CPU was faster with the flow's next packet: its choice holds.
        maps::remove_flow(&back(packet, &addr, port));
        let Some(theirs) = conntrack::find(&packet.tuple) else {
            watch::kept_back(packet, Counter::ConntrackFull);
            return DROP;
        };
        return send(skb, packet, &theirs.flow);
    }
    send(skb, packet, &forward)
}

#[inline(always)]
fn send(skb: Skb, packet: &Packet, flow: &Flow) -> i32 {
    if skb::set_source(skb, packet, flow).is_none() {
        watch::kept_back(packet, Counter::PacketMalformed);
        return DROP;
    }
    NEXT
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
