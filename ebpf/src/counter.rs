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
    /// A connect or datagram met a Local policy without local endpoint: sent into silence.
    SocketDrop = 3, "socket_drop";
    /// A client outside loadBalancerSourceRanges dialled.
    SocketSourceRange = 4, "socket_source_range";
    /// An unknown port of a ClusterIP was dialled.
    SocketUnknownPort = 5, "socket_unknown_port";
    /// The word, slot or backend behind a frontend was missing: a defect, left untranslated.
    SocketBroken = 6, "socket_broken";
    /// Socket storage could not be had: getpeername will show the backend.
    SocketNoStorage = 7, "socket_no_storage";
    /// The peer table refused an entry: recvmsg will show the backend.
    SocketNoPeer = 8, "socket_no_peer";
    /// A bind to a NodePort was refused.
    BindRefused = 9, "bind_refused";
    /// The affinity table refused an entry.
    AffinityFull = 10, "affinity_full";
    /// An address of a service CIDR was dialled that no Service has.
    SocketUnknownAddress = 11, "socket_unknown_address";
    /// A flow of packets was sent to a backend.
    PacketForward = 16, "packet_forward";
    /// A packet was refused: no endpoint anywhere.
    PacketReject = 17, "packet_reject";
    /// A packet met a Local policy without local endpoint: dropped.
    PacketDrop = 18, "packet_drop";
    /// A packet from a client outside loadBalancerSourceRanges: dropped.
    PacketSourceRange = 19, "packet_source_range";
    /// A packet to an unknown port of a ClusterIP was refused.
    PacketUnknownPort = 20, "packet_unknown_port";
    /// The word, slot or backend behind a frontend was missing: a defect, left untranslated.
    PacketBroken = 21, "packet_broken";
    /// No free port to hide a client behind: dropped. Widen --snat-ports.
    SnatExhausted = 22, "snat_exhausted";
    /// The leaving device has no address to hide a client behind: dropped.
    SnatNoAddress = 23, "snat_no_address";
    /// The flow table refused an entry: dropped.
    ConntrackFull = 24, "conntrack_full";
    /// A packet that could not be rewritten: dropped.
    PacketMalformed = 25, "packet_malformed";
    /// SCTP to a target port that is not the Service's port, or whose port was taken: dropped.
    PacketSctpPort = 26, "packet_sctp_port";
    /// A client and port that already talk to the chosen backend through another address: dropped.
    PacketClash = 28, "packet_clash";
    /// A packet to an address of a service CIDR that no Service has: dropped.
    PacketUnknownAddress = 29, "packet_unknown_address";
    /// A ping of a virtual address was answered.
    PacketPing = 30, "packet_ping";
    /// A record for `sheave monitor` found no room: its reader was too slow.
    EventLost = 40, "event_lost";
}

/// Size of the array: room to grow without a new ABI.
pub const SIZE: u32 = 64;
