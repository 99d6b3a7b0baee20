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
