//! The packet path in plain Rust: what a packet should become, given the flows so far.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, SocketAddr},
};

use crate::packet::{self, ACK, ETH, FIN, ICMP, ICMPV6, Ip, RST, SCTP, SYN, TCP, UDP};

/// What a frontend does with new flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// To a backend.
    Forward {
        /// Which.
        backend: SocketAddr,
        /// It does not see the client.
        hidden: bool,
    },
    /// The same, hidden, for clients of one address only.
    Guarded {
        /// Which.
        backend: SocketAddr,
        /// Whose.
        client: IpAddr,
    },
    /// Refused.
    Reject,
    /// Silence.
    Drop,
}

/// A packet whose client is to be hidden as it leaves.
pub const MASQUERADE: u32 = 0x800;
/// A reply whose client was found.
pub const REPLY: u32 = 0x1000;

/// What becomes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Not a bit changes, and others see it.
    Untouched,
    /// Goes on with these bytes; checksums aside.
    Changed(Vec<u8>),
    /// Goes on from a free port of this node; tell the model which by [`Model::hide`].
    Hidden(Hidden),
    /// Is dropped.
    Dropped,
    /// Comes back as a RST.
    Reset,
}

/// A flow whose client gets a port of this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hidden {
    /// Protocol.
    pub proto: u8,
    /// Who is hidden.
    pub client: SocketAddr,
    /// From whom.
    pub backend: SocketAddr,
}

/// A protocol and the two ends of a packet, source first.
type Ends = (u8, SocketAddr, SocketAddr);

#[derive(Clone, Copy, Debug)]
struct Dial {
    backend: SocketAddr,
    hidden: bool,
    seen: u8,
}

#[derive(Clone, Copy, Debug)]
struct Reply {
    frontend: SocketAddr,
    seen: u8,
}

/// A packet with ports, or an ICMP error with those of the answer to what it quotes.
#[derive(Clone, Copy, Debug)]
struct Parsed {
    src: SocketAddr,
    dst: SocketAddr,
    proto: u8,
    tcp: u8,
    outer: Ip,
    quoted: Option<Ip>,
    is_later: bool,
}

/// Source, destination, number, protocol, and whether it arrived.
type FragmentKey = (IpAddr, IpAddr, u32, u8, bool);

/// The state.
#[derive(Debug, Default)]
pub struct Model {
    /// Frontends.
    pub rules: HashMap<(u8, SocketAddr), Rule>,
    /// Addresses whose unknown ports are refused.
    pub guarded: Vec<IpAddr>,
    /// Addresses of this node, the first of each family lent to hidden clients.
    pub node: Vec<IpAddr>,
    /// First and last port that hide clients.
    pub ports: (u16, u16),
    dials: HashMap<Ends, Dial>,
    replies: HashMap<Ends, Reply>,
    hides: HashMap<Ends, SocketAddr>,
    returns: HashMap<Ends, SocketAddr>,
    /// Ports of the first fragment.
    fragments: HashMap<FragmentKey, (u16, u16)>,
    masqueraded: bool,
    plain: bool,
}

fn is_closed(dial: u8, reply: u8) -> bool {
    (dial | reply) & RST != 0 || dial & reply & FIN != 0
}

impl Model {
    /// Without rules.
    #[must_use]
    pub fn new(ports: (u16, u16)) -> Self {
        Self { ports, ..Self::default() }
    }

    /// Forgets all flows.
    pub fn clear(&mut self) {
        let Self { rules, guarded, node, ports, .. } = std::mem::take(self);
        *self = Self { rules, guarded, node, ports, ..Self::default() };
    }

    /// A packet arrives from a client or, with `from_workload`, from a workload whose sockets we see. The second answer
    /// is the mark.
    pub fn ingress(&mut self, bytes: &[u8], mark: u32, from_workload: bool) -> (Fate, u32) {
        let untouched = (Fate::Untouched, mark);
        if from_workload && !self.masqueraded {
            return untouched;
        }
        let Some(p) = self.parse(bytes, false) else { return untouched };
        let ends = (p.proto, p.src, p.dst);
        let is_error = p.quoted.is_some();
        let is_our_port = (self.ports.0..=self.ports.1).contains(&p.dst.port()) || p.proto == SCTP;
        let returning = self.returns.get(&ends).copied();
        if from_workload && !is_error {
            return match returning.filter(|_| is_our_port) {
                Some(client) => self.arrive(bytes, &p, client, mark | REPLY),
                None => untouched,
            };
        }
        let is_new = !is_error && !p.is_later && (p.proto != TCP || p.tcp & (SYN | ACK) == SYN);
        if !is_new {
            if !self.masqueraded && !self.plain {
                return untouched;
            }
            if let Some(dial) = self.dials.get_mut(&ends) {
                if !is_error {
                    dial.seen |= p.tcp;
                }
                let dial = *dial;
                return self.forward(bytes, &p, dial, mark);
            }
            return match returning {
                Some(client) => self.arrive(bytes, &p, client, mark | REPLY),
                None => untouched,
            };
        }
        match returning.filter(|_| p.proto != TCP && is_our_port && self.masqueraded) {
            Some(client) => self.arrive(bytes, &p, client, mark | REPLY),
            None => self.dial(bytes, &p, mark),
        }
    }

    fn dial(&mut self, bytes: &[u8], p: &Parsed, mark: u32) -> (Fate, u32) {
        let ends = (p.proto, p.src, p.dst);
        let Some(rule) = self.rules.get(&(p.proto, p.dst)).copied() else {
            return if self.guarded.contains(&p.dst.ip()) {
                self.refuse(bytes, p, mark)
            } else {
                (Fate::Untouched, mark)
            };
        };
        if let Some(dial) = self.dials.get(&ends).copied() {
            let reply = self.replies.get(&(p.proto, dial.backend, p.src)).map_or(0, |reply| reply.seen);
            let is_closing = p.proto == TCP && (dial.seen | reply) & (FIN | RST) != 0;
            if !is_closing {
                self.dials.insert(ends, Dial { seen: dial.seen | p.tcp, ..dial });
                return self.forward(bytes, p, dial, mark);
            }
        }
        let (backend, hidden) = match rule {
            Rule::Forward { backend, hidden } => (backend, hidden),
            Rule::Guarded { backend, client } if client == p.src.ip() => (backend, true),
            Rule::Guarded { .. } | Rule::Drop => return (Fate::Dropped, mark),
            Rule::Reject => return self.refuse(bytes, p, mark),
        };
        if p.proto == SCTP && backend.port() != p.dst.port() {
            return (Fate::Dropped, mark);
        }
        if !self.enter_reply(p, backend) {
            return (Fate::Dropped, mark);
        }
        let dial = Dial { backend, hidden, seen: p.tcp };
        self.dials.insert(ends, dial);
        self.masqueraded |= hidden;
        self.plain |= !hidden || self.node.contains(&backend.ip());
        self.forward(bytes, p, dial, mark)
    }

    /// Whether replies from `backend` can be told from those of another flow of this client and port.
    fn enter_reply(&mut self, p: &Parsed, backend: SocketAddr) -> bool {
        let back = (p.proto, backend, p.src);
        if let Some(other) = self.replies.get(&back).filter(|reply| reply.frontend != p.dst) {
            let dial = self.dials.get(&(p.proto, p.src, other.frontend));
            if dial.is_some_and(|dial| p.proto != TCP || !is_closed(dial.seen, other.seen)) {
                return false;
            }
        }
        self.replies.insert(back, Reply { frontend: p.dst, seen: 0 });
        true
    }

    fn refuse(&mut self, bytes: &[u8], p: &Parsed, mark: u32) -> (Fate, u32) {
        let own = self.node.iter().find(|ip| ip.is_ipv4() == p.src.is_ipv4()).map(|ip| SocketAddr::new(*ip, 0));
        match (p.proto, own) {
            (TCP, _) => (Fate::Reset, mark),
            (UDP, Some(own)) if self.enter_reply(p, own) => {
                self.plain = true;
                self.arrive(bytes, p, own, mark)
            }
            _ => (Fate::Dropped, mark),
        }
    }

    fn forward(&mut self, bytes: &[u8], p: &Parsed, dial: Dial, mark: u32) -> (Fate, u32) {
        self.arrive(bytes, p, dial.backend, if dial.hidden { mark | MASQUERADE } else { mark })
    }

    /// A packet leaves through a device with clients behind it, or towards workloads.
    pub fn egress(&mut self, bytes: &[u8], mark: u32, to_clients: bool) -> (Fate, u32) {
        let ours = mark & (MASQUERADE | REPLY);
        let mark = mark & !ours;
        let is_icmp = match packet::version(bytes) {
            Some(false) => bytes.get(ETH + 9) == Some(&ICMP),
            Some(true) => bytes.get(ETH + 6) == Some(&ICMPV6),
            None => false,
        };
        if ours == 0 && !((to_clients && self.plain) || (self.masqueraded && is_icmp)) {
            return (Fate::Untouched, mark);
        }
        let Some(p) = self.parse(bytes, true) else { return (Fate::Untouched, mark) };
        let ends = (p.proto, p.src, p.dst);
        // A packet that is both, of a client that is another one's backend, cannot be: ports differ.
        if let Some(reply) = self.replies.get_mut(&ends) {
            if p.quoted.is_none() {
                reply.seen |= p.tcp;
            }
            let frontend = reply.frontend;
            return (self.leave(bytes, &p, frontend), mark);
        }
        if let Some(seen_as) = self.hides.get(&ends).copied() {
            return (self.leave(bytes, &p, seen_as), mark);
        }
        let is_ordinary = p.quoted.is_none() && !p.is_later;
        if ours & MASQUERADE == 0 || !is_ordinary {
            return (Fate::Untouched, mark);
        }
        (Fate::Hidden(Hidden { proto: p.proto, client: p.src, backend: p.dst }), mark)
    }

    /// The ports that may hide a client, and whether all of them are taken.
    #[must_use]
    pub fn free_ports(&self, hidden: &Hidden) -> HashSet<u16> {
        let own = self.node.iter().find(|ip| ip.is_ipv4() == hidden.client.is_ipv4());
        let is_free = |port: &u16| {
            own.is_some_and(|own| {
                let addr = SocketAddr::new(*own, *port);
                let is_frontend = hidden.proto != SCTP && self.rules.contains_key(&(hidden.proto, addr));
                !is_frontend && !self.returns.contains_key(&(hidden.proto, hidden.backend, addr))
            })
        };
        if hidden.proto == SCTP {
            return [hidden.client.port()].into_iter().filter(is_free).collect();
        }
        (self.ports.0..=self.ports.1).filter(is_free).collect()
    }

    /// The client of a flow is hidden behind this port; what the packet becomes.
    pub fn hide(&mut self, bytes: &[u8], hidden: &Hidden, port: u16) -> Option<Fate> {
        let own = self.node.iter().find(|ip| ip.is_ipv4() == hidden.client.is_ipv4())?;
        let seen_as = SocketAddr::new(*own, port);
        self.hides.insert((hidden.proto, hidden.client, hidden.backend), seen_as);
        self.returns.insert((hidden.proto, hidden.backend, seen_as), hidden.client);
        let parsed = self.parse(bytes, true)?;
        Some(self.leave(bytes, &parsed, seen_as))
    }

    fn parse(&self, bytes: &[u8], is_leaving: bool) -> Option<Parsed> {
        let v6 = packet::version(bytes)?;
        let outer = packet::ip(bytes, ETH, v6)?;
        let parsed = |ip: &Ip, (src, dst): (u16, u16), tcp| Parsed {
            src: SocketAddr::new(ip.src, src),
            dst: SocketAddr::new(ip.dst, dst),
            proto: ip.proto,
            tcp,
            outer,
            quoted: None,
            is_later: false,
        };
        if outer.fragment != 0 {
            let key = (outer.src, outer.dst, outer.id, outer.proto, is_leaving);
            return Some(Parsed { is_later: true, ..parsed(&outer, *self.fragments.get(&key)?, 0) });
        }
        let has = |length| bytes.len() >= outer.l4 + length;
        match outer.proto {
            TCP if has(20) => Some(parsed(&outer, packet::ports(bytes, outer.l4)?, bytes[outer.l4 + 13])),
            UDP if has(8) => Some(parsed(&outer, packet::ports(bytes, outer.l4)?, 0)),
            SCTP if has(12) => Some(parsed(&outer, packet::ports(bytes, outer.l4)?, 0)),
            ICMP | ICMPV6 => {
                let kind = *bytes.get(outer.l4)?;
                let is_error = if v6 { (1..=4).contains(&kind) } else { [3, 11, 12].contains(&kind) };
                let quoted = packet::ip(bytes, outer.l4 + 8, v6).filter(|_| is_error)?;
                if quoted.fragment != 0 || ![TCP, UDP, SCTP].contains(&quoted.proto) {
                    return None;
                }
                let about = parsed(&quoted, packet::ports(bytes, quoted.l4)?, 0);
                Some(Parsed { src: about.dst, dst: about.src, quoted: Some(quoted), ..about })
            }
            _ => None,
        }
    }

    /// The packet with another destination; an error with another quoted source too.
    fn arrive(&mut self, bytes: &[u8], p: &Parsed, to: SocketAddr, mark: u32) -> (Fate, u32) {
        let mut bytes = bytes.to_vec();
        if let Some(quoted) = p.quoted {
            if p.outer.dst != p.dst.ip() {
                return (Fate::Dropped, mark);
            }
            set_ip(&mut bytes, &quoted, false, to.ip());
            set_port(&mut bytes, quoted.l4, to.port());
        } else if !p.is_later {
            self.remember(p, false);
            set_port(&mut bytes, p.outer.l4 + 2, to.port());
        }
        set_ip(&mut bytes, &p.outer, true, to.ip());
        (Fate::Changed(bytes), mark)
    }

    /// The packet with another source; an error with another quoted destination.
    fn leave(&mut self, bytes: &[u8], p: &Parsed, from: SocketAddr) -> Fate {
        let mut bytes = bytes.to_vec();
        let mut is_its_source = true;
        if let Some(quoted) = p.quoted {
            set_ip(&mut bytes, &quoted, true, from.ip());
            set_port(&mut bytes, quoted.l4 + 2, from.port());
            is_its_source = p.outer.src == p.src.ip();
        } else if !p.is_later {
            self.remember(p, true);
            set_port(&mut bytes, p.outer.l4, from.port());
        }
        if is_its_source {
            set_ip(&mut bytes, &p.outer, false, from.ip());
        }
        Fate::Changed(bytes)
    }

    fn remember(&mut self, p: &Parsed, is_leaving: bool) {
        if p.outer.more {
            let key = (p.outer.src, p.outer.dst, p.outer.id, p.proto, is_leaving);
            self.fragments.insert(key, (p.src.port(), p.dst.port()));
        }
    }
}

fn set_ip(bytes: &mut [u8], header: &Ip, is_destination: bool, ip: IpAddr) {
    let (at, octets) = match ip {
        IpAddr::V4(v4) => (if is_destination { 16 } else { 12 }, v4.octets().to_vec()),
        IpAddr::V6(v6) => (if is_destination { 24 } else { 8 }, v6.octets().to_vec()),
    };
    bytes[header.at + at..][..octets.len()].copy_from_slice(&octets);
}

fn set_port(bytes: &mut [u8], at: usize, port: u16) {
    bytes[at..at + 2].copy_from_slice(&port.to_be_bytes());
}
