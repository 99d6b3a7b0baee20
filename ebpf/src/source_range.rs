//! loadBalancerSourceRanges.
use crate::addr::Addr;

pod! {
    /// Data of the LPM key. The prefix counts from the first bit of `service`: 32 + the prefix of the v6 form.
    pub struct SourceRange [20] {
        /// Service id, network order, so that its bits come first in the trie.
        pub service: u32,
        /// Client address or network, IPv4 as v4-mapped.
        pub addr: Addr,
    }
}

/// Bits before the address.
pub const SERVICE_BITS: u32 = 32;
/// Bits of a key that names one address.
pub const FULL_BITS: u32 = 160;
