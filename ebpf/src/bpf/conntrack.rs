//! The map side of conntrack: finding, touching and making flows.
use crate::{
    maps, select,
    skb::{Packet, TCP_FIN, TCP_RST},
};
use aya_ebpf::bindings::BPF_ANY;
use sheave_ebpf::{
    backend::RETIRED,
    conntrack::{FLAG_MASQUERADE, FLAG_REFUSED, Flow, HOOK_EGRESS, Phase, ROLE_DIAL, ROLE_REPLY, Tuple, seen},
    counter::Counter,
    meta, proto,
};

/// An entry, copied out, and where to write its `seen`.
pub struct Entry {
    pub flow: Flow,
    seen: *mut u64,
}

#[inline(always)]
pub fn find(tuple: &Tuple) -> Option<Entry> {
    let flow = maps::flow(tuple)?;
    // SAFETY: a live element, copied at once; `seen` is an aligned word of it.
    unsafe { Some(Entry { flow: *flow, seen: &raw mut (*flow).seen }) }
}

impl Entry {
    /// Notes that the packet was seen. Writes only what changes, so that a busy flow's line stays shared.
    #[inline(always)]
    pub fn touch(&self, packet: &Packet) {
        let old = self.flow.seen;
        let now = select::now();
        let stream = if now.wrapping_sub(self.flow.created) >= seen::STREAM_AGE { seen::STREAM } else { 0 };
        let word = seen::word(seen::flags(old) | kinds(packet) | stream, now);
        if word != old {
            // SAFETY: map values outlive this run. Should the element be another flow's by now, that flow is kept a
            // little longer, or opened anew a little sooner.
            unsafe { self.seen.write_volatile(word) }
        }
    }
}

/// What of a packet is worth remembering.
#[inline(always)]
fn kinds(packet: &Packet) -> u32 {
    let fin = if packet.tcp & TCP_FIN != 0 { seen::FIN } else { 0 };
    let rst = if packet.tcp & TCP_RST != 0 { seen::RST } else { 0 };
    seen::ANY | fin | rst
}

/// The reply to a dialled flow, as it leaves.
#[inline(always)]
fn reply_of(dial: &Tuple, flow: &Flow) -> Tuple {
    dial.to(flow.to, flow.to_port).reversed().at(HOOK_EGRESS)
}

/// Whether a packet that may open a flow goes where the entry says: its backend is still the service's and serves, and
/// a TCP connection is not over. A port used again by its client makes a new choice (F51).
#[inline(always)]
pub fn is_current(tuple: &Tuple, flow: &Flow, service: u32) -> bool {
    if flow.flags & FLAG_REFUSED != 0 || flow.service != service {
        return false;
    }
    let (Some(backend), Some(count)) = (maps::backend(flow.backend), maps::connections(flow.backend)) else {
        return false;
    };
    // SAFETY: array slots are stable and aligned.
    let retired = unsafe { count.read_volatile() } & RETIRED != 0;
    if retired || backend.service != service || backend.port != flow.to_port || !backend.addr.is(&flow.to) {
        return false;
    }
    tuple.proto != proto::TCP || !is_over(tuple, flow)
}

#[inline(never)]
fn is_over(tuple: &Tuple, flow: &Flow) -> bool {
    let reply = reply_of(tuple, flow);
    let replies = maps::flow(&reply).map_or(0, |entry| {
        // SAFETY: a live element; one aligned word.
        unsafe { (&raw const (*entry).seen).read_volatile() }
    });
    phase(tuple.proto, flow.seen, replies) >= Phase::Closing
}

#[inline(always)]
fn phase(protocol: u8, dial: u64, reply: u64) -> Phase {
    Phase::of(protocol, seen::flags(dial), seen::flags(reply))
}

/// Why a flow was not made.
pub enum Refused {
    /// The client and port already talk to this backend through another address.
    Clash,
    /// The table took no entry.
    Full,
}

impl Refused {
    /// What is counted.
    #[inline(always)]
    pub const fn counter(&self) -> Counter {
        match self {
            Self::Clash => Counter::PacketClash,
            Self::Full => Counter::ConntrackFull,
        }
    }
}

/// Enters a flow that `packet` opens: replies first, so that none goes out untranslated.
#[inline(never)]
pub fn open(packet: &Packet, flow: &Flow) -> Result<(), Refused> {
    let reply = reply_of(&packet.tuple, flow);
    if let Some(entry) = find(&reply)
        && entry.flow.role() == ROLE_REPLY
    {
        let other = !entry.flow.to.is(&packet.tuple.dst) || entry.flow.to_port != packet.tuple.dst_port;
        if other && is_alive(&packet.tuple, &entry.flow) {
            return Err(Refused::Clash);
        }
    }
    let back = Flow {
        to: packet.tuple.dst,
        to_port: packet.tuple.dst_port,
        seen: seen::word(0, seen::time(flow.seen)),
        flags: flow.flags & !FLAG_MASQUERADE | ROLE_REPLY,
        ..*flow
    };
    let made = maps::insert_flow(&reply, &back, BPF_ANY);
    // A refused flow has no entry of its own: its next packet asks again whether there is a backend.
    let made = if flow.flags & FLAG_REFUSED == 0 {
        made.and_then(|()| maps::insert_flow(&packet.tuple, flow, BPF_ANY))
    } else {
        made
    };
    if made.is_err() {
        return Err(Refused::Full);
    }
    Ok(())
}

/// Whether the flow that a reply entry belongs to may still carry packets.
#[inline(always)]
fn is_alive(tuple: &Tuple, reply: &Flow) -> bool {
    let dial = tuple.to(reply.to, reply.to_port);
    let Some(entry) = maps::flow(&dial) else { return false };
    // SAFETY: a live element; one aligned word.
    let dialled = unsafe { (&raw const (*entry).seen).read_volatile() };
    let phase = phase(tuple.proto, dialled, reply.seen);
    phase < Phase::Closed && select::now().wrapping_sub(seen::time(dialled)) < phase.timeout(tuple.proto)
}

/// A flow of now, not yet entered.
#[inline(always)]
pub fn flow(packet: &Packet, service: u32, id: u32, flags: u16) -> Flow {
    let now = select::now();
    Flow {
        to: sheave_ebpf::addr::Addr { words: [0; 4] },
        seen: seen::word(kinds(packet), now),
        service,
        backend: id,
        created: now,
        to_port: 0,
        flags: flags | ROLE_DIAL,
    }
}

/// Tells the quick checks that there is a flow of a kind: `MASQUERADED_FLOWS` or `PLAIN_FLOWS` of `META`.
#[inline(always)]
pub fn announce(kind: u32) {
    if let Some(word) = maps::meta(kind) {
        let now = u64::from(select::now());
        // SAFETY: array slots are stable and aligned. Once a second at most, so that the line stays shared.
        unsafe {
            if word.read_volatile() != now {
                word.write_volatile(now);
            }
        }
    }
}

/// Whether there may be flows of a kind.
#[inline(always)]
pub fn are_there(kind: u32) -> bool {
    maps::meta_word(kind) != 0
}

/// Whether devices of workloads have the programs that hide a client and bring its replies back.
#[inline(always)]
pub fn can_hide_from_workloads() -> bool {
    are_there(meta::WORKLOAD_PROGRAMS)
}

/// Whether there may be flows at all.
#[inline(always)]
pub fn any() -> bool {
    are_there(meta::MASQUERADED_FLOWS) || are_there(meta::PLAIN_FLOWS)
}
