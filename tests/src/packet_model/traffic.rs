//! Random and hostile packets: what clients, backends and routers might send, often
//! damaged.

use std::net::{IpAddr, SocketAddr};

use super::{
    fate::{HOOKS, Hook},
    world::{Net, World},
};
use crate::packet::{self, ACK, Draft, ETH, FIN, RST, SCTP, SYN, TCP, UDP};

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
    /// Packets as they came and as they left, to be answered, repeated and complained about.
    pub recent: Vec<Vec<u8>>,
    /// The Services that are dialled, so that flows meet.
    pub dialled: Vec<usize>,
}

/// So many Services are dialled at a time.
const DIALLED: usize = 5;
/// So old is the oldest packet that is answered.
const RECENT: usize = 40;

impl Traffic {
    /// From now on other Services are dialled, and what was seen is forgotten.
    pub fn begin(&mut self, world: &World) {
        self.recent.clear();
        self.dialled = (0..DIALLED).map(|_| self.random.below(world.services.len())).collect();
    }

    /// Where a packet comes by: mostly, where the kernel would show it.
    pub fn hook(&mut self, packet: &[u8]) -> Hook {
        let ip = packet::version(packet).and_then(|v6| packet::ip(packet, ETH, v6));
        let arrives =
            ip.is_some_and(|ip| [Net::Nodes, Net::Services, Net::Virtual].iter().any(|net| net.contains(ip.dst)));
        match (self.random.below(8), arrives) {
            (0..5, true) => Hook::Ingress,
            (0..5, false) => Hook::Egress,
            _ => HOOKS[self.random.below(HOOKS.len())],
        }
    }

    /// Another packet: dialling, answering, repeating or complaining, and often damaged.
    pub fn draw(&mut self, world: &World) -> Vec<u8> {
        let drawn = match self.random.below(20) {
            0..8 => None,
            8..14 => self.answering(),
            14..16 => self.again(),
            16..19 => self.complaint(),
            _ => Some(self.ping()),
        };
        let mut packet = drawn.unwrap_or_else(|| self.dialling(world));
        if self.random.once_in(50) {
            packet[0] ^= [1, 2][self.random.below(2)]; // to many, or to another host
        }
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

    /// Clients outside, one of which source ranges admit, and pods, one of which is an endpoint.
    fn client(&mut self, is_v6: bool) -> IpAddr {
        let (net, n) =
            [(Net::Outside, 10), (Net::Outside, 10), (Net::Outside, 11), (Net::OwnPods, 1), (Net::OtherPods, 3)]
                [self.random.below(5)];
        net.ip(is_v6, n)
    }

    /// To a frontend, mostly; else to an unknown port or address.
    fn dialling(&mut self, world: &World) -> Vec<u8> {
        let service = &world.services[self.dialled[self.random.below(self.dialled.len())]];
        let (_, mut dst) = service.frontends[self.random.below(service.frontends.len())];
        let src = SocketAddr::new(self.client(dst.is_ipv6()), [1000, 10_000][self.random.below(2)]);
        match self.random.below(16) {
            0 | 1 => dst.set_port(dst.port() + 7), // nobody's, or one that masquerades
            2 => dst.set_ip(Net::Services.ip(dst.is_ipv6(), 99)),
            _ => {}
        }
        let mut draft = self.draft(service.proto, src, dst);
        if draft.proto == TCP && !self.random.once_in(3) {
            draft.tcp = SYN;
        }
        draft.bytes()
    }

    fn ping(&mut self) -> Vec<u8> {
        let is_v6 = self.random.once_in(2);
        let to = [Net::Services.ip(is_v6, 1), Net::Services.ip(is_v6, 99), Net::Virtual.ip(is_v6, 1)];
        let ends = [self.client(is_v6), to[self.random.below(3)]].map(|ip| SocketAddr::new(ip, 0));
        self.draft(TCP, ends[0], ends[1]).echo()
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

    fn recently(&mut self) -> Option<&Vec<u8>> {
        let count = self.recent.len().min(RECENT);
        let back = 1 + self.random.below(count.max(1));
        self.recent.len().checked_sub(back).and_then(|at| self.recent.get(at))
    }

    fn pick(&mut self) -> Option<(u8, SocketAddr, SocketAddr)> {
        let recent = self.recently()?;
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
        let about = self.recently()?.clone();
        let ip = packet::ip(&about, ETH, packet::version(&about)?)?;
        let router = SocketAddr::new(Net::Nodes.ip(ip.src.is_ipv6(), 1), 0);
        let from = if self.random.once_in(2) { SocketAddr::new(ip.dst, 0) } else { router };
        let to = if self.random.once_in(8) { router } else { SocketAddr::new(ip.src, 0) };
        if from.is_ipv4() != to.is_ipv4() {
            return None;
        }
        let quote = if self.random.once_in(2) { usize::MAX } else { ip.l4 - ETH + self.random.below(24) };
        Some(Draft { extras: self.random.once_in(8), ..Draft::new(TCP, from, to) }.error(&about[ETH..], quote))
    }

    fn draft(&mut self, proto: u8, src: SocketAddr, dst: SocketAddr) -> Draft {
        let tcp = [ACK, ACK, SYN | ACK, ACK | FIN, RST, SYN, ACK, FIN | SYN][self.random.below(8)];
        let fragment = match self.random.below(9) {
            0 | 1 => Some((0, true, 1 + self.random.below(2) as u32)),
            2 => Some((8 + 8 * self.random.below(3) as u16, self.random.once_in(2), 1 + self.random.below(2) as u32)),
            _ => None,
        };
        let begins: &[u8] = if proto == SCTP && self.random.once_in(2) { &[1, 0, 0, 20] } else { &[] }; // an INIT
        Draft {
            tcp,
            payload: [begins, &vec![0x55; self.random.below(40)]].concat(),
            extras: self.random.once_in(8),
            without_checksum: proto == UDP && src.is_ipv4() && self.random.once_in(6),
            fragment,
            ..Draft::new(proto, src, dst)
        }
    }
}
