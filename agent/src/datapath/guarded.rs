//! The range of IPv4 addresses that have an entry for their unknown ports, or are a service CIDR's, so that programs need
//! not look for them in vain.

use std::net::IpAddr;

use sheave_ebpf::{addr::Addr, meta::GUARDED_V4};

use super::{Result, words::Words};

/// Widens the range, before the entry is made. It never becomes narrower: ClusterIPs come from one network.
///
/// # Errors
/// When the word cannot be reached.
pub fn widen(meta: &Words, addr: &Addr) -> Result<()> {
    let IpAddr::V4(v4) = IpAddr::from(*addr) else { return Ok(()) };
    let (address, range) = (u64::from(u32::from(v4)), meta.load(GUARDED_V4));
    let (first, last) = if range == 0 { (address, address) } else { (range >> 32, range & 0xffff_ffff) };
    meta.store(GUARDED_V4, first.min(address) << 32 | last.max(address))
}
