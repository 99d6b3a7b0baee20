//! Addresses and networks as people write them.

use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;

/// An IP address; blanks around it and leading zeros in IPv4 are tolerated, `::ffff:a.b.c.d` is the IPv4 address.
///
/// The API server refuses such text in new objects, but old ones still come through watches.
#[must_use]
pub fn parse_ip(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    match text.parse::<IpAddr>() {
        Ok(ip) => Some(ip.to_canonical()),
        Err(_) => parse_padded_v4(text).map(IpAddr::V4),
    }
}

/// A network in CIDR notation, as tolerant as [`parse_ip`]; bits behind the prefix are cleared.
#[must_use]
pub fn parse_net(text: &str) -> Option<IpNet> {
    let (ip, prefix) = text.trim().split_once('/')?;
    // Not canonical here: the prefix of `::ffff:10.0.0.0/104` counts from the IPv6 address.
    let ip = ip.parse().ok().or_else(|| parse_padded_v4(ip).map(IpAddr::V4))?;
    Some(IpNet::new(ip, decimal(prefix)?).ok()?.trunc())
}

/// `10.180.00.001`: decimal, as in every address that Kubernetes ever took.
fn parse_padded_v4(text: &str) -> Option<Ipv4Addr> {
    let mut octets = [0; 4];
    let mut parts = text.split('.');
    for octet in &mut octets {
        *octet = decimal(parts.next()?)?;
    }
    parts.next().is_none().then(|| octets.into())
}

/// Digits only: `u8::from_str` would take a sign.
fn decimal(text: &str) -> Option<u8> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::{parse_ip, parse_net};

    #[test]
    fn an_address_is_read_as_people_write_it() {
        for (text, expected) in [
            ("172.30.0.041", Some("172.30.0.41")),
            ("1.2.3.004", Some("1.2.3.4")),
            ("192.168.099.022", Some("192.168.99.22")),
            ("10.180.00.001", Some("10.180.0.1")),
            (" 10.0.0.1\n", Some("10.0.0.1")),
            ("::ffff:10.0.0.1", Some("10.0.0.1")),
            ("2001:0db8::0001", Some("2001:db8::1")),
            ("", None),
            ("None", None),
            ("10.0.0", None),
            ("10.0.0.1.2", None),
            ("10.0.0.256", None),
            ("10.0.0.+1", None),
            ("10.0..1", None),
            ("10.0.0.1/32", None),
            ("fe80::1%eth0", None),
        ] {
            assert_eq!(parse_ip(text).map(|ip| ip.to_string()).as_deref(), expected, "{text:?}");
        }
    }

    #[test]
    fn a_network_is_read_as_people_write_it() {
        for (id, text, expected) in [
            ("FLOW-11", "203.0.113.000/025", Some("203.0.113.0/25")),
            ("S18", " 10.1.2.0/28", Some("10.1.2.0/28")),
            ("host bits", "10.1.2.3/8", Some("10.0.0.0/8")),
            ("v6", "2001:db8::1/32", Some("2001:db8::/32")),
            ("ZC-1", "", None),
            ("no prefix", "10.0.0.0", None),
            ("long prefix", "10.0.0.0/33", None),
            ("signed prefix", "10.0.0.0/+8", None),
        ] {
            assert_eq!(parse_net(text).map(|net| net.to_string()).as_deref(), expected, "{id}");
        }
    }

    #[test]
    fn a_zero_cidr_is_one_that_holds_every_address() {
        let zero = |text| parse_net(text).is_some_and(|net| net.prefix_len() == 0);
        for (id, text, expected) in [
            ("ZC-1", "", false),
            ("ZC-2", "172.10.0.0/16", false),
            ("ZC-3", "0.0.0.0/0", true),
            ("ZC-4", "::/128", false),
            ("ZC-5", "::/0", true),
        ] {
            assert_eq!(zero(text), expected, "{id}");
        }
    }
}
