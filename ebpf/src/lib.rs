//! The map ABI: what the agent writes and the programs read. Compiled for the host and for BPF.
//!
//! Addresses and ports are in network byte order; the agent converts where it reads and writes maps. No struct has
//! padding: padding in a key is uninitialised stack and would hash as garbage.
#![cfg_attr(not(test), no_std)] // its own tests are host programs

#[macro_use]
mod pod;
pub mod addr;
pub mod affinity;
pub mod backend;
pub mod conntrack;
pub mod counter;
pub mod device;
pub mod event;
pub mod frontend;
pub mod names;
pub mod service;
pub mod socket;
pub mod source_range;

/// Part of the pin path. A change of any layout here is a new version; see `docs/map-abi.md`.
pub const ABI_VERSION: u32 = 2;

/// Transport protocols as they stand in `sock_addr` and in packets (IANA numbers).
pub mod proto {
    /// TCP.
    pub const TCP: u8 = 6;
    /// UDP.
    pub const UDP: u8 = 17;
    /// SCTP.
    pub const SCTP: u8 = 132;
    /// ICMP.
    pub const ICMP: u8 = 1;
    /// ICMPv6.
    pub const ICMPV6: u8 = 58;
}

/// Flags of a TCP segment (RFC 9293, 3.1).
pub mod tcp {
    /// The sender has nothing more to say.
    pub const FIN: u8 = 1;
    /// It wants a connection.
    pub const SYN: u8 = 1 << 1;
    /// There is no connection.
    pub const RST: u8 = 1 << 2;
    /// It acknowledges what it has heard.
    pub const ACK: u8 = 1 << 4;
}

/// Names of every map. The pin of a map is its name in lower case.
pub mod maps {
    /// Hash: [`FrontendKey`](crate::frontend::FrontendKey) → [`Frontend`](crate::frontend::Frontend).
    pub const FRONTENDS: &str = "FRONTENDS";
    /// Array of u64, mapped into the agent: service id × 4 + scope → [`Word`](crate::service::Word).
    pub const SERVICES: &str = "SERVICES";
    /// Array of u64, mapped into the agent: slot → backend id.
    pub const TABLES: &str = "TABLES";
    /// Array, mapped into the agent: backend id → [`Backend`](crate::backend::Backend).
    pub const BACKENDS: &str = "BACKENDS";
    /// Array of u64, mapped into the agent: backend id → live connections and [`RETIRED`](crate::backend::RETIRED).
    pub const CONNECTIONS: &str = "CONNECTIONS";
    /// Array of u64: service id → next slot of round robin.
    pub const CURSORS: &str = "CURSORS";
    /// LRU hash: [`AffinityKey`](crate::affinity::AffinityKey) → affinity word.
    pub const AFFINITY: &str = "AFFINITY";
    /// Socket storage: [`SocketState`](crate::socket::SocketState).
    pub const SOCKETS: &str = "SOCKETS";
    /// LRU hash: [`PeerKey`](crate::socket::PeerKey) → [`Peer`](crate::socket::Peer).
    pub const PEERS: &str = "PEERS";
    /// LRU hash: [`PickKey`](crate::socket::PickKey) → backend id.
    pub const PICKS: &str = "PICKS";
    /// LRU hash: [`OwnPeer`](crate::socket::OwnPeer) → 1.
    pub const OWN_PEERS: &str = "OWN_PEERS";
    /// LPM trie: [`SourceRange`](crate::source_range::SourceRange) → 1.
    pub const SOURCE_RANGES: &str = "SOURCE_RANGES";
    /// LPM trie: [`Addr`](crate::addr::Addr) → 1 in the networks that ClusterIPs come from, where an address that no
    /// Service has is dropped silently; 0 for an address that somebody else serves.
    pub const SERVICE_CIDRS: &str = "SERVICE_CIDRS";
    /// Hash the programs never read: service id → [`ServiceName`](crate::names::ServiceName).
    pub const NAMES: &str = "NAMES";
    /// Array of u64, mapped into the agent: see [`meta`](crate::meta).
    pub const META: &str = "META";
    /// Per-CPU array of u64: [`Counter`](crate::counter::Counter) → count.
    pub const COUNTERS: &str = "COUNTERS";

    /// LRU hash: [`Tuple`](crate::conntrack::Tuple) → [`Flow`](crate::conntrack::Flow).
    pub const CONNTRACK: &str = "CONNTRACK";
    /// LRU hash: [`FragmentKey`](crate::conntrack::FragmentKey) → [`Ports`](crate::conntrack::Ports).
    pub const FRAGMENTS: &str = "FRAGMENTS";
    /// Hash: interface index → [`Device`](crate::device::Device).
    pub const DEVICES: &str = "DEVICES";
    /// Hash: [`Addr`](crate::addr::Addr) → [`ADDRESS_OWN`](crate::device::ADDRESS_OWN) and its like.
    pub const NODE_ADDRESSES: &str = "NODE_ADDRESSES";
    /// LPM trie: [`Addr`](crate::addr::Addr) → a `RANGE_…` of [`device`](crate::device).
    pub const POD_RANGES: &str = "POD_RANGES";
    /// Ring buffer of [`Event`](crate::event::Event): what `sheave monitor` reads.
    pub const EVENTS: &str = "EVENTS";

    /// The ABI version in which layout and meaning of a map became what they are. A map that is older than that begins
    /// empty after an upgrade; all others are taken over with what they hold (`docs/adr/0006-upgrades.md`).
    #[must_use]
    pub fn changed_in(map: &str) -> u32 {
        if map == DEVICES { 2 } else { 1 }
    }

    /// Every map there is.
    pub const ALL: [&str; 22] = [
        FRONTENDS,
        SERVICES,
        TABLES,
        BACKENDS,
        CONNECTIONS,
        CURSORS,
        AFFINITY,
        SOCKETS,
        PEERS,
        PICKS,
        OWN_PEERS,
        SOURCE_RANGES,
        SERVICE_CIDRS,
        NAMES,
        META,
        COUNTERS,
        CONNTRACK,
        FRAGMENTS,
        DEVICES,
        NODE_ADDRESSES,
        POD_RANGES,
        EVENTS,
    ];
}

/// Indexes of the `META` array.
pub mod meta {
    /// One more than the largest backend id ever used; what lies above was never written.
    pub const BACKEND_HIGH_WATER: u32 = 0;
    /// Boot-time seconds at which the agent last finished a reconcile; 0 = never.
    pub const LAST_RECONCILE: u32 = 1;
    /// Boot-time seconds at which a program last made a masqueraded flow; 0 = there is none. While 0, no
    /// packet to this node can be a reply of ours.
    pub const MASQUERADED_FLOWS: u32 = 2;
    /// Boot-time seconds at which a program last made a flow whose replies reach egress unmarked; 0 = there is none.
    pub const PLAIN_FLOWS: u32 = 3;
    /// Boot-time seconds up to which somebody reads `EVENTS`; 0 = nobody. While 0, nothing is recorded.
    pub const WATCHED_UNTIL: u32 = 4;
    /// 1 = devices of workloads have their programs; 0 = they have none while there is nothing for them to do, and a
    /// client cannot be masqueraded towards a workload of this node.
    pub const WORKLOAD_PROGRAMS: u32 = 5;
    /// 1 = those are the programs for clients: pods dial frontends packet by packet. For the agent's successor.
    pub const PODS_DIAL: u32 = 6;
    /// Between these two [places](crate::addr::Addr::place) lie all IPv4 addresses that have an entry for their unknown
    /// ports, or are a service CIDR's; the second is 0 while there is none.
    pub const GUARDED_V4: [u32; 2] = [7, 8];
    /// The same for IPv6.
    pub const GUARDED_V6: [u32; 2] = [9, 10];
    /// The same for IPv4 addresses whose unknown ports are refused to clients outside alone.
    pub const GUARDED_OUTSIDE_V4: [u32; 2] = [11, 12];
    /// The same for IPv6.
    pub const GUARDED_OUTSIDE_V6: [u32; 2] = [13, 14];
    /// The lowest number of a UDP NodePort so far and, from bit 16 on, the highest, host order; 0 = there was none.
    pub const NODE_PORTS: u32 = 15;
    /// Size of the array: room to grow without a new layout.
    pub const SIZE: u32 = 16;
}

/// Names of the constants that the loader sets before the verifier sees the programs.
pub mod globals {
    /// u32: 1 where the kernel has `bpf_set_retval` (5.18); elsewhere a refused connect fails with EPERM.
    pub const SET_RETVAL: &str = "SET_RETVAL";
    /// u64: cookie of the host's network namespace; 0 = unknown, nothing then counts as a socket of the host.
    pub const HOST_NETNS: &str = "HOST_NETNS";
    /// u32: 1 = only sockets of the host's network namespace are translated.
    pub const HOST_ONLY: &str = "HOST_ONLY";
    /// u32: 1 = NodePorts answer on loopback in the host's network namespace.
    pub const LOOPBACK_NODE_PORTS: &str = "LOOPBACK_NODE_PORTS";
    /// u32: 1 = binding to a NodePort in the host's network namespace is refused.
    pub const BIND_PROTECTION: &str = "BIND_PROTECTION";
    /// u32: 1 = the discard addresses are routed into a device that drops everything; 0 = a connection that should be
    /// dropped silently fails with ETIMEDOUT at once.
    pub const DISCARD: &str = "DISCARD";
    /// u32: 1 where the kernel has `bpf_skc_to_mptcp_sock` (5.19) and MPTCP: what a subflow dials is remembered on the
    /// MPTCP socket, the one that is released.
    pub const MPTCP: &str = "MPTCP";
    /// u32: 1 = connected TCP sockets are entered in `PEERS` too, so that the agent can close them.
    pub const TRACK_TCP: &str = "TRACK_TCP";
    /// u32: the first of two neighbouring bits of the packet mark that are ours, as a mask (1 << n).
    pub const MARK: &str = "MARK";
    /// u32: lowest source port for masqueraded clients, host order.
    pub const SNAT_FIRST: &str = "SNAT_FIRST";
    /// u32: how many ports from there on are for masqueraded clients.
    pub const SNAT_COUNT: &str = "SNAT_COUNT";
    /// u32: 1 = every client of a ClusterIP is masqueraded.
    pub const MASQUERADE_ALL: &str = "MASQUERADE_ALL";
    /// u32: 1 = `POD_RANGES` says who is a pod; 2 = the device that a packet comes through does; 0 = nobody is, and
    /// clients of a ClusterIP are not masqueraded.
    pub const DETECT_PODS: &str = "DETECT_PODS";
    /// u32: 1 = ClusterIPs are served to pods alone, packets of others to them are dropped.
    pub const CLUSTER_IPS_INSIDE_ONLY: &str = "CLUSTER_IPS_INSIDE_ONLY";
    /// u32: 1 = a client from outside is not masqueraded towards a backend on this node, whatever the policy.
    pub const KEEP_CLIENT: &str = "KEEP_CLIENT";
    /// u32: 1 = pings of virtual addresses are answered.
    pub const ANSWER_PINGS: &str = "ANSWER_PINGS";
    /// u32: 1 where the kernel knows BPF_F_IPV6 (6.16): IPv6 addresses are replaced under CHECKSUM_COMPLETE too.
    pub const CSUM_IPV6: &str = "CSUM_IPV6";
    /// u32: 1 where cgroup programs may ask for the running process (5.8 or later): records name it.
    pub const CURRENT_TASK: &str = "CURRENT_TASK";
    /// u32: bytes before the network header: 14 on Ethernet, 0 on devices without a link layer.
    pub const LINK_HEADER: &str = "LINK_HEADER";
}

/// Where connections are sent that must be dropped silently. The agent routes both addresses into a device that drops.
pub mod discard {
    use core::net::{Ipv4Addr, Ipv6Addr};

    /// The IPv4 dummy address of RFC 7600.
    pub const V4: Ipv4Addr = Ipv4Addr::new(192, 0, 0, 8);
    /// In the discard-only prefix of RFC 6666.
    pub const V6: Ipv6Addr = Ipv6Addr::new(0x100, 0, 0, 0, 0, 0, 0, 8);
}
