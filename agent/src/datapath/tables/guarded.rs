//! The ranges of addresses, one for each family, that have an entry for their unknown ports, or are a service CIDR's, and
//! the range of NodePorts: programs skip the look-up for all that lies outside.

use sheave_ebpf::{
    addr::Addr,
    frontend::{FROM_OUTSIDE, FrontendKey},
    meta::{GUARDED_OUTSIDE_V4, GUARDED_OUTSIDE_V6, GUARDED_V4, GUARDED_V6, NODE_PORTS},
};

use crate::datapath::{Result, tables::words::Words};

/// Widens the range that an entry for unknown ports belongs to, before the entry is made.
///
/// # Errors
/// When a word cannot be reached.
pub fn widen_for(meta: &Words, key: &FrontendKey) -> Result<()> {
    match key.proto {
        0 => widen(meta, &key.addr),
        FROM_OUTSIDE => grow(meta, if key.addr.is_v4() { GUARDED_OUTSIDE_V4 } else { GUARDED_OUTSIDE_V6 }, &key.addr),
        _ => Ok(()), // that for pings is looked for where a ping comes, and nowhere else
    }
}

/// Widens the range of that address's family. It never becomes narrower: ClusterIPs come from one network.
///
/// # Errors
/// When a word cannot be reached.
pub fn widen(meta: &Words, addr: &Addr) -> Result<()> {
    grow(meta, if addr.is_v4() { GUARDED_V4 } else { GUARDED_V6 }, addr)
}

/// Widens the range of NodePorts, before one more is served. `port` is in host order.
///
/// # Errors
/// When the word cannot be reached.
pub fn widen_node_ports(meta: &Words, port: u16) -> Result<()> {
    let (range, port) = (meta.load(NODE_PORTS), u64::from(port));
    let wider = match range {
        0 => port << 16 | port,
        _ => (range >> 16).max(port) << 16 | (range & 0xffff).min(port),
    };
    if wider != range {
        meta.store(NODE_PORTS, wider)?;
    }
    Ok(())
}

fn grow(meta: &Words, [first, last]: [u32; 2], addr: &Addr) -> Result<()> {
    let place = addr.place();
    let is_empty = meta.load(last) == 0;
    if is_empty || place < meta.load(first) {
        meta.store(first, place)?;
    }
    if place > meta.load(last) {
        meta.store(last, place)?;
    }
    Ok(())
}
