//! Packets as the path sees them, and the same packets with another end.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
};

use crate::packet::{self, ACK, Draft, ETH, ICMP, ICMPV6, Ip, RST, SCTP, SYN, TCP, UDP};

/// A protocol and the two ends of a packet, source first.
pub type Ends = (u8, SocketAddr, SocketAddr);

/// A packet of a protocol with ports, or an ICMP error about one: that has the ends of the answer to what it quotes.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// All of it.
    pub bytes: &'a [u8],
    /// Source.
    pub src: SocketAddr,
    /// Destination.
    pub dst: SocketAddr,
    /// Protocol.
    pub proto: u8,
    /// TCP's flags.
    pub tcp: u8,
    /// Its outermost header.
    pub outer: Ip,
    /// Of an error: the header that it quotes.
    pub quoted: Option<Ip>,
}

/// The ports that only the first fragment of a packet has.
#[derive(Debug, Default)]
pub struct Fragments(HashMap<FragmentKey, (u16, u16)>);

/// Source, destination, number and protocol of a packet, and whether it leaves.
type FragmentKey = (IpAddr, IpAddr, u32, u8, bool);

impl Fragments {
    /// Remembers those of a packet that is changed, if others follow.
    pub fn remember(&mut self, p: &Shape, is_leaving: bool) {
        if p.outer.more && p.quoted.is_none() && !p.is_later() {
            self.0.insert(key(&p.outer, is_leaving), (p.src.port(), p.dst.port()));
        }
    }

    /// What became of an earlier packet of that number does not bind this one.
    pub fn forget(&mut self, p: &Shape) {
        if p.outer.more && p.quoted.is_none() && !p.is_later() {
            self.0.remove(&key(&p.outer, false));
        }
    }

    /// Of a packet that goes no further, the fragments that follow do not either.
    pub fn stop(&mut self, p: &Shape) {
        if p.outer.more {
            self.0.insert(key(&p.outer, false), (0, 0));
        }
    }
}

fn key(ip: &Ip, is_leaving: bool) -> FragmentKey {
    (ip.src, ip.dst, ip.id, ip.proto, is_leaving)
}

impl<'a> Shape<'a> {
    /// `None` for what is not translated: other protocols, what is cut short, fragments of an unknown packet.
    #[must_use]
    pub fn read(bytes: &'a [u8], fragments: &Fragments, is_leaving: bool) -> Option<Self> {
        let v6 = packet::version(bytes)?;
        let outer = packet::ip(bytes, ETH, v6)?;
        let shape = |ip: &Ip, (src, dst): (u16, u16), tcp, quoted| Self {
            bytes,
            src: SocketAddr::new(ip.src, src),
            dst: SocketAddr::new(ip.dst, dst),
            proto: ip.proto,
            tcp,
            outer,
            quoted,
        };
        if outer.fragment != 0 {
            let ports = fragments.0.get(&key(&outer, is_leaving))?;
            return Some(shape(&outer, *ports, 0, None));
        }
        let has = |length| bytes.len() >= outer.l4 + length;
        match outer.proto {
            TCP if has(20) => Some(shape(&outer, packet::ports(bytes, outer.l4)?, bytes[outer.l4 + 13], None)),
            UDP if has(8) => Some(shape(&outer, packet::ports(bytes, outer.l4)?, 0, None)),
            SCTP if has(12) => Some(shape(&outer, packet::ports(bytes, outer.l4)?, 0, None)),
            ICMP | ICMPV6 => {
                let kind = *bytes.get(outer.l4)?;
                let is_error = if v6 { (1..=4).contains(&kind) } else { [3, 11, 12].contains(&kind) };
                let quoted = packet::ip(bytes, outer.l4 + 8, v6).filter(|_| is_error)?;
                if quoted.fragment != 0 || ![TCP, UDP, SCTP].contains(&quoted.proto) {
                    return None;
                }
                let about = shape(&quoted, packet::ports(bytes, quoted.l4)?, 0, Some(quoted));
                Some(Self { src: about.dst, dst: about.src, ..about })
            }
            _ => None,
        }
    }

    /// Whether its first fragment was stopped.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.is_later() && (self.src.port(), self.dst.port()) == (0, 0)
    }

    /// Its ends.
    #[must_use]
    pub fn ends(&self) -> Ends {
        (self.proto, self.src, self.dst)
    }

    /// Whether it is a fragment without ports of its own.
    #[must_use]
    pub fn is_later(&self) -> bool {
        self.outer.fragment != 0
    }

    /// Whether it can begin something: it is neither an error nor a later fragment.
    #[must_use]
    pub fn is_ordinary(&self) -> bool {
        self.quoted.is_none() && !self.is_later()
    }

    /// Whether it may open a flow: a SYN, or any datagram.
    #[must_use]
    pub fn may_open(&self) -> bool {
        self.is_ordinary() && (self.proto != TCP || self.tcp & (SYN | ACK) == SYN)
    }

    /// With another destination and source port; an error with another quoted source, too. `None`: the error is for somebody else than
    /// the sender of what it quotes.
    #[must_use]
    pub fn sent_to(&self, to: SocketAddr, src_port: u16) -> Option<Vec<u8>> {
        let mut bytes = self.bytes.to_vec();
        if let Some(quoted) = self.quoted {
            if self.outer.dst != self.dst.ip() {
                return None;
            }
            set_ip(&mut bytes, &quoted, Field::Source, to.ip());
            set_port(&mut bytes, quoted.l4, Field::Source, to.port());
            set_port(&mut bytes, quoted.l4, Field::Destination, src_port);
        } else if !self.is_later() {
            set_port(&mut bytes, self.outer.l4, Field::Source, src_port);
            set_port(&mut bytes, self.outer.l4, Field::Destination, to.port());
        }
        set_ip(&mut bytes, &self.outer, Field::Destination, to.ip());
        Some(bytes)
    }

    /// With another source and destination port; an error with another quoted destination, and its own source where that is the same.
    #[must_use]
    pub fn sent_from(&self, from: SocketAddr, dst_port: u16) -> Vec<u8> {
        let mut bytes = self.bytes.to_vec();
        if let Some(quoted) = self.quoted {
            set_ip(&mut bytes, &quoted, Field::Destination, from.ip());
            set_port(&mut bytes, quoted.l4, Field::Source, dst_port);
            set_port(&mut bytes, quoted.l4, Field::Destination, from.port());
            if self.outer.src != self.src.ip() {
                return bytes; // a router in between speaks for itself
            }
        } else if !self.is_later() {
            set_port(&mut bytes, self.outer.l4, Field::Source, from.port());
            set_port(&mut bytes, self.outer.l4, Field::Destination, dst_port);
        }
        set_ip(&mut bytes, &self.outer, Field::Source, from.ip());
        bytes
    }

    /// The ICMP error that answers this datagram or INIT; none for other chunks, for packets with options or extension
    /// headers, but for the one that makes a fragment of a datagram, and where the source is no single host (RFC 1122, 3.2.2).
    #[must_use]
    pub fn unreachable(&self) -> Option<Vec<u8>> {
        const INIT: u8 = 1;
        let (src, dst) = (self.src, self.dst);
        let is_v6 = src.is_ipv6();
        let header = if is_v6 { 40 } else { 20 };
        let quoted = if self.proto == SCTP { 32 } else { 8 };
        let quote = self.bytes.get(ETH..self.outer.l4 + quoted)?;
        let is_one_host = match src.ip() {
            IpAddr::V4(ip) => (1..224).contains(&ip.octets()[0]),
            IpAddr::V6(ip) => !ip.is_multicast() && !ip.is_unspecified(),
        };
        let is_plain =
            self.outer.l4 == ETH + header || (is_v6 && self.proto == UDP && self.outer.l4 == ETH + header + 8);
        if !is_plain || (self.proto == SCTP && quote[header + 12] != INIT) || !is_one_host {
            return None;
        }
        let mut error = Draft::new(self.proto, dst, src).error(quote, quote.len());
        error[..6].copy_from_slice(&self.bytes[6..12]);
        error[6..12].copy_from_slice(&self.bytes[..6]);
        if !is_v6 {
            error[ETH + 1] = 0xc0; // the precedence of errors (RFC 1812, 4.3.2.5)
            error[ETH + 6] = 0x40; // in one piece
        }
        Some(error)
    }

    /// The RST that answers this SYN (RFC 9293, 3.5.2).
    #[must_use]
    pub fn reset(&self) -> Vec<u8> {
        let mut bytes = turned_round(self.bytes, &self.outer);
        let tcp = &mut bytes[self.outer.l4..];
        let answer = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]).wrapping_add(1);
        tcp[4..8].fill(0);
        tcp[8..12].copy_from_slice(&answer.to_be_bytes());
        tcp[13] = RST | ACK;
        set_port(&mut bytes, self.outer.l4, Field::Source, self.dst.port());
        set_port(&mut bytes, self.outer.l4, Field::Destination, self.src.port());
        bytes
    }
}

/// The answer to an echo request to an address that `is_answered`.
pub fn pong(bytes: &[u8], is_answered: impl Fn(IpAddr) -> bool) -> Option<Vec<u8>> {
    let v6 = packet::version(bytes)?;
    let ip = packet::ip(bytes, ETH, v6)?;
    let (proto, request, reply) = if v6 { (ICMPV6, 128, 129) } else { (ICMP, 8, 0) };
    let header = bytes.get(ip.l4..ip.l4 + 4)?;
    if ip.proto != proto || ip.fragment != 0 || ip.more || header[0] != request || !is_answered(ip.dst) {
        return None;
    }
    let mut bytes = turned_round(bytes, &ip);
    bytes[ip.l4] = reply;
    Some(bytes)
}

/// Back to where it came from, with a fresh hop limit.
fn turned_round(bytes: &[u8], ip: &Ip) -> Vec<u8> {
    let mut back = bytes.to_vec();
    back[..6].copy_from_slice(&bytes[6..12]);
    back[6..12].copy_from_slice(&bytes[..6]);
    set_ip(&mut back, ip, Field::Source, ip.dst);
    set_ip(&mut back, ip, Field::Destination, ip.src);
    back[ip.at + if ip.src.is_ipv4() { 8 } else { 7 }] = 64;
    back
}

#[derive(Clone, Copy)]
enum Field {
    Source,
    Destination,
}

fn set_ip(bytes: &mut [u8], header: &Ip, field: Field, ip: IpAddr) {
    let (first, octets) = match ip {
        IpAddr::V4(v4) => (12, v4.octets().to_vec()),
        IpAddr::V6(v6) => (8, v6.octets().to_vec()),
    };
    let at = header.at + first + field as usize * octets.len();
    bytes[at..at + octets.len()].copy_from_slice(&octets);
}

fn set_port(bytes: &mut [u8], l4: usize, field: Field, port: u16) {
    let at = l4 + field as usize * 2;
    bytes[at..at + 2].copy_from_slice(&port.to_be_bytes());
}
