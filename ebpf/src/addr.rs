//! Addresses of both families in one form.
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Third word of `::ffff:a.b.c.d`, network order.
pub const MAPPED: u32 = 0xffff_u32.to_be();

pod! {
    /// An IPv6 address, or an IPv4 one as `::ffff:a.b.c.d`: four words in network order.
    pub struct Addr [16] {
        /// The words, most significant first, each as it lies in a packet.
        pub words: [u32; 4],
    }
}

impl Addr {
    /// The IPv4 address whose network-order word is `v4`.
    #[inline(always)]
    #[must_use]
    pub const fn v4(v4: u32) -> Self {
        Self { words: [0, 0, MAPPED, v4] }
    }

    /// Equality. VERIFIER: word by word; comparing arrays becomes a call of memcmp, a loop the verifier walks in full.
    #[inline(always)]
    #[must_use]
    pub const fn is(&self, other: &Self) -> bool {
        let ([a, b, c, d], [e, f, g, h]) = (self.words, other.words);
        a == e && b == f && c == g && d == h
    }

    /// Whether this stands for an IPv4 address.
    #[inline(always)]
    #[must_use]
    pub const fn is_v4(&self) -> bool {
        self.words[0] == 0 && self.words[1] == 0 && self.words[2] == MAPPED
    }

    /// Where it lies among the addresses of its family, host order: an IPv4 address itself, the first half of an IPv6 one.
    #[inline(always)]
    #[must_use]
    pub const fn place(&self) -> u64 {
        let [a, b, _, d] = self.words;
        if self.is_v4() { u32::from_be(d) as u64 } else { (u32::from_be(a) as u64) << 32 | u32::from_be(b) as u64 }
    }
}

impl From<IpAddr> for Addr {
    /// A v4-mapped IPv6 address and its IPv4 address are the same `Addr`.
    fn from(ip: IpAddr) -> Self {
        let octets = match ip {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        let word = |i: usize| u32::from_ne_bytes([octets[i], octets[i + 1], octets[i + 2], octets[i + 3]]);
        Self { words: [word(0), word(4), word(8), word(12)] }
    }
}

impl From<Addr> for IpAddr {
    fn from(addr: Addr) -> Self {
        let [a, b, c, d] = addr.words;
        if addr.is_v4() {
            return Self::V4(Ipv4Addr::from_bits(u32::from_be(d)));
        }
        let high = u128::from(u32::from_be(a)) << 96 | u128::from(u32::from_be(b)) << 64;
        let low = u128::from(u32::from_be(c)) << 32 | u128::from(u32::from_be(d));
        Self::V6(Ipv6Addr::from_bits(high | low))
    }
}

#[cfg(test)]
mod tests {
    use super::{Addr, IpAddr};

    #[test]
    fn an_address_survives_the_way_through_the_abi() {
        for text in ["10.96.0.1", "255.255.255.255", "0.0.0.0", "2001:db8::1", "::", "::1", "fe80::1:2:3:4"] {
            let ip: IpAddr = text.parse().unwrap();
            assert_eq!(IpAddr::from(Addr::from(ip)), ip);
        }
        let mapped: IpAddr = "::ffff:10.96.0.1".parse().unwrap();
        assert_eq!(IpAddr::from(Addr::from(mapped)).to_string(), "10.96.0.1");
    }
}
