//! Random and hostile packets for the packet programs and their model: what clients, backends and routers might send, often
//! damaged.

use std::net::SocketAddr;

use crate::{
    packet::{self, ACK, Draft, ETH, FIN, RST, SCTP, SYN, TCP, UDP},
    packet_model::Model,
};

const CLIENTS: [&str; 6] = [
    "198.51.100.10:1000",
    "198.51.100.10:10000",
    "198.51.100.11:1000",
    "[2001:db8:100::10]:1000",
    "[2001:db8:100::10]:10001",
    "[2001:db8:100::11]:1000",
];

/// An address and a port.
///
/// # Panics
/// When the text is none.
#[must_use]
pub fn socket(text: &str) -> SocketAddr {
    text.parse().expect("an address and a port")
}

/// xorshift64
#[derive(Debug)]
pub struct Random(pub u64);

impl Random {
    /// A number below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).unwrap_or(0)
    }

    /// With a chance of one in `n`.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What comes along.
#[derive(Debug)]
pub struct Traffic {
    /// Where chance comes from.
    pub random: Random,
    /// Packets as they left, to be answered, repeated and complained about.
    pub recent: Vec<Vec<u8>>,
}

impl Traffic {
    /// Another packet: dialling, answering, repeating or complaining, and often damaged.
    pub fn draw(&mut self, model: &Model) -> Vec<u8> {
        let mut packet = match self.random.below(10) {
            0..4 => self.dialling(model),
            4..7 => self.answering().unwrap_or_else(|| self.dialling(model)),
            7 => self.again().unwrap_or_else(|| self.dialling(model)),
            _ => self.complaint().unwrap_or_else(|| self.dialling(model)),
        };
        match self.random.below(16) {
            0 => packet.truncate(ETH + self.random.below(packet.len() - ETH + 1)),
            1 | 2 => {
                let at = 12 + self.random.below(packet.len() - 12);
                packet[at] ^= 1 << self.random.below(8);
            }
            3 => packet.extend(vec![0xaa; self.random.below(9)]),
            _ => {}
        }
        packet
    }

    fn dialling(&mut self, model: &Model) -> Vec<u8> {
        let src = socket(CLIENTS[self.random.below(CLIENTS.len())]);
        let mut frontends: Vec<_> = model.rules.keys().filter(|(_, dst)| dst.is_ipv4() == src.is_ipv4()).collect();
        frontends.sort();
        let (proto, mut dst) = *frontends[self.random.below(frontends.len())];
        if self.random.once_in(8) {
            dst.set_port(dst.port() + 7); // nobody's, or one that hides clients
        }
        let mut draft = self.draft(proto, src, dst);
        if proto == TCP && !self.random.once_in(3) {
            draft.tcp = SYN;
        }
        draft.bytes()
    }

    /// The way back of something that went out.
    fn answering(&mut self) -> Option<Vec<u8>> {
        let (proto, src, dst) = self.pick()?;
        Some(self.draft(proto, dst, src).bytes())
    }

    /// The same way once more.
    fn again(&mut self) -> Option<Vec<u8>> {
        let (proto, src, dst) = self.pick()?;
        Some(self.draft(proto, src, dst).bytes())
    }

    fn pick(&mut self) -> Option<(u8, SocketAddr, SocketAddr)> {
        if self.recent.is_empty() {
            return None;
        }
        let recent = &self.recent[self.random.below(self.recent.len())];
        let ip = packet::ip(recent, ETH, packet::version(recent)?)?;
        let (src, dst) = packet::ports(recent, ip.l4)?;
        [TCP, UDP, SCTP].contains(&ip.proto).then_some((
            ip.proto,
            SocketAddr::new(ip.src, src),
            SocketAddr::new(ip.dst, dst),
        ))
    }

    /// An ICMP error about something that went out, from its destination or from a router.
    fn complaint(&mut self) -> Option<Vec<u8>> {
        if self.recent.is_empty() {
            return None;
        }
        let about = self.recent[self.random.below(self.recent.len())].clone();
        let ip = packet::ip(&about, ETH, packet::version(&about)?)?;
        let router = if ip.src.is_ipv4() { "192.0.2.1:0" } else { "[2001:db8::1]:0" };
        let from = if self.random.once_in(2) { SocketAddr::new(ip.dst, 0) } else { socket(router) };
        let to = if self.random.once_in(20) { socket(router) } else { SocketAddr::new(ip.src, 0) };
        if from.is_ipv4() != to.is_ipv4() {
            return None;
        }
        let quote = if self.random.once_in(2) { usize::MAX } else { ip.l4 - ETH + self.random.below(24) };
        Some(Draft { extras: self.random.once_in(8), ..Draft::new(TCP, from, to) }.error(&about[ETH..], quote))
    }

    fn draft(&mut self, proto: u8, src: SocketAddr, dst: SocketAddr) -> Draft {
        let tcp = [ACK, ACK, SYN | ACK, ACK | FIN, RST, SYN, ACK, FIN | SYN][self.random.below(8)];
        let fragment = match self.random.below(12) {
            0 => Some((0, true, 1 + self.random.below(4) as u32)),
            1 => Some((8 + 8 * self.random.below(3) as u16, self.random.once_in(2), 1 + self.random.below(4) as u32)),
            _ => None,
        };
        Draft {
            tcp,
            payload: vec![0x55; self.random.below(40)],
            extras: self.random.once_in(8),
            without_checksum: proto == UDP && src.is_ipv4() && self.random.once_in(6),
            fragment,
            ..Draft::new(proto, src, dst)
        }
    }
}
