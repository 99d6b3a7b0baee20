//! Masquerading a client as this node: which address and port.
use crate::{
    conntrack::{self, EEXIST, Entry},
    count, maps, select,
    skb::{self, Packet, Skb},
};
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use sheave_ebpf::{
    addr::Addr,
    conntrack::{Flow, HOOK_EGRESS, HOOK_INGRESS, ROLE_MASQUERADE, ROLE_RETURN, Tuple, seen},
    counter::Counter,
    device::Device,
    frontend::FrontendKey,
    proto, tcp,
};

/// Ports tried for one that no flow has. With half of the range taken, 24 failures in a row are as likely as one in 16
/// million.
const FREE_TRIES: u32 = 24;
/// Ports tried after that, one next to the other, which may be taken over, before the range counts as exhausted. VERIFIER: few,
/// each is thousands of steps.
const TRIES: u32 = FREE_TRIES + 4;

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
    let is_expected = if is_first { packet.tcp & (tcp::SYN | tcp::RST) != 0 } else { packet.tcp & tcp::SYN == 0 };
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
    let is_anothers = if packet.tcp & tcp::SYN == 0 {
        replied & seen::ANY == 0
    } else {
        // Not the client's word alone: it may use its port again at once, or somebody may have forged it.
        sheave_ebpf::conntrack::is_done(dialled, replied)
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
fn address(device: &Device, is_v6: bool) -> Option<Addr> {
    let addr = if is_v6 { device.v6 } else { device.v4 };
    let [a, b, _, d] = addr.words;
    if (a | b | d) == 0 { None } else { Some(addr) }
}

/// The first packet of a flow whose client is masqueraded leaves: chooses a port and remembers it. Or why the
/// packet cannot leave.
#[inline(never)]
pub fn masquerade(skb: Skb, packet: &Packet, flow: &mut Flow) -> Result<(), Counter> {
    let device = maps::device(skb::ifindex(skb));
    let addr = device.and_then(|device| address(&device, packet.is_v6)).ok_or(Counter::SnatNoAddress)?;
    let back = choose(packet, &addr, flow)?;
    *flow = entry(packet, &addr, back.dst_port, ROLE_MASQUERADE);
    if maps::insert_flow(&packet.tuple, flow, BPF_NOEXIST).is_err() {
        // Another CPU was faster with the flow's next packet: its choice holds.
        maps::remove_flow(&back);
        *flow = conntrack::find(&packet.tuple).ok_or(Counter::ConntrackFull)?.flow;
    }
    Ok(())
}

/// A free port, at random, taken when this returns: the reply to the masqueraded client, as it arrives. Its entry is `flow`.
#[inline(always)]
fn choose(packet: &Packet, addr: &Addr, flow: &mut Flow) -> Result<Tuple, Counter> {
    *flow = entry(packet, &packet.tuple.src, packet.tuple.src_port, ROLE_RETURN);
    let mut back = packet.tuple.from(*addr, packet.tuple.src_port).reversed().at(HOOK_INGRESS);
    // SCTP's checksum covers the ports and cannot be made good here: the client's own port, or none. No shortage makes another
    // client's association with that port dispensable.
    let is_fixed = packet.tuple.proto == proto::SCTP;
    for turn in 0..TRIES {
        if !is_fixed {
            back.dst_port = if turn <= FREE_TRIES { draw(maps::snat_ports()) } else { next(back.dst_port) };
        }
        if is_fixed || !is_frontends(&back) {
            match maps::insert_flow(&back, flow, BPF_NOEXIST) {
                Ok(()) => return Ok(back),
                Err(EEXIST) if (is_fixed || turn >= FREE_TRIES) && take_over(&back, flow, !is_fixed) => {
                    return Ok(back);
                }
                Err(_) => {}
            }
        }
        if is_fixed {
            return Err(Counter::PacketSctpPort);
        }
        count::bump(Counter::SnatRetry);
    }
    Err(Counter::SnatExhausted)
}

/// One of the ports from `first` on, so many, at random; network order.
#[inline(always)]
pub fn draw((first, count): (u32, u32)) -> u16 {
    ((first + select::below(count, select::random())) as u16).to_be()
}

/// The port after one of those, and after the last one the first; network order.
#[inline(always)]
fn next(port: u16) -> u16 {
    let (first, count) = maps::snat_ports();
    let offset = u32::from(u16::from_be(port)).wrapping_sub(first) + 1;
    ((first + if offset < count { offset } else { 0 }) as u16).to_be()
}

/// Whether the reply would be a new connection to a frontend.
#[inline(never)]
fn is_frontends(back: &Tuple) -> bool {
    maps::frontend(&FrontendKey { addr: back.dst, port: back.dst_port, proto: back.proto, zero: 0 }).is_some()
}

/// Takes the port of a flow that is over, though no agent was there to remove it, or where room is short dispensable. Its
/// packets do not leave with this port any more when this one's replies begin to go to another client.
#[inline(always)]
fn take_over(back: &Tuple, to_client: &Flow, is_short: bool) -> bool {
    let mut key = *back;
    if !is_returned(&mut key) || !conntrack::end(&mut key, is_short) {
        return false;
    }
    maps::remove_flow(&key);
    maps::insert_flow(back, to_client, BPF_ANY).is_ok()
}

/// Whether a reply belongs to a masqueraded client; `key` is that reply as it leaves then.
#[inline(never)]
fn is_returned(key: &mut Tuple) -> bool {
    let Some(Entry { flow, .. }) = conntrack::find(key) else { return false };
    *key = key.to(flow.to, flow.to_port).at(HOOK_EGRESS);
    flow.role() == ROLE_RETURN
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
