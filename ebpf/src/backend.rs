//! Where a connection goes.
use crate::addr::Addr;

pod! {
    /// One endpoint of one service. An id in use is never rewritten.
    pub struct Backend [24] {
        /// Address, IPv4 as v4-mapped.
        pub addr: Addr,
        /// Port, network order; 0 marks an unused id.
        pub port: u16,
        /// IANA protocol number.
        pub proto: u8,
        /// `FLAG_…` bits.
        pub flags: u8,
        /// The service it belongs to.
        pub service: u32,
    }
}

impl Backend {
    /// An id that is not in use.
    pub const UNUSED: Self = Self { addr: Addr { words: [0; 4] }, port: 0, proto: 0, flags: 0, service: 0 };
}

/// The endpoint runs on this node.
pub const FLAG_LOCAL: u8 = 1;

/// No backend: what the state of a socket holds whose connection is dropped silently.
pub const NO_BACKEND: u32 = u32::MAX;

/// Bit of a `CONNECTIONS` word: the endpoint serves no more, datagram flows leave it. The agent
/// sets and clears it with an atomic or, while the programs add and subtract below it.
pub const RETIRED: u64 = 1 << 63;

/// Live connections in a `CONNECTIONS` word. A connection closed after its counter was reset may take it below zero;
/// that reads as none.
#[inline(always)]
#[must_use]
pub const fn connections(word: u64) -> u64 {
    // Sign-extend the 63 bits below the flag.
    let count = ((word << 1) as i64) >> 1;
    if count < 0 { 0 } else { count as u64 }
}
