//! The map side of conntrack: finding, touching and making flows.
use crate::{count, maps, nat, select, skb::Packet, verifier::forget};
use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use sheave_ebpf::{
    addr::Addr,
    backend::RETIRED,
    conntrack::{self, FLAG_MASQUERADE, Flow, ROLE_DIAL, ROLE_REPLY, Tuple, seen},
    counter::Counter,
    frontend::FrontendKey,
    meta, proto,
};

/// What a map says of `BPF_NOEXIST` where there is an entry.
pub const EEXIST: i32 = -17;

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
    /// Notes that the packet was seen at `now`. Writes only what changes, so that a busy flow's line stays shared.
    #[inline(always)]
    pub fn touch(&self, packet: &Packet, now: u32) {
        let old = self.flow.seen;
        let stream = if now.saturating_sub(self.flow.created) >= seen::STREAM_AGE { seen::STREAM } else { 0 };
        let word = seen::word(seen::after(seen::flags(old), seen::of_segment(packet.tcp) | stream), now);
        if word != old {
            // SAFETY: map values outlive this run. Should the element be another flow's by now, that flow is kept a
            // little longer, or opened anew a little sooner.
            unsafe { self.seen.write_volatile(word) }
        }
    }
}

/// Whether a packet that may open a flow goes where the entry says: its backend is still the service's and serves, and
/// a TCP connection is not done. After that, a port used again by its client makes a new choice (F51).
#[inline(always)]
pub fn is_current(tuple: &Tuple, flow: &Flow, service: u32) -> bool {
    if flow.service != service {
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
    tuple.proto != proto::TCP || !is_done(tuple, flow)
}

#[inline(never)]
fn is_done(tuple: &Tuple, flow: &Flow) -> bool {
    let reply = tuple.reply(flow);
    let replies = maps::flow(&reply).map_or(0, |entry| {
        // SAFETY: a live element; one aligned word.
        unsafe { (&raw const (*entry).seen).read_volatile() }
    });
    conntrack::is_done(seen::flags(flow.seen), seen::flags(replies))
}

/// What was seen of the client's packets and of the replies, given a reply as it leaves.
#[inline(always)]
pub fn seen_of(reply: &Tuple) -> (u32, u32) {
    let Some(Entry { flow: replies, .. }) = find(reply) else { return (0, 0) };
    let dialled = find(&reply.dial(&replies)).map_or(0, |dial| dial.flow.seen);
    (seen::flags(dialled), seen::flags(replies.seen))
}

/// Why a flow was not made.
pub enum Refused {
    /// The client and port already talk to this backend through another address or port.
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

/// Enters a flow that `packet` opens, unless its replies would be those of another flow. Of two CPUs that open such flows at
/// once, one sees the other's; only where both find what a flow that is over has left may both go on.
#[inline(never)]
pub fn open(packet: &Packet, flow: &Flow) -> Result<(), Refused> {
    let reply = packet.tuple.reply(flow);
    let how = match find(&reply) {
        Some(Entry { flow: theirs, .. })
            if !is_for(&theirs, packet) && stands(&reply, &theirs, flow.created, false) =>
        {
            return Err(Refused::Clash);
        }
        Some(_) => BPF_ANY,
        None => BPF_NOEXIST,
    };
    match enter(packet, flow, &reply, how) {
        // Another CPU was faster, with another flow or with the next packet of this one.
        Err(Refused::Clash) if find(&reply).is_some_and(|entry| is_for(&entry.flow, packet)) => Ok(()),
        made => made,
    }
}

/// Whether replies are those to a packet that dials.
#[inline(always)]
fn is_for(replies: &Flow, packet: &Packet) -> bool {
    let Tuple { dst, dst_port, src_port, .. } = &packet.tuple;
    replies.to.is(dst) && replies.to_port == *dst_port && replies.other_port == *src_port
}

/// Whether a flow stands whose replies these are: its client may have been led elsewhere since. One that is over, though
/// no agent was there to remove it, goes, so that it does not go on with another one's replies; and where room is short, one
/// that is dispensable.
#[inline(always)]
fn stands(reply: &Tuple, replies: &Flow, now: u32, is_short: bool) -> bool {
    if replies.role() != ROLE_REPLY {
        return false;
    }
    let dialled = reply.dial(replies);
    let Some(Entry { flow: dial, .. }) = find(&dialled) else {
        // Another CPU is about to enter it, unless a full table has lost it.
        return now.saturating_sub(replies.created) <= 1;
    };
    if !dial.to.is(&reply.src) || dial.to_port != reply.src_port || dial.other_port != reply.dst_port {
        return false;
    }
    let goes = if is_short {
        conntrack::is_dispensable(reply.proto, now, dial.seen, replies.seen)
    } else {
        conntrack::is_over(reply.proto, now, dial.seen, replies.seen)
    };
    if goes {
        maps::remove_flow(&dialled);
    }
    !goes
}

/// Ends the flow of these replies, if it is over, or where room is short dispensable. Whether it did: of several CPUs that
/// try, one may take what the flow held. VERIFIER: `reply` is the packet that it answers then; a tuple more would not fit on
/// the stack.
#[inline(never)]
pub fn end(reply: &mut Tuple, is_short: bool) -> bool {
    let has_ended = find(reply).is_some_and(|Entry { flow: theirs, .. }| {
        theirs.role() == ROLE_REPLY && !stands(reply, &theirs, select::now(), is_short) && maps::remove_flow(reply)
    });
    *reply = reply.reversed();
    has_ended
}

/// Ports tried before the client counts as having none left, to this backend.
const TRIES: u32 = 16;

/// Enters a flow that [`open`] refused for a clash, with another port for the client. SCTP's checksum covers the ports
/// and cannot be made good here.
#[inline(never)]
pub fn open_from_another_port(packet: &Packet, flow: &mut Flow) -> Result<(), Refused> {
    if packet.tuple.proto == proto::SCTP {
        return Err(Refused::Clash);
    }
    // Servers that trust privileged ports go on to: netfilter keeps to the kind as well.
    let is_privileged = u16::from_be(packet.tuple.src_port) < 1024;
    let ports = if is_privileged { (512, 512) } else { (1024, 64_512) };
    for _ in 0..TRIES {
        flow.other_port = nat::draw(ports);
        match try_port(packet, flow) {
            Err(Refused::Clash) => {}
            Err(Refused::Full) => return Err(Refused::Full),
            Ok(()) => {
                count::bump(Counter::PacketOtherPort);
                return Ok(());
            }
        }
    }
    Err(Refused::Clash)
}

/// Enters the flow if its port is free for it: one that no other flow of the client to this backend has, and none that
/// would make a reply look like a packet to a frontend or to a masqueraded client.
#[inline(never)]
fn try_port(packet: &Packet, flow: &Flow) -> Result<(), Refused> {
    let Tuple { src, proto, .. } = packet.tuple;
    let frontend = FrontendKey { addr: src, port: flow.other_port, proto, zero: 0 };
    if nat::is_ours(flow.other_port) || maps::frontend(&frontend).is_some() {
        return Err(Refused::Clash);
    }
    enter(packet, flow, &packet.tuple.reply(flow), BPF_NOEXIST)
}

/// Replies first, so that none goes out untranslated. With `BPF_NOEXIST`, a clash is an entry that is there.
#[inline(always)]
fn enter(packet: &Packet, flow: &Flow, reply: &Tuple, how: u32) -> Result<(), Refused> {
    let back = Flow {
        to: packet.tuple.dst,
        to_port: packet.tuple.dst_port,
        other_port: packet.tuple.src_port,
        seen: seen::word(0, seen::time(flow.seen)),
        flags: flow.flags & !FLAG_MASQUERADE | ROLE_REPLY,
        ..*flow
    };
    match maps::insert_flow(reply, &back, how) {
        Ok(()) => {}
        Err(EEXIST) => return Err(Refused::Clash),
        Err(_) => return Err(Refused::Full),
    }
    if maps::insert_flow(&packet.tuple, flow, BPF_ANY).is_err() {
        maps::remove_flow(reply);
        return Err(Refused::Full);
    }
    Ok(())
}

/// A flow of now, not yet entered.
#[inline(always)]
pub fn flow(packet: &Packet, service: u32, id: u32, flags: u32, (to, to_port): (&Addr, u16)) -> Flow {
    let now = select::now();
    Flow {
        to: *to,
        seen: seen::word(seen::of_segment(packet.tcp), now),
        service,
        backend: id,
        created: now,
        to_port,
        other_port: packet.tuple.src_port,
        flags: forget(flags | ROLE_DIAL, now),
        zero: 0,
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

/// Whether devices of workloads have the programs that masquerade a client and bring its replies back.
#[inline(always)]
pub fn can_masquerade_to_workloads() -> bool {
    are_there(meta::WORKLOAD_PROGRAMS)
}

/// Whether there may be flows at all.
#[inline(always)]
pub fn any() -> bool {
    are_there(meta::MASQUERADED_FLOWS) || are_there(meta::PLAIN_FLOWS)
}
