//! A tunnel of IP packets between two places, as WireGuard or IP in IP make one: devices without a link layer, and this
//! process that carries the packets from one to the other.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::fd::AsRawFd as _,
    thread,
};

use anyhow::{Context, Result};

use crate::place::Place;

/// `TUNSETIFF`, `IFF_TUN | IFF_NO_PI` of tun(4).
const SET_DEVICE: libc::Ioctl = 0x4004_54ca;
const TUN: libc::c_short = 0x1001;

/// Makes a device of that name in both places and carries packets between them until they are removed.
///
/// # Errors
/// When the kernel has no tun devices.
pub fn dig(name: &str, ends: [&Place; 2]) -> Result<()> {
    let [mut near, mut far] = [open(name, ends[0])?, open(name, ends[1])?];
    let (mut near_again, mut far_again) = (near.try_clone()?, far.try_clone()?);
    thread::spawn(move || carry(&mut near, &mut far));
    thread::spawn(move || carry(&mut far_again, &mut near_again));
    Ok(())
}

fn carry(from: &mut File, to: &mut File) {
    let mut packet = [0; 65_536];
    while let Ok(length @ 1..) = from.read(&mut packet) {
        let _ = to.write_all(&packet[..length]); // a packet may be lost
    }
}

/// A new tun device in a place; it is gone when all its files are.
fn open(name: &str, place: &Place) -> Result<File> {
    let mut request = [0_u8; 40]; // struct ifreq: the name, then what this call asks
    request[..name.len().min(15)].copy_from_slice(&name.as_bytes()[..name.len().min(15)]);
    request[16..18].copy_from_slice(&TUN.to_ne_bytes());
    place.enter(move || {
        let file = File::options().read(true).write(true).open("/dev/net/tun").context("/dev/net/tun")?;
        // SAFETY: the kernel reads and writes a struct ifreq of 40 bytes, which lives across the call.
        let made = unsafe { libc::ioctl(file.as_raw_fd(), SET_DEVICE, request.as_mut_ptr()) };
        anyhow::ensure!(made == 0, "cannot make a tun device: {}", std::io::Error::last_os_error());
        Ok(file)
    })?
}
