//! What `sheave monitor` is told: a record for every connection that is opened, refused or dropped.
use crate::addr::Addr;

pod! {
    /// A record of `EVENTS`.
    pub struct Event [96] {
        /// Nanoseconds on the kernel's monotonic clock.
        pub time: u64,
        /// Who dials: a packet's source. At a socket unspecified, unless it is bound: it has no address yet.
        pub client: Addr,
        /// What is dialled.
        pub frontend: Addr,
        /// Where it is sent; unspecified when nowhere.
        pub backend: Addr,
        /// Port of the client, network order; 0 at a socket.
        pub client_port: u16,
        /// Port dialled, network order.
        pub frontend_port: u16,
        /// Port of the backend, network order; 0 when there is none.
        pub backend_port: u16,
        /// IANA protocol number.
        pub proto: u8,
        /// `AT_…`
        pub place: u8,
        /// What happened: a [`Counter`](crate::counter::Counter).
        pub reason: u32,
        /// Service id, or [`NO_SERVICE`](crate::socket::NO_SERVICE).
        pub service: u32,
        /// At a socket: the process that dials, 0 where the kernel does not tell.
        pub pid: u32,
        /// Always 0.
        pub zero: u32,
        /// At a socket: the name of its thread, padded with zero bytes.
        pub command: [u8; 16],
    }
}

/// A process dialled.
pub const AT_SOCKET: u8 = 0;
/// A packet came along.
pub const AT_PACKET: u8 = 1;

/// Bytes of `EVENTS`: some 10,000 records, so that a reader may be late by a while. A multiple of every page size.
pub const RING_BYTES: u32 = 1 << 20;
