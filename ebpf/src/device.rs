//! What the packet programs must know of a network device, and of addresses.
use crate::addr::Addr;

pod! {
    /// The addresses that a device lends to what leaves through it. Unspecified where it has none of the family.
    pub struct Device [32] {
        /// IPv4, v4-mapped.
        pub v4: Addr,
        /// IPv6.
        pub v6: Addr,
    }
}

/// Value in `NODE_ADDRESSES`: an address of this node.
pub const ADDRESS_OWN: u32 = 1;
/// Value in `POD_RANGES`: sources in the range are pods (`semantics.md` 6.3).
pub const RANGE_PODS: u32 = 1;
/// Value in `POD_RANGES`: sources in the range are pods of this node.
pub const RANGE_OWN_PODS: u32 = 2;
/// Bits of a `POD_RANGES` key that names one address.
pub const FULL_BITS: u32 = 128;
