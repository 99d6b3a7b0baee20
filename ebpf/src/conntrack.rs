//! Flows of the packet path. A flow has up to four entries, each of which says how to rewrite one kind of packet at one
//! hook:
//!
//! | hook | packet | role | the entry names |
//! |---|---|---|---|
//! | ingress | client → frontend | [`ROLE_DIAL`] | the new destination: the backend |
//! | egress | client → backend | [`ROLE_MASQUERADE`] | the new source: this node and a port of ours |
//! | ingress | backend → this node | [`ROLE_RETURN`] | the new destination: the client |
//! | egress | backend → client | [`ROLE_REPLY`] | the new source: the frontend |
//!
//! The two in the middle exist only if the client is masqueraded. Source addresses are rewritten at egress only,
//! so that reverse-path filters see the address that a packet really comes from.
//!
//! A client that reaches one backend through two frontends from one port has a second flow whose packets would be the
//! first one's after ingress. Its entries name another port for the client, which takes that at ingress and has its own
//! back at egress: everything in between, masquerading as well, sees two clients' ports.
use crate::{addr::Addr, proto};

pod! {
    /// A packet as a hook sees it, before the hook changes it.
    pub struct Tuple [40] {
        /// Source address.
        pub src: Addr,
        /// Destination address.
        pub dst: Addr,
        /// Source port, network order.
        pub src_port: u16,
        /// Destination port, network order.
        pub dst_port: u16,
        /// IANA protocol number.
        pub proto: u8,
        /// `HOOK_…`
        pub hook: u8,
        /// Always 0.
        pub zero: u16,
    }
}

/// Where packets arrive: entries name a new destination.
pub const HOOK_INGRESS: u8 = 0;
/// Where packets leave: entries name a new source.
pub const HOOK_EGRESS: u8 = 1;

impl Tuple {
    /// The packet that answers this one, at the same hook.
    #[inline(always)]
    #[must_use]
    pub const fn reversed(&self) -> Self {
        Self { src: self.dst, dst: self.src, src_port: self.dst_port, dst_port: self.src_port, ..*self }
    }

    /// The same packet at another hook.
    #[inline(always)]
    #[must_use]
    pub const fn at(&self, hook: u8) -> Self {
        Self { hook, ..*self }
    }

    /// The same packet to another destination.
    #[inline(always)]
    #[must_use]
    pub const fn to(&self, dst: Addr, dst_port: u16) -> Self {
        Self { dst, dst_port, ..*self }
    }

    /// The same packet from another source.
    #[inline(always)]
    #[must_use]
    pub const fn from(&self, src: Addr, src_port: u16) -> Self {
        Self { src, src_port, ..*self }
    }

    /// What its entry makes of a packet that arrives.
    #[inline(always)]
    #[must_use]
    pub const fn after_ingress(&self, flow: &Flow) -> Self {
        Self { dst: flow.to, dst_port: flow.to_port, src_port: flow.other_port, ..*self }
    }

    /// What its entry makes of a packet that leaves.
    #[inline(always)]
    #[must_use]
    pub const fn after_egress(&self, flow: &Flow) -> Self {
        Self { src: flow.to, src_port: flow.to_port, dst_port: flow.other_port, ..*self }
    }

    /// Of a packet that dials, and its entry: the reply as it leaves.
    #[inline(always)]
    #[must_use]
    pub const fn reply(&self, dial: &Flow) -> Self {
        self.after_ingress(dial).reversed().at(HOOK_EGRESS)
    }

    /// Of a reply that leaves, and its entry: the packet that dialled.
    #[inline(always)]
    #[must_use]
    pub const fn dial(&self, reply: &Flow) -> Self {
        self.after_egress(reply).reversed().at(HOOK_INGRESS)
    }
}

pod! {
    /// An entry. Only `seen` is written after the entry was made.
    pub struct Flow [48] {
        /// The new address.
        pub to: Addr,
        /// When last, and what: see [`seen`]. One word, so that it is read and written whole.
        pub seen: u64,
        /// Service id when the flow was made; a hint, since ids are used again.
        pub service: u32,
        /// Backend id when the flow was made; valid while that id still names the flow's backend.
        pub backend: u32,
        /// Boot-time seconds at which the flow was made.
        pub created: u32,
        /// The new port, network order.
        pub to_port: u16,
        /// The port at the other end, network order: the packet's own, unless the client was given another one.
        pub other_port: u16,
        /// `ROLE_…` and `FLAG_…`.
        pub flags: u32,
        /// Always 0.
        pub zero: u32,
    }
}

/// Client → frontend, at ingress.
pub const ROLE_DIAL: u32 = 0;
/// Backend → client, at egress.
pub const ROLE_REPLY: u32 = 1;
/// Client → backend, at egress.
pub const ROLE_MASQUERADE: u32 = 2;
/// Backend → this node, at ingress.
pub const ROLE_RETURN: u32 = 3;
/// Bits of the role.
pub const ROLE_MASK: u32 = 3;
/// The client is masqueraded: its packets get this node's address at egress.
pub const FLAG_MASQUERADE: u32 = 1 << 2;

impl Flow {
    /// Room for one.
    pub const NONE: Self = Self {
        to: Addr { words: [0; 4] },
        seen: 0,
        service: 0,
        backend: 0,
        created: 0,
        to_port: 0,
        other_port: 0,
        flags: 0,
        zero: 0,
    };

    /// One of the `ROLE_…` constants.
    #[inline(always)]
    #[must_use]
    pub const fn role(&self) -> u32 {
        self.flags & ROLE_MASK
    }
}

/// The word that says when packets of one direction were seen last, and which kinds of TCP segments ever.
pub mod seen {
    use crate::tcp;

    /// A segment with FIN.
    pub const FIN: u32 = 1;
    /// A segment with RST.
    pub const RST: u32 = 1 << 1;
    /// A packet at all. The entry of the replies is made before there is one.
    pub const ANY: u32 = 1 << 2;
    /// A packet when the flow was two seconds old: more than a question.
    pub const STREAM: u32 = 1 << 3;
    /// TCP: nothing that belongs to a connection yet, but SYNs. Of one packet: it is none of a connection that is made.
    pub const SYN: u32 = 1 << 4;
    /// From which age on, in seconds, packets make a stream of a flow.
    pub const STREAM_AGE: u32 = 2;

    /// What is worth remembering of a packet with these TCP flags (0 for other protocols). On a connection every segment
    /// but a RST acknowledges something: others are part of the handshake, or nobody's honest ones, whatever they say.
    #[inline(always)]
    #[must_use]
    pub const fn of_segment(flags: u8) -> u32 {
        let rst = if flags & tcp::RST != 0 { RST } else { 0 };
        if flags & (tcp::SYN | tcp::ACK) != tcp::ACK {
            return ANY | SYN | rst;
        }
        let fin = if flags & tcp::FIN != 0 { FIN } else { 0 };
        ANY | fin | rst
    }

    /// What was seen of one side after another packet, given what was before. A RST counts until its side speaks on: a
    /// stale one, or one that somebody forged, ends no connection, and must not end its flow. A SYN is not speaking on:
    /// it leaves a connection as it is, and one that is not made yet stays that.
    #[inline(always)]
    #[must_use]
    pub const fn after(then: u32, packet: u32) -> u32 {
        let before = if packet & SYN == 0 { then & !(RST | SYN) } else { then };
        before | packet & !SYN
    }

    /// Flags and time in boot-time seconds.
    #[inline(always)]
    #[must_use]
    pub const fn word(flags: u32, time: u32) -> u64 {
        (flags as u64) << 32 | time as u64
    }

    /// Boot-time seconds.
    #[inline(always)]
    #[must_use]
    pub const fn time(word: u64) -> u32 {
        word as u32
    }

    /// What was seen.
    #[inline(always)]
    #[must_use]
    pub const fn flags(word: u64) -> u32 {
        (word >> 32) as u32
    }
}

pod! {
    /// Names the fragments of one packet at one hook.
    pub struct FragmentKey [40] {
        /// Source address.
        pub src: Addr,
        /// Destination address.
        pub dst: Addr,
        /// The packet's number, as it stands there.
        pub id: u32,
        /// IANA protocol number.
        pub proto: u8,
        /// `HOOK_…`
        pub hook: u8,
        /// Always 0.
        pub zero: u16,
    }
}

pod! {
    /// What only the first fragment says.
    pub struct Ports [4] {
        /// Source port, network order.
        pub src: u16,
        /// Destination port, network order.
        pub dst: u16,
    }
}

/// Where a flow is in its life, from what was seen in each direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// No answer yet, or of TCP: the client has not acknowledged one.
    Opening,
    /// UDP: a question and its answer, and no more for two seconds.
    Answered,
    /// Both sides have spoken.
    Open,
    /// TCP: one side is done.
    Closing,
    /// TCP: both sides are done, or one has given up.
    Closed,
}

impl Phase {
    /// From the `seen` flags of the client's packets and of the replies.
    #[inline(always)]
    #[must_use]
    pub const fn of(protocol: u8, dial: u32, reply: u32) -> Self {
        if protocol == proto::TCP {
            if (dial | reply) & seen::RST != 0 || dial & reply & seen::FIN != 0 {
                return Self::Closed;
            }
            if (dial | reply) & seen::FIN != 0 {
                return Self::Closing;
            }
        }
        if reply & seen::ANY == 0 || (protocol == proto::TCP && dial & seen::SYN != 0) {
            Self::Opening
        } else if protocol == proto::UDP && (dial | reply) & seen::STREAM == 0 {
            Self::Answered
        } else {
            Self::Open
        }
    }

    /// Seconds without a packet after which a flow is forgotten: Linux's own values, and kube-proxy's two for TCP.
    #[inline(always)]
    #[must_use]
    pub const fn timeout(self, protocol: u8) -> u32 {
        if protocol == proto::TCP {
            return match self {
                Self::Opening => 60,
                Self::Answered | Self::Open => 24 * 3600,
                Self::Closing => 3600,
                Self::Closed => 10,
            };
        }
        match self {
            Self::Opening | Self::Answered => 30,
            // An association says nothing for 30 seconds and more.
            Self::Open | Self::Closing | Self::Closed if protocol == proto::SCTP => 210,
            Self::Open | Self::Closing | Self::Closed => 120,
        }
    }
}

/// Whether a SYN opens a TCP flow anew, given the `seen` flags of the client's packets and of the replies (F51): the backend
/// has given up, or both sides are done. The client's word alone is not enough. Two forged packets would lead a connection
/// that lives to another backend; and a client that has given up is answered by its old one just as well.
#[inline(always)]
#[must_use]
pub const fn is_done(dial: u32, reply: u32) -> bool {
    reply & seen::RST != 0 || dial & reply & seen::FIN != 0
}

/// Whether a flow is to be forgotten at `now`, in boot-time seconds, given the `seen` words of the client's packets and of
/// the replies; 0 = there is no such entry.
#[inline(always)]
#[must_use]
pub const fn is_over(protocol: u8, now: u32, dial: u64, reply: u64) -> bool {
    idle(now, dial, reply) > Phase::of(protocol, seen::flags(dial), seen::flags(reply)).timeout(protocol)
}

/// Seconds without a packet after which a flow [is dispensable](is_dispensable): longer than a SYN waits for its second
/// repetition.
pub const PATIENCE: u32 = 5;

/// Whether a flow may go where room is short: it is over or done, or neither side can count on the other yet (netfilter,
/// which does the same, calls those not assured).
#[inline(always)]
#[must_use]
pub const fn is_dispensable(protocol: u8, now: u32, dial: u64, reply: u64) -> bool {
    let phase = Phase::of(protocol, seen::flags(dial), seen::flags(reply));
    let patience = match phase {
        Phase::Opening | Phase::Answered | Phase::Closed => PATIENCE,
        Phase::Open | Phase::Closing => phase.timeout(protocol),
    };
    idle(now, dial, reply) > patience
}

/// Seconds since the last packet of either side.
#[inline(always)]
const fn idle(now: u32, dial: u64, reply: u64) -> u32 {
    let (dialled, replied) = (seen::time(dial), seen::time(reply));
    now.saturating_sub(if dialled > replied { dialled } else { replied })
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u32 = seen::ANY;
    const SYN: u32 = A | seen::SYN;

    #[test]
    fn the_phase_follows_from_what_both_sides_sent() {
        let cases = [
            ("a SYN without answer", proto::TCP, SYN, 0, Phase::Opening, 60),
            ("a SYN answered, never acknowledged", proto::TCP, SYN, A, Phase::Opening, 60),
            ("the backend gave up waiting", proto::TCP, SYN, A | seen::RST, Phase::Closed, 10),
            ("an established connection", proto::TCP, A, A, Phase::Open, 86_400),
            ("the client is done", proto::TCP, A | seen::FIN, A, Phase::Closing, 3600),
            ("the backend is done", proto::TCP, A, A | seen::FIN, Phase::Closing, 3600),
            ("both are done", proto::TCP, A | seen::FIN, A | seen::FIN, Phase::Closed, 10),
            ("the client gave up before any answer", proto::TCP, A | seen::RST, 0, Phase::Closed, 10),
            ("the backend refused", proto::TCP, A, A | seen::RST, Phase::Closed, 10),
            ("a datagram without answer", proto::UDP, A, 0, Phase::Opening, 30),
            ("a datagram and its answer", proto::UDP, A, A, Phase::Answered, 30),
            ("datagrams both ways for a while", proto::UDP, A | seen::STREAM, A, Phase::Open, 120),
            ("answers for a while", proto::UDP, A, A | seen::STREAM, Phase::Open, 120),
            ("datagrams without answer for a while", proto::UDP, A | seen::STREAM, 0, Phase::Opening, 30),
            ("SCTP both ways", proto::SCTP, A, A, Phase::Open, 210),
        ];
        for (name, protocol, dial, reply, phase, timeout) in cases {
            assert_eq!(Phase::of(protocol, dial, reply), phase, "{name}");
            assert_eq!(phase.timeout(protocol), timeout, "{name}");
        }
    }

    #[test]
    fn a_syn_opens_a_flow_anew_when_the_backend_says_so() {
        let cases = [
            ("it is open", A, A, false),
            ("the client is done", A | seen::FIN, A, false),
            ("the client has given up", A | seen::RST, A, false),
            ("the backend is done", A, A | seen::FIN, false),
            ("both are done", A | seen::FIN, A | seen::FIN, true),
            ("the backend has refused or given up", A, A | seen::RST, true),
        ];
        for (name, dial, reply, expected) in cases {
            assert_eq!(is_done(dial, reply), expected, "{name}");
        }
    }

    #[test]
    fn a_reset_counts_until_its_side_speaks_on() {
        const RST: u32 = A | seen::RST;
        const FIN: u32 = A | seen::FIN;
        let cases: [(_, &[u32], _); 6] = [
            ("a RST", &[A, RST], Phase::Closed),
            ("a RST that nobody heeds", &[A, RST, A], Phase::Open),
            ("the true one after a false one", &[A, RST, A, RST], Phase::Closed),
            ("a RST after the end", &[A, FIN, RST], Phase::Closed),
            ("a RST that nobody heeds after the end", &[A, FIN, RST, A], Phase::Closing),
            ("a packet after the end", &[A, FIN, A], Phase::Closing),
        ];
        for (name, packets, phase) in cases {
            let flags = packets.iter().fold(0, |then, packet| seen::after(then, *packet));
            assert_eq!(Phase::of(proto::TCP, flags, A), phase, "{name}, the client's");
            assert_eq!(Phase::of(proto::TCP, A, flags), phase, "{name}, the backend's");
        }
    }

    /// A connection is made by what its client acknowledges, and nothing that is not part of it says how it fares.
    #[test]
    fn a_connection_is_open_once_its_client_acknowledges() {
        use crate::tcp::{ACK, FIN, RST, SYN as S};
        let cases: [(_, &[u8], &[u8], _); 12] = [
            ("a SYN", &[S], &[], Phase::Opening),
            ("SYNs, answered again and again", &[S, S, S], &[S | ACK, S | ACK], Phase::Opening),
            ("the handshake", &[S, ACK], &[S | ACK], Phase::Open),
            ("and a forged SYN", &[S, ACK, S], &[S | ACK], Phase::Open),
            ("an entry of an older version, and a forged SYN", &[ACK, S], &[ACK], Phase::Open),
            ("a forged FIN, which acknowledges nothing", &[S, FIN], &[S | ACK], Phase::Opening),
            ("a forged segment without flags", &[S, 0], &[S | ACK], Phase::Opening),
            ("a SYN that is a FIN as well", &[S | FIN], &[S | ACK], Phase::Opening),
            ("a forged ACK, which the backend resets", &[S, ACK], &[S | ACK, RST], Phase::Closed),
            ("and answers the SYN once more", &[S, ACK], &[S | ACK, RST, S | ACK], Phase::Closed),
            ("a reset by the client, which acknowledges nothing", &[S, ACK, RST], &[S | ACK], Phase::Closed),
            ("both ends are done", &[S, ACK, FIN | ACK], &[S | ACK, FIN | ACK], Phase::Closed),
        ];
        for (name, client, backend, phase) in cases {
            let seen = |packets: &[u8]| packets.iter().map(|flags| seen::of_segment(*flags)).collect::<Vec<_>>();
            let (dial, reply) = (seen(client), seen(backend));
            // The first packet makes the client's entry; that of the replies is there before them.
            let dial = dial[1..].iter().fold(dial[0], |then, packet| seen::after(then, *packet));
            let reply = reply.iter().fold(0, |then, packet| seen::after(then, *packet));
            assert_eq!(Phase::of(proto::TCP, dial, reply), phase, "{name}");
        }
    }

    #[test]
    fn a_tuple_reversed_twice_is_itself() {
        let addr = |n| Addr { words: [n, 1, 2, 3] };
        let tuple = Tuple {
            src: addr(1),
            dst: addr(2),
            src_port: 3,
            dst_port: 4,
            proto: proto::TCP,
            hook: HOOK_EGRESS,
            zero: 0,
        };
        let back = tuple.reversed();
        assert_eq!((back.src, back.src_port, back.dst, back.dst_port), (addr(2), 4, addr(1), 3));
        assert_eq!(back.reversed(), tuple);
        assert_eq!(tuple.at(HOOK_INGRESS).at(HOOK_EGRESS), tuple);
    }
}
