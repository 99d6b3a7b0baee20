//! Node-port addresses, from the flag and the host's addresses.

use std::net::IpAddr;

use super::NodePortAddresses;
use crate::model::Family;

fn ips(text: &str) -> Vec<IpAddr> {
    text.split_whitespace().map(|ip| ip.parse().unwrap()).collect()
}

/// The addresses served in a family, behind `*` when every address is.
fn served(spec: &NodePortAddresses, family: Family, own: &str, interfaces: &str) -> String {
    let served = spec.of_family(family, &ips(own), &ips(interfaces));
    let all = served.match_all.then(|| "*".to_owned());
    all.into_iter().chain(served.addresses.iter().map(ToString::to_string)).collect::<Vec<_>>().join(" ")
}

#[test]
fn networks_choose_among_the_addresses_of_the_host() {
    for (id, spec, interfaces, v4, v6) in [
        ("NPA-1", "10.20.30.0/24", "10.20.30.51 100.200.201.1", "10.20.30.51", "*"),
        ("NPA-2", "0.0.0.0/0", "10.20.30.51 127.0.0.1", "* 10.20.30.51 127.0.0.1", "*"),
        ("NPA-3", "2001:db8::/64,::1/128", "2001:db8::1 ::1", "*", "2001:db8::1 ::1"),
        ("NPA-4", "::/0", "2001:db8::1 ::1", "*", "* 2001:db8::1 ::1"),
        ("NPA-5", "127.0.0.1/32", "10.20.30.51 127.0.0.1", "127.0.0.1", "*"),
        ("NPA-6", "127.0.0.0/8", "127.0.1.1", "127.0.1.1", "*"),
        ("NPA-7", "10.20.30.0/24,100.200.201.0/24", "10.20.30.51 100.200.201.1", "10.20.30.51 100.200.201.1", "*"),
        ("NPA-8", "10.20.30.0/24,100.200.201.0/24", "192.168.1.2 127.0.0.1", "", "*"),
        ("NPA-9", "", "192.168.1.2 127.0.0.1", "* 192.168.1.2 127.0.0.1", "*"),
        ("NPA-10", "", "2001:db8::1 ::1", "*", "* 2001:db8::1 ::1"),
        ("NPA-11", "1.2.3.0/24,0.0.0.0/0", "1.2.3.4", "* 1.2.3.4", "*"),
        (
            "NPA-12",
            "0.0.0.0/0,1.2.3.0/24,2001:db8::1/128",
            "1.2.3.4 2001:db8::1 127.0.0.1 ::1",
            "* 1.2.3.4 127.0.0.1",
            "2001:db8::1",
        ),
        (
            "NPA-13",
            "::/0,1.2.3.0/24,2001:db8::1/128",
            "1.2.3.4 2001:db8::1 127.0.0.1 ::1",
            "1.2.3.4",
            "* 2001:db8::1 ::1",
        ),
        ("none twice", "10.0.0.0/8", "10.0.0.1 10.0.0.2 10.0.0.1", "10.0.0.1 10.0.0.2", "*"),
    ] {
        let spec = spec.parse().unwrap();
        assert_eq!(served(&spec, Family::V4, "", interfaces), v4, "{id} v4");
        assert_eq!(served(&spec, Family::V6, "", interfaces), v6, "{id} v6");
    }
}

#[test]
fn keywords_name_addresses_of_both_families_and_none_of_one_link_unless_asked() {
    let own = "192.168.0.2 2001:db8::1 192.168.1.2 2001:db8:1::2";
    let interfaces = "127.0.0.1 ::1 192.168.0.2 192.168.1.2 172.17.0.1 2001:db8::1 2001:db8:1::2 \
                      169.254.20.10 fe80::1";
    for (spec, v4, v6) in [
        ("primary", "192.168.0.2", "2001:db8::1"),
        ("localhost", "127.0.0.1", "::1"),
        ("primary, localhost", "127.0.0.1 192.168.0.2", "::1 2001:db8::1"),
        ("primary,192.168.1.0/24", "192.168.0.2 192.168.1.2", "2001:db8::1"),
        ("all", "* 127.0.0.1 192.168.0.2 192.168.1.2 172.17.0.1", "* ::1 2001:db8::1 2001:db8:1::2"),
        ("0.0.0.0/0", "* 127.0.0.1 192.168.0.2 192.168.1.2 172.17.0.1", "* ::1 2001:db8::1 2001:db8:1::2"),
        ("169.254.0.0/16,fe80::/10", "169.254.20.10", "fe80::1"),
    ] {
        let parsed: NodePortAddresses = spec.parse().unwrap();
        assert_eq!(served(&parsed, Family::V4, own, interfaces), v4, "{spec} v4");
        assert_eq!(served(&parsed, Family::V6, own, interfaces), v6, "{spec} v6");
    }
    let primary = NodePortAddresses::primary();
    assert_eq!("primary".parse(), Ok(primary.clone()));
    assert_eq!(served(&primary, Family::V6, "192.168.0.2", interfaces), "", "a node without IPv6 serves none there");
    assert_eq!(served(&primary, Family::V4, "203.0.113.9", interfaces), "", "an address that no interface has");
    assert_eq!(served(&primary, Family::V6, "fe80::1", interfaces), "fe80::1", "a node that has no other");
}

#[test]
fn loopback_is_among_some_networks() {
    for (id, more, expected) in [
        ("LO-1", None, true),
        ("LO-2", Some("0.0.0.0/0"), true),
        ("LO-3", Some("::/0"), false),
        ("LO-4", Some("127.0.0.0/8"), true),
        ("LO-5", Some("::1/128"), false),
        ("LO-6", Some("127.0.2.0/28"), true),
        ("LO-7", Some("64.0.0.0/2"), true),
        ("LO-8", Some("128.0.2.0/28"), false),
        ("primary", Some("primary"), false),
        ("localhost", Some("localhost"), true),
        ("all", Some("all"), true),
    ] {
        let base = "224.0.0.0/24,192.168.0.0/16,fd00:1:d::/64";
        let spec = more.map_or(String::new(), |more| format!("{base},{more}"));
        assert_eq!(spec.parse::<NodePortAddresses>().unwrap().includes_v4_loopback(), expected, "{id}");
    }
}

#[test]
fn what_is_neither_keyword_nor_network_is_refused() {
    for text in ["primry", "10.0.0.1", "10.0.0.0/33", "PRIMARY", "primary;all"] {
        let error = text.parse::<NodePortAddresses>().unwrap_err();
        assert!(error.contains(text), "{error}");
    }
}
