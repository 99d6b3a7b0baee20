//! Watches what passes through a place.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    io::{ErrorKind, Read},
    net::{IpAddr, Ipv6Addr},
};

use anyhow::{Context, Result};
use socket2::{Domain, Protocol, Socket, Type};

use crate::place::Place;

/// Sees every IP packet on every device of a place: on the lab's fabric, all that leaves a node.
#[derive(Debug)]
pub struct Tap {
    packets: Socket,
    seen: RefCell<BTreeMap<IpAddr, u64>>,
}

impl Place {
    /// Starts watching.
    ///
    /// # Errors
    /// When the kernel grants no packet socket.
    pub fn tap(&self) -> Result<Tap> {
        const EVERYTHING: i32 = (libc::ETH_P_ALL as u16).to_be() as i32;
        // Cooked packets begin with the IP header.
        let open = || Socket::new(Domain::from(libc::AF_PACKET), Type::DGRAM, Some(Protocol::from(EVERYTHING)));
        let packets = self.enter(open)?.context("cannot open a packet socket")?;
        packets.set_nonblocking(true)?;
        packets.set_recv_buffer_size(4 << 20)?;
        Ok(Tap { packets, seen: RefCell::default() })
    }
}

impl Tap {
    /// How many packets have had this destination, on any device.
    ///
    /// # Errors
    /// When the socket fails, or is a text that is no address given.
    pub fn to(&self, destination: &str) -> Result<u64> {
        let destination: IpAddr = destination.parse().with_context(|| format!("{destination} is no address"))?;
        let mut seen = self.seen.borrow_mut();
        let mut packet = [0; 128];
        loop {
            match (&self.packets).read(&mut packet) {
                Ok(length) => {
                    if let Some(to) = destination_of(&packet[..length]) {
                        *seen.entry(to).or_default() += 1;
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error).context("the packet socket failed"),
            }
        }
        Ok(seen.get(&destination).copied().unwrap_or_default())
    }
}

fn destination_of(packet: &[u8]) -> Option<IpAddr> {
    match packet.first()? >> 4 {
        4 => Some(<[u8; 4]>::try_from(packet.get(16..20)?).ok()?.into()),
        6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(24..40)?).ok()?).into()),
        _ => None,
    }
}
