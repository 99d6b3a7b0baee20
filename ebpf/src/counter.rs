//! Why things happened, as indexes of the per-CPU array `COUNTERS`.

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $variant:ident = $index:literal, $name:literal;)*) => {
        /// Every reason that is counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
        #[repr(u32)]
        pub enum Counter { $($(#[doc = $doc])* $variant = $index,)* }

        impl Counter {
            /// All of them, in order of their index.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The name that metrics and `status` show.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// What it counts, for people.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self { $(Self::$variant => concat!($($doc),*),)* }
            }
        }
    };
}

counters! {
    /// A connect was sent to a backend.
    SocketConnect = 0, "socket_connect";
    /// A datagram of an unconnected socket was sent to a backend.
    SocketSend = 1, "socket_send";
    /// A connect or datagram was refused: no endpoint anywhere.
    SocketReject = 2, "socket_reject";
    /// A connect or datagram met a Local policy without a local endpoint: dropped silently.
    SocketDrop = 3, "socket_drop";
    /// A client outside loadBalancerSourceRanges tried to connect: dropped silently.
    SocketSourceRange = 4, "socket_source_range";
    /// A connect or datagram went to an unknown port of a ClusterIP: refused.
    SocketUnknownPort = 5, "socket_unknown_port";
    /// A part of the tables behind a frontend was missing, which is a bug: left untranslated.
    SocketBroken = 6, "socket_broken";
    /// Socket storage could not be allocated: getpeername will show the backend.
    SocketNoStorage = 7, "socket_no_storage";
    /// A table of peers refused an entry: recvmsg will show the backend, or an answer will be taken for a client's.
    SocketNoPeer = 8, "socket_no_peer";
    /// A bind to a NodePort was refused.
    BindRefused = 9, "bind_refused";
    /// The affinity table refused an entry.
    AffinityFull = 10, "affinity_full";
    /// A connect or datagram went to an address in a service CIDR that no Service has: dropped silently.
    SocketUnknownAddress = 11, "socket_unknown_address";
    /// A flow of packets was sent to a backend.
    PacketForward = 16, "packet_forward";
    /// A packet was refused: no endpoint anywhere.
    PacketReject = 17, "packet_reject";
    /// A packet met a Local policy without a local endpoint: dropped.
    PacketDrop = 18, "packet_drop";
    /// A packet came from a client outside loadBalancerSourceRanges: dropped.
    PacketSourceRange = 19, "packet_source_range";
    /// A packet to an unknown port of a virtual address was refused.
    PacketUnknownPort = 20, "packet_unknown_port";
    /// A part of the tables behind a frontend was missing, which is a bug: left untranslated.
    PacketBroken = 21, "packet_broken";
    /// No free port was left to masquerade a client: dropped. Widen --snat-ports.
    SnatExhausted = 22, "snat_exhausted";
    /// The outgoing device has no address to masquerade a client: dropped.
    SnatNoAddress = 23, "snat_no_address";
    /// The flow table refused an entry: dropped.
    ConntrackFull = 24, "conntrack_full";
    /// A packet could not be rewritten: dropped.
    PacketMalformed = 25, "packet_malformed";
    /// An SCTP packet needed a change of port, which its checksum does not allow: dropped.
    PacketSctpPort = 26, "packet_sctp_port";
    /// A port to masquerade a client behind was taken, and another one tried.
    SnatRetry = 27, "snat_retry";
    /// The client already talks to the chosen backend from this port through another address, and no other port was free
    /// for it, or the protocol is SCTP, whose ports cannot be changed: dropped.
    PacketClash = 28, "packet_clash";
    /// A packet went to an address in a service CIDR that no Service has: dropped.
    PacketUnknownAddress = 29, "packet_unknown_address";
    /// A ping of a virtual address was answered.
    PacketPing = 30, "packet_ping";
    /// A packet from outside the cluster to a ClusterIP, with --cluster-ips-from-outside=false: dropped.
    PacketClusterIpFromOutside = 31, "packet_cluster_ip_from_outside";
    /// A client already talked to the chosen backend from its port through another address: it was given another port.
    PacketOtherPort = 32, "packet_other_port";
    /// A port to masquerade a client behind turned out to be another connection's, which netfilter gave it: given up, and
    /// another one taken for the client's next packet.
    SnatGivenUp = 33, "snat_given_up";
    /// An ICMP error to a client of UDP or SCTP was not sent, for there were too many: 50 at once and 1000 a second are.
    PacketErrorLimit = 34, "packet_error_limit";
    /// A record for `sheave monitor` was lost because its reader was too slow.
    EventLost = 40, "event_lost";
}

/// Size of the array: room to grow without a new ABI.
pub const SIZE: u32 = 64;
