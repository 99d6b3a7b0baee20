//! Tables in, text out.

use std::{collections::BTreeMap, net::IpAddr};

use sheave_ebpf::{
    addr::Addr,
    affinity::{AffinityKey, CLIENT_ADDRESS, CLIENT_NETNS, word},
    backend::Backend,
    frontend::{
        Frontend, FrontendKey, KIND_CLUSTER_IP, KIND_LOAD_BALANCER, KIND_LOOPBACK, KIND_NODE_PORT, KIND_UNKNOWN_PORT,
    },
    names::{ServiceName, pad},
    proto::{TCP, UDP},
    service::{
        ALGORITHM_MAGLEV, Config, Scope, VERDICT_DROP, VERDICT_REJECT, WORDS_PER_SERVICE, Word, config_index,
        word_index,
    },
    source_range::{SERVICE_BITS, SourceRange},
};

use super::{
    ReadTables,
    clients::{ReadClients, affinity, source_ranges},
    views,
};
use crate::{
    datapath::RangeKey,
    render::{
        self, clients,
        lb::{Lines, names, table},
    },
    view::{Items, LbView},
};

/// Tables in memory, filled in the kernel's form.
#[derive(Default)]
struct Memory {
    frontends: Vec<(FrontendKey, Frontend)>,
    words: BTreeMap<u32, u64>,
    slots: Vec<u32>,
    backends: Vec<(Backend, u64)>,
    names: Vec<ServiceName>,
    affinity: Vec<(AffinityKey, u64)>,
    ranges: Vec<RangeKey>,
}

impl ReadClients for Memory {
    fn affinity(&self) -> Vec<(AffinityKey, u64)> {
        self.affinity.clone()
    }
    fn source_ranges(&self) -> Vec<RangeKey> {
        self.ranges.clone()
    }
}

impl ReadTables for Memory {
    fn frontends(&self) -> Vec<(FrontendKey, Frontend)> {
        self.frontends.clone()
    }
    fn word(&self, index: u32) -> u64 {
        self.words.get(&index).copied().unwrap_or_default()
    }
    fn slot(&self, index: u32) -> u32 {
        self.slots[index as usize]
    }
    fn backend(&self, id: u32) -> Backend {
        self.backends[id as usize].0
    }
    fn backends(&self) -> Vec<Backend> {
        self.backends.iter().map(|(backend, _)| *backend).collect()
    }
    fn connections(&self, id: u32) -> u64 {
        self.backends[id as usize].1
    }
    fn name(&self, service: u32) -> Option<ServiceName> {
        self.names.get(service as usize).copied()
    }
}

impl Memory {
    /// The next service id, with this name.
    fn service(&mut self, name: &str) -> u32 {
        let id = u32::try_from(self.names.len()).unwrap();
        let padded = |text: &str| pad(text).unwrap();
        let (namespace, port_name) = (padded("t"), padded("p"));
        self.names.push(ServiceName { namespace, name: padded(name), port_name, proto: TCP, family: 4, zero: [0; 6] });
        id
    }

    fn add_frontend(&mut self, address: &str, port: u16, proto: u8, service: u32, kind: u32) {
        let addr = Addr::from(address.parse::<IpAddr>().unwrap());
        self.frontends.push((FrontendKey { addr, port: port.to_be(), proto, zero: 0 }, Frontend { service, kind }));
    }

    /// The next backend id, with some connections.
    fn add_backend(&mut self, address: &str, port: u16, service: u32, connections: u64) -> u32 {
        let addr = Addr::from(address.parse::<IpAddr>().unwrap());
        self.backends.push((Backend { addr, port: port.to_be(), proto: TCP, flags: 0, service }, connections));
        u32::try_from(self.backends.len() - 1).unwrap()
    }

    fn forward(&mut self, service: u32, scopes: &[Scope], slots: &[u32]) {
        let offset = u32::try_from(self.slots.len()).unwrap();
        self.slots.extend(slots);
        for scope in scopes {
            let word = Word::forward(offset, u32::try_from(slots.len()).unwrap(), false);
            self.words.insert(word_index(service, *scope), word.0);
        }
    }

    fn verdict(&mut self, service: u32, scope: Scope, verdict: u8) {
        self.words.insert(word_index(service, scope), Word::verdict_only(verdict).0);
    }
}

/// Every shape there is: policies that differ by scope, weights, no endpoints, loopback, unknown ports, no name.
fn sample() -> Memory {
    let mut tables = Memory::default();
    let web = tables.service("web");
    tables.add_frontend("192.0.2.11", 30080, TCP, web, KIND_NODE_PORT);
    tables.add_frontend("127.0.0.1", 30080, TCP, web, KIND_LOOPBACK);
    tables.add_frontend("10.96.0.20", 80, TCP, web, KIND_CLUSTER_IP);
    tables.add_frontend("10.96.0.20", 0, 0, 0, KIND_UNKNOWN_PORT);
    let (a, b) = (tables.add_backend("10.244.1.10", 8080, web, 3), tables.add_backend("10.244.1.9", 8080, web, 0));
    tables.forward(web, &[Scope::Cluster, Scope::Inside], &[a, b, b]);
    tables.verdict(web, Scope::Outside, VERDICT_DROP);
    let config = Config::new(ALGORITHM_MAGLEV, 0, 10_800);
    tables.words.insert(config_index(web), config.0);

    let v6 = tables.service("six");
    tables.add_frontend("2001:db8::20", 443, TCP, v6, KIND_LOAD_BALANCER);
    let six = tables.add_backend("2001:db8:1::10", 8443, v6, 1);
    // Two runs with the same members are the same choice.
    tables.forward(v6, &[Scope::Inside], &[six]);
    tables.forward(v6, &[Scope::Outside], &[six]);

    let empty = tables.service("empty");
    tables.add_frontend("10.96.0.32", 53, UDP, empty, KIND_CLUSTER_IP);
    tables.verdict(empty, Scope::Cluster, VERDICT_REJECT);
    tables.names.pop(); // as when the agent died before it wrote the name
    tables
}

fn check(lines: Lines, wide: bool, expected: &str) {
    assert_eq!(table(&views(&sample()), lines, wide).text().trim_end(), expected.trim());
}

#[test]
fn the_kernels_tables_print_one_line_for_every_frontend_and_backend() {
    check(
        Lines::Pairs,
        false,
        "
FRONTEND                 SCOPE      SERVICE   VERDICT   BACKEND                 WEIGHT   CONNECTIONS
10.96.0.20:*/ANY         both       -         reject    -                       -        -
10.96.0.20:80/TCP        both       t/web     forward   10.244.1.9:8080         2        0
10.96.0.20:80/TCP        both       t/web     forward   10.244.1.10:8080        1        3
10.96.0.32:53/UDP        both       -         reject    -                       -        -
127.0.0.1:30080/TCP      internal   t/web     forward   10.244.1.9:8080         2        0
127.0.0.1:30080/TCP      internal   t/web     forward   10.244.1.10:8080        1        3
192.0.2.11:30080/TCP     internal   t/web     forward   10.244.1.9:8080         2        0
192.0.2.11:30080/TCP     internal   t/web     forward   10.244.1.10:8080        1        3
192.0.2.11:30080/TCP     external   t/web     drop      -                       -        -
[2001:db8::20]:443/TCP   both       t/six     forward   [2001:db8:1::10]:8443   1        1",
    );
}

#[test]
fn the_wide_list_of_frontends_shows_how_a_backend_is_chosen() {
    check(
        Lines::Frontends,
        true,
        "
FRONTEND                 SCOPE      SERVICE   VERDICT   BACKENDS   KIND           ALGORITHM   AFFINITY
10.96.0.20:*/ANY         both       -         reject    0          UnknownPort    random      -
10.96.0.20:80/TCP        both       t/web     forward   2          ClusterIP      maglev      10800s
10.96.0.32:53/UDP        both       -         reject    0          ClusterIP      random      -
127.0.0.1:30080/TCP      internal   t/web     forward   2          Loopback       maglev      10800s
192.0.2.11:30080/TCP     internal   t/web     forward   2          NodePort       maglev      10800s
192.0.2.11:30080/TCP     external   t/web     drop      0          NodePort       maglev      10800s
[2001:db8::20]:443/TCP   both       t/six     forward   1          LoadBalancer   random      -",
    );
}

#[test]
fn a_backend_of_several_frontends_is_one_line() {
    check(
        Lines::Backends,
        false,
        "
BACKEND                     SERVICE   CONNECTIONS   FRONTENDS
10.244.1.9:8080/TCP         t/web     0             3
10.244.1.10:8080/TCP        t/web     3             3
[2001:db8:1::10]:8443/TCP   t/six     1             1",
    );
}

/// At second 1000: what is in force, with the time that is left of it.
#[test]
fn clients_are_shown_with_where_they_go_and_for_how_long() {
    let mut tables = sample();
    let [web, six, nameless] = [0, 1, 2]; // of the sample
    let (a, gone) = (0, tables.add_backend("10.244.1.66", 8080, web, 1));
    let by_address = |service, address: &str| AffinityKey {
        service,
        kind: CLIENT_ADDRESS,
        client: Addr::from(address.parse::<IpAddr>().unwrap()).words,
    };
    let by_netns = |service, low, high| AffinityKey { service, kind: CLIENT_NETNS, client: [low, high, 0, 0] };
    tables.affinity = vec![
        (by_netns(web, 7, 1), word(a, 1000)),
        (by_address(web, "198.51.100.10"), word(a, 900)),
        (by_address(web, "198.51.100.9"), word(a, 0)),
        (by_address(web, "198.51.100.11"), word(gone, 1000)), // case 24: it takes no new connections
        (by_address(six, "2001:db8::9"), word(2, 1000)),      // affinity was switched off
    ];
    tables.words.insert(config_index(web), Config::new(ALGORITHM_MAGLEV, 0, 999).0);
    let range = |service: u32, bits, address: &str| {
        let addr = Addr::from(address.parse::<IpAddr>().unwrap());
        (SERVICE_BITS + bits, SourceRange { service: service.to_be(), addr })
    };
    tables.ranges = vec![
        range(six, 48, "2001:db8:100::"),
        range(web, 96 + 24, "198.51.100.0"),
        range(nameless, 96, "0.0.0.0"),
        range(web, 96 + 8, "10.0.0.0"),
    ];

    let (affinity, ranges) = (affinity(&tables, 1000), source_ranges(&tables));
    let expected = "
SERVICE   PORT   PROTOCOL   CLIENT             BACKEND            REMAINING   TIMEOUT
t/web     p      TCP        netns:4294967303   10.244.1.10:8080   999s        999s
t/web     p      TCP        198.51.100.10      10.244.1.10:8080   899s        999s";
    assert_eq!(clients::affinity(&affinity.items, true).text().trim_end(), expected.trim());
    assert_eq!(
        clients::affinity_names(&affinity.items),
        "netns:4294967303→t/web:p/TCP→10.244.1.10:8080\n198.51.100.10→t/web:p/TCP→10.244.1.10:8080\n"
    );
    let expected = "
SERVICE   PORT   PROTOCOL   CLIENTS
-         -      -          0.0.0.0/0
t/six     p      TCP        2001:db8:100::/48
t/web     p      TCP        10.0.0.0/8
t/web     p      TCP        198.51.100.0/24";
    assert_eq!(clients::source_ranges(&ranges.items).text().trim_end(), expected.trim());
    let json = serde_json::to_value(&affinity.items[1]).unwrap();
    let expected = serde_json::json!({
        "service": "t/web", "portName": "p", "protocol": "TCP", "client": "198.51.100.10",
        "backend": "10.244.1.10:8080", "remainingSeconds": 899, "timeoutSeconds": 999,
    });
    assert_eq!(json, expected);
    assert_eq!(serde_saphyr::from_str::<Items<_>>(&render::yaml(&affinity).unwrap()).unwrap(), affinity);
    assert_eq!(serde_saphyr::from_str::<Items<_>>(&render::yaml(&ranges).unwrap()).unwrap(), ranges);
}

#[test]
fn a_word_never_written_is_no_verdict() {
    let mut tables = Memory::default();
    let id = tables.service("new");
    tables.add_frontend("10.96.0.40", 80, TCP, id, KIND_CLUSTER_IP);
    assert_eq!(views(&tables).items[0].verdict, "none");
}

/// The ports of case 36: where a swapped byte or a sign shows.
const PORTS: [u16; 8] = [1, 80, 443, 8080, 30800, 32768, 40000, 65535];

#[test]
fn case_36_ports_read_as_in_the_api_in_every_format() {
    let mut tables = Memory::default();
    let mut expected = Vec::new();
    for (address, shown, target) in
        [("10.96.1.2", "10.96.1.2", "10.244.3.4"), ("2001:db8::1:2", "[2001:db8::1:2]", "2001:db8:1::3:4")]
    {
        for port in PORTS {
            for (proto, name) in [(TCP, "TCP"), (UDP, "UDP")] {
                let service = tables.service("case-36");
                tables.add_frontend(address, port, proto, service, KIND_CLUSTER_IP);
                let id = tables.add_backend(target, port, service, 0);
                tables.forward(service, &[Scope::Cluster], &[id]);
                expected.push((address, port, name, target, format!("{shown}:{port}/{name}")));
            }
        }
    }
    let items = views(&tables);
    assert_eq!(items.items.len() * WORDS_PER_SERVICE as usize, expected.len() * 4);

    for document in [
        serde_json::from_str::<Items<LbView>>(&render::json(&items).unwrap()).unwrap(),
        serde_json::from_str(&render::json_line(&items).unwrap()).unwrap(),
        serde_saphyr::from_str(&render::yaml(&items).unwrap()).unwrap(),
    ] {
        for (view, (address, port, name, target, _)) in document.items.iter().zip(&expected) {
            assert_eq!((view.address.as_str(), view.port, view.protocol.as_str()), (*address, *port, *name));
            assert_eq!((view.backends[0].address.as_str(), view.backends[0].port), (*target, *port));
        }
    }
    let first_words = |text: String| -> Vec<String> {
        text.lines().map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
    };
    let frontends: Vec<String> = expected.iter().map(|e| e.4.clone()).collect();
    assert_eq!(first_words(names(&items)), frontends);
    for (lines, wide) in [(Lines::Pairs, false), (Lines::Pairs, true), (Lines::Frontends, true)] {
        assert_eq!(first_words(table(&items, lines, wide).text())[1..], frontends);
    }
    let mut backends = first_words(table(&items, Lines::Backends, false).text());
    backends.remove(0);
    let swapped = |e: &(&str, u16, &str, &str, String)| format!("{}/{}", render::endpoint(e.3, e.1), e.2);
    assert_eq!(backends, expected.iter().map(swapped).collect::<Vec<_>>());
}
