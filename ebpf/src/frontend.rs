//! What a client dials.
use crate::addr::Addr;

pod! {
    /// An address and port that a Service answers on.
    pub struct FrontendKey [20] {
        /// Address, IPv4 as v4-mapped.
        pub addr: Addr,
        /// Port, network order; 0 in the entry that stands for every unknown port of a virtual address.
        pub port: u16,
        /// IANA protocol number; 0 in the entry for unknown ports, [`FROM_OUTSIDE`] in that for clients outside alone,
        /// ICMP's in the one that lets pings be answered.
        pub proto: u8,
        /// Always 0.
        pub zero: u8,
    }
}

impl FrontendKey {
    /// The entry that stands for every unknown port of the same address.
    #[inline(always)]
    #[must_use]
    pub const fn of_unknown_port(&self) -> Self {
        Self { port: 0, proto: 0, ..*self }
    }

    /// The entry that stands for every unknown port of the same address, as clients outside dial it.
    #[inline(always)]
    #[must_use]
    pub const fn of_unknown_port_from_outside(&self) -> Self {
        Self { port: 0, proto: FROM_OUTSIDE, ..*self }
    }
}

/// No protocol: a number that IANA reserves.
pub const FROM_OUTSIDE: u8 = 255;

pod! {
    /// What a frontend names. One aligned u64, so that the program reads it whole.
    pub struct Frontend [8] {
        /// Service id.
        pub service: u32,
        /// One of the `KIND_…` constants.
        pub kind: u32,
    }
}

/// The Service's ClusterIP: internalTrafficPolicy counts, for every client.
pub const KIND_CLUSTER_IP: u32 = 0;
/// A NodePort on one of the node-port addresses.
pub const KIND_NODE_PORT: u32 = 1;
/// An address of `status.loadBalancer.ingress`; source ranges count.
pub const KIND_LOAD_BALANCER: u32 = 2;
/// An address of `spec.externalIPs`.
pub const KIND_EXTERNAL_IP: u32 = 3;
/// A NodePort on loopback; only for sockets of the host's network namespace.
pub const KIND_LOOPBACK: u32 = 4;
/// Every port of a ClusterIP that no Service port uses: refused. `service` is meaningless. With [`FROM_OUTSIDE`]: of a
/// load balancer's or external address, where a packet would leave again the way it came. With ICMP's number: pings of
/// the address are answered.
pub const KIND_UNKNOWN_PORT: u32 = 5;
