//! The ranges of addresses, one for each family, that have an entry for their unknown ports, or are a service CIDR's, so
//! that programs can skip the look-up for all other addresses.

use sheave_ebpf::{
    addr::Addr,
    meta::{GUARDED_V4, GUARDED_V6},
};

use super::{Result, words::Words};

/// Widens the range of that address's family, before the entry is made. It never becomes narrower: ClusterIPs come from
/// one network.
///
/// # Errors
/// When a word cannot be reached.
pub fn widen(meta: &Words, addr: &Addr) -> Result<()> {
    let ([first, last], place) = (if addr.is_v4() { GUARDED_V4 } else { GUARDED_V6 }, addr.place());
    let is_empty = meta.load(last) == 0;
    if is_empty || place < meta.load(first) {
        meta.store(first, place)?;
    }
    if place > meta.load(last) {
        meta.store(last, place)?;
    }
    Ok(())
}
