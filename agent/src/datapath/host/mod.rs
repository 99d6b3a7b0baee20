//! What of the host the datapath follows or changes: devices, addresses, namespaces, sockets, netfilter, IPVS.

pub mod addresses;
pub mod conntrack_sysctls;
pub mod devices;
pub mod discard;
pub mod ipvs;
pub mod netfilter;
pub mod netlink;
pub mod netns;
pub mod sockets;
