//! Packets as bytes: building, taking apart, checking. Written from the RFCs, not from the programs, so that the model
//! built on it disagrees where the programs are wrong.

use std::net::{IpAddr, SocketAddr};

/// Bytes of an Ethernet header.
pub const ETH: usize = 14;

/// IANA protocol number.
pub const ICMP: u8 = 1;
/// IANA protocol number.
pub const TCP: u8 = 6;
/// IANA protocol number.
pub const UDP: u8 = 17;
/// IANA protocol number.
pub const ICMPV6: u8 = 58;
/// IANA protocol number.
pub const SCTP: u8 = 132;

/// TCP flag.
pub const FIN: u8 = 1;
/// TCP flag.
pub const SYN: u8 = 2;
/// TCP flag.
pub const RST: u8 = 4;
/// TCP flag.
pub const ACK: u8 = 16;

/// What an IP header says and where what follows begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ip {
    /// Offset of the header.
    pub at: usize,
    /// Source.
    pub src: IpAddr,
    /// Destination.
    pub dst: IpAddr,
    /// IANA protocol number.
    pub proto: u8,
    /// Offset of what follows the header and its extensions.
    pub l4: usize,
    /// Offset in units of 8 bytes.
    pub fragment: u16,
    /// More fragments follow.
    pub more: bool,
    /// Names the fragments of one packet.
    pub id: u32,
}

/// Reads an IP header of either version.
#[must_use]
pub fn ip(bytes: &[u8], at: usize, v6: bool) -> Option<Ip> {
    let b = bytes.get(at..)?;
    if !v6 {
        let header = b.get(..20)?;
        let length = usize::from(header[0] & 15) * 4;
        if header[0] >> 4 != 4 || length < 20 {
            return None;
        }
        let addr = |i: usize| IpAddr::from([header[i], header[i + 1], header[i + 2], header[i + 3]]);
        let fragment = u16::from_be_bytes([header[6], header[7]]);
        return Some(Ip {
            at,
            src: addr(12),
            dst: addr(16),
            proto: header[9],
            l4: at + length,
            fragment: fragment & 0x1fff,
            more: fragment & 0x2000 != 0,
            id: u16::from_be_bytes([header[4], header[5]]).into(),
        });
    }
    let header = b.get(..40)?;
    if header[0] >> 4 != 6 {
        return None;
    }
    let addr = |i: usize| IpAddr::from(<[u8; 16]>::try_from(&header[i..i + 16]).expect("16 bytes"));
    let mut ip = Ip { at, src: addr(8), dst: addr(24), proto: header[6], l4: at + 40, fragment: 0, more: false, id: 0 };
    for _ in 0..5 {
        match ip.proto {
            0 | 43 | 60 => {
                let next = bytes.get(ip.l4..ip.l4 + 2)?;
                ip.proto = next[0];
                ip.l4 += 8 + usize::from(next[1]) * 8;
            }
            44 => {
                let next = bytes.get(ip.l4..ip.l4 + 8)?;
                let offset = u16::from_be_bytes([next[2], next[3]]);
                ip.proto = next[0];
                ip.fragment = offset >> 3;
                ip.more = offset & 1 != 0;
                ip.id = u32::from_be_bytes([next[4], next[5], next[6], next[7]]);
                ip.l4 += 8;
                if ip.fragment != 0 {
                    return Some(ip);
                }
            }
            _ => return Some(ip),
        }
    }
    matches!(ip.proto, TCP | UDP | SCTP | ICMPV6).then_some(ip)
}

/// Whether the frame carries IPv6; `None` = no IP.
#[must_use]
pub fn version(bytes: &[u8]) -> Option<bool> {
    match bytes.get(12..14)? {
        [8, 0] => Some(false),
        [0x86, 0xdd] => Some(true),
        _ => None,
    }
}

/// Two ports.
#[must_use]
pub fn ports(bytes: &[u8], at: usize) -> Option<(u16, u16)> {
    let b = bytes.get(at..at + 4)?;
    Some((u16::from_be_bytes([b[0], b[1]]), u16::from_be_bytes([b[2], b[3]])))
}

/// The one's complement sum of bytes, not yet complemented.
#[must_use]
pub fn sum(start: u32, bytes: &[u8]) -> u32 {
    let words = bytes.chunks(2).map(|c| u32::from(u16::from_be_bytes([c[0], *c.get(1).unwrap_or(&0)])));
    let mut sum = words.fold(start, |sum, word| sum + word);
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The sum over the pseudo header.
fn pseudo(src: IpAddr, dst: IpAddr, proto: u8, length: usize) -> u32 {
    let start = u32::from(proto) + u32::try_from(length & 0xffff).unwrap_or(0);
    sum(sum(start, &octets(src)), &octets(dst))
}

/// Where a protocol's checksum is, from the start of its header.
#[must_use]
pub const fn checksum_offset(proto: u8) -> Option<usize> {
    match proto {
        TCP => Some(16),
        UDP => Some(6),
        ICMP | ICMPV6 => Some(2),
        _ => None,
    }
}

/// Whether a whole packet's checksums are right: header (IPv4), transport, and of an ICMP error the quoted header.
/// Datagrams without one count as right.
#[must_use]
pub fn is_sound(bytes: &[u8]) -> bool {
    let Some(ip) = version(bytes).and_then(|v6| ip(bytes, ETH, v6)) else { return false };
    if ip.src.is_ipv4() && sum(0, &bytes[ETH..ip.l4.min(bytes.len())]) != 0xffff {
        return false;
    }
    if ip.fragment != 0 || ip.more || ip.l4 > bytes.len() {
        return true; // the checksum covers what is not here
    }
    let body = &bytes[ip.l4..];
    match ip.proto {
        UDP if body.get(6..8) == Some(&[0, 0]) => true,
        TCP | UDP | ICMPV6 => sum(pseudo(ip.src, ip.dst, ip.proto, body.len()), body) == 0xffff,
        ICMP => sum(0, body) == 0xffff,
        _ => true,
    }
}

/// A packet to be.
#[derive(Clone, Debug)]
pub struct Draft {
    /// IANA protocol number.
    pub proto: u8,
    /// Source.
    pub src: SocketAddr,
    /// Destination.
    pub dst: SocketAddr,
    /// TCP's flags.
    pub tcp: u8,
    /// What follows the transport header, or in a later fragment the IP header.
    pub payload: Vec<u8>,
    /// IPv4 options or IPv6 extension headers.
    pub extras: bool,
    /// UDP: leave the checksum out.
    pub without_checksum: bool,
    /// Offset in bytes, more, id.
    pub fragment: Option<(u16, bool, u32)>,
}

impl Draft {
    /// A plain one.
    #[must_use]
    pub fn new(proto: u8, src: SocketAddr, dst: SocketAddr) -> Self {
        let payload = b"payload".to_vec();
        Self { proto, src, dst, tcp: 0, payload, extras: false, without_checksum: false, fragment: None }
    }

    /// Its bytes, with every checksum right.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let is_later = self.fragment.is_some_and(|(offset, ..)| offset != 0);
        if !is_later {
            body.extend(self.src.port().to_be_bytes());
            body.extend(self.dst.port().to_be_bytes());
            match self.proto {
                TCP => {
                    body.extend([0, 0, 0, 7, 0, 0, 0, 9, 5 << 4, self.tcp, 1, 0, 0, 0, 0, 0]);
                }
                UDP => {
                    body.extend(u16::try_from(8 + self.payload.len()).unwrap_or(0).to_be_bytes());
                    body.extend([0, 0]);
                }
                _ => body.extend([0; 8]),
            }
        }
        body.extend(&self.payload);
        if let Some(at) = checksum_offset(self.proto).filter(|_| !is_later && !self.without_checksum) {
            let sum = sum(pseudo(self.src.ip(), self.dst.ip(), self.proto, body.len()), &body);
            let check = match !u16::try_from(sum).unwrap_or(0) {
                0 => 0xffff,
                check => check,
            };
            body[at..at + 2].copy_from_slice(&check.to_be_bytes());
        }
        self.frame(self.proto, &body)
    }

    /// An ICMP error from `src` to `dst` about a packet (without its Ethernet header), of which it quotes `quote` bytes.
    #[must_use]
    pub fn error(&self, about: &[u8], quote: usize) -> Vec<u8> {
        let v6 = self.src.is_ipv6();
        let mut body = if v6 { vec![1, 4] } else { vec![3, 3] };
        body.extend([0; 6]);
        body.extend(&about[..quote.min(about.len())]);
        self.icmp(body)
    }

    /// An echo request from `src` to `dst` with the payload.
    #[must_use]
    pub fn echo(&self) -> Vec<u8> {
        let v6 = self.src.is_ipv6();
        let head = [if v6 { 128 } else { 8 }, 0, 0, 0, 0, 1, 0, 1];
        self.icmp([&head, &*self.payload].concat())
    }

    /// An ICMP message, its checksum made good.
    fn icmp(&self, mut body: Vec<u8>) -> Vec<u8> {
        let v6 = self.src.is_ipv6();
        let proto = if v6 { ICMPV6 } else { ICMP };
        let start = if v6 { pseudo(self.src.ip(), self.dst.ip(), proto, body.len()) } else { 0 };
        let check = !u16::try_from(sum(start, &body)).unwrap_or(0);
        body[2..4].copy_from_slice(&check.to_be_bytes());
        self.frame(proto, &body)
    }

    fn frame(&self, proto: u8, body: &[u8]) -> Vec<u8> {
        let mut frame = vec![0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 2]; // to the loopback device, where tests run programs
        if self.src.is_ipv4() {
            let options: &[u8] = if self.extras { &[1, 1, 1, 0] } else { &[] };
            let length = 20 + options.len();
            frame.extend([8, 0, 0x40 | u8::try_from(length / 4).unwrap_or(5), 0]);
            frame.extend(u16::try_from(length + body.len()).unwrap_or(0).to_be_bytes());
            let (offset, more, id) = self.fragment.unwrap_or_default();
            frame.extend(u16::try_from(id & 0xffff).unwrap_or(0).to_be_bytes());
            frame.extend(((offset / 8) | if more { 0x2000 } else { 0 }).to_be_bytes());
            frame.extend([64, proto, 0, 0]);
            frame.extend(octets(self.src.ip()));
            frame.extend(octets(self.dst.ip()));
            frame.extend(options);
            let check = !u16::try_from(sum(0, &frame[ETH..])).unwrap_or(0);
            frame[ETH + 10..ETH + 12].copy_from_slice(&check.to_be_bytes());
        } else {
            let mut headers: Vec<u8> = Vec::new();
            let mut first = proto;
            if let Some((offset, more, id)) = self.fragment {
                headers.extend([proto, 0]);
                headers.extend((offset & !7 | u16::from(more)).to_be_bytes());
                headers.extend(id.to_be_bytes());
                first = 44;
            }
            if self.extras {
                let mut options = vec![first, 0, 1, 4, 0, 0, 0, 0];
                options.extend(headers);
                headers = options;
                first = 0;
            }
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(u16::try_from(headers.len() + body.len()).unwrap_or(0).to_be_bytes());
            frame.extend([first, 64]);
            frame.extend(octets(self.src.ip()));
            frame.extend(octets(self.dst.ip()));
            frame.extend(headers);
        }
        frame.extend(body);
        frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_built_is_sound_and_reads_back() {
        let pairs = [("198.51.100.10:1", "192.0.2.11:2"), ("[2001:db8::1]:1", "[2001:db8::2]:2")];
        for (src, dst) in pairs {
            for proto in [TCP, UDP, SCTP] {
                for (extras, fragment) in
                    [(false, None), (true, None), (true, Some((0, true, 7))), (false, Some((8, false, 7)))]
                {
                    let draft =
                        Draft { extras, fragment, ..Draft::new(proto, src.parse().unwrap(), dst.parse().unwrap()) };
                    let bytes = draft.bytes();
                    assert!(is_sound(&bytes), "{draft:?}");
                    let ip = ip(&bytes, ETH, version(&bytes).unwrap()).unwrap();
                    assert_eq!((ip.src, ip.dst, ip.proto), (draft.src.ip(), draft.dst.ip(), proto), "{draft:?}");
                    assert_eq!(
                        (ip.fragment * 8, ip.more),
                        fragment.map_or((0, false), |(o, m, _)| (o, m)),
                        "{draft:?}"
                    );
                    if ip.fragment == 0 {
                        assert_eq!(ports(&bytes, ip.l4), Some((1, 2)), "{draft:?}");
                    }
                    assert!(is_sound(&draft.error(&bytes[ETH..], 48)) && is_sound(&draft.echo()), "{draft:?}");
                    let mut broken = bytes;
                    broken[ETH + 15] ^= 1;
                    assert!(!is_sound(&broken) || fragment.is_some() || proto == SCTP, "{draft:?}");
                }
            }
        }
    }
}
