//! What a socket was promised, so that it never sees a backend's address.
use crate::addr::Addr;

pod! {
    /// Socket storage. Written by connect, and for unconnected UDP by sendmsg.
    pub struct SocketState [32] {
        /// What the last translated connect dialled.
        pub addr: Addr,
        /// Its port, network order.
        pub port: u16,
        /// `CONNECTED`, `HAS_PEERS`.
        pub flags: u16,
        /// Backend of the connection that is counted in `CONNECTIONS`.
        pub backend: u32,
        /// Unconnected UDP: index of the service word (high half) and backend id of the last datagram. One word,
        /// because two threads may send on one socket at once. Earlier ones to other services are in `PICKS`.
        pub pick: u64,
    }
}

/// `addr`, `port` and `backend` are valid and the connection is counted.
pub const CONNECTED: u16 = 1;
/// The socket has entries in `PEERS`.
pub const HAS_PEERS: u16 = 1 << 1;

pod! {
    /// A backend that a socket talks to, or the discard address if it is dropped silently.
    pub struct PeerKey [32] {
        /// The socket's cookie.
        pub cookie: u64,
        /// The backend's address, IPv4 as v4-mapped.
        pub addr: Addr,
        /// Its port, network order.
        pub port: u16,
        /// IANA protocol number.
        pub proto: u8,
        /// Always 0.
        pub zero: u8,
        /// Always 0.
        pub zero2: u32,
    }
}

pod! {
    /// What the socket dialled to get there.
    pub struct Peer [24] {
        /// The frontend's address, IPv4 as v4-mapped.
        pub addr: Addr,
        /// Its port, network order.
        pub port: u16,
        /// Always 0.
        pub zero: u16,
        /// Service id, or [`NO_SERVICE`].
        pub service: u32,
    }
}

pod! {
    /// An unconnected UDP socket that talks to several services, and the index of the word of one of them.
    pub struct PickKey [16] {
        /// The socket's cookie.
        pub cookie: u64,
        /// Index of the service word.
        pub word: u32,
        /// Always 0.
        pub zero: u32,
    }
}

pod! {
    /// Whom a UDP socket of this node sends to from a port that is among the NodePorts, without being connected. What
    /// comes back is an answer, not a client's datagram.
    pub struct OwnPeer [24] {
        /// The other side's address, IPv4 as v4-mapped.
        pub addr: Addr,
        /// Its port, network order.
        pub port: u16,
        /// The socket's own port, network order.
        pub own_port: u16,
        /// Always 0.
        pub zero: u32,
    }
}

/// [`SocketState::pick`] of a socket that has sent no datagram to a service.
pub const NO_PICK: u64 = u64::MAX;

/// The service of a socket that dialled an address which no Service has.
pub const NO_SERVICE: u32 = u32::MAX;
