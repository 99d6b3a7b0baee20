//! What the packet programs must know of a network device, and of addresses.
use crate::addr::Addr;

pod! {
    /// The addresses that a device lends to what leaves through it, unspecified where it has none of the family; and
    /// who is behind it.
    pub struct Device [40] {
        /// IPv4, v4-mapped.
        pub v4: Addr,
        /// IPv6.
        pub v6: Addr,
        /// `DEVICE_…`
        pub flags: u32,
        /// Always 0.
        pub zero: u32,
    }
}

/// What arrives through the device comes from pods of this node.
pub const DEVICE_OF_PODS: u32 = 1;

/// In a value of `NODE_ADDRESSES`: an address of this node.
pub const ADDRESS_OWN: u32 = 1;
/// In a value of `NODE_ADDRESSES`: this node's object names it. The agent's note to its successor, which knows the devices
/// before it knows the object.
pub const ADDRESS_OF_NODE: u32 = 2;
/// Value in `POD_RANGES`: sources in the range are pods.
pub const RANGE_PODS: u32 = 1;
/// Value in `POD_RANGES`: sources in the range are pods of this node.
pub const RANGE_OWN_PODS: u32 = 2;
/// Bits of a `POD_RANGES` key that names one address.
pub const FULL_BITS: u32 = 128;
