//! Whether sockets can be closed from outside: by closing one of our own.

use std::{io, net::UdpSocket};

use anyhow::{Context as _, ensure};
use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_SOCK_DIAG};

/// Needs `CONFIG_INET_DIAG_DESTROY` (Linux 4.9), the module `udp_diag`, and `CAP_NET_ADMIN`.
pub fn try_it() -> anyhow::Result<()> {
    let victim = UdpSocket::bind("127.0.0.1:0").context("cannot open a UDP socket")?;
    let port = victim.local_addr()?.port();
    victim.connect(("127.0.0.1", port)).context("cannot connect a UDP socket; is the device lo up?")?;

    let mut socket = Socket::new(NETLINK_SOCK_DIAG).context("cannot open a netlink socket")?;
    socket.bind_auto()?;
    socket.send_to(&destroy_request(port), &SocketAddr::new(0, 0), 0)?;
    let (answer, _) = socket.recv_from_full()?;
    // struct nlmsgerr behind the 16 bytes of header; 0 is an acknowledgement.
    let code = answer.get(16..20).and_then(|b| b.try_into().ok()).map(i32::from_ne_bytes);
    let code = code.context("the kernel's answer is too short")?;
    ensure!(code == 0, "{}", io::Error::from_raw_os_error(-code));
    Ok(())
}

/// `SOCK_DESTROY` for the UDP socket that is connected to itself at 127.0.0.1:`port`.
fn destroy_request(port: u16) -> Vec<u8> {
    const SOCK_DESTROY: u16 = 21;
    const REQUEST_AND_ACK: u16 = 1 | 4;
    const LOOPBACK: [u8; 16] = [127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let mut message = Vec::with_capacity(72);
    // struct nlmsghdr
    message.extend(72_u32.to_ne_bytes());
    message.extend(SOCK_DESTROY.to_ne_bytes());
    message.extend(REQUEST_AND_ACK.to_ne_bytes());
    message.extend([1, 0, 0, 0, 0, 0, 0, 0]); // sequence, port id
    // struct inet_diag_req_v2: family AF_INET, protocol, extensions, padding, states, then the socket's id
    message.extend([2, sheave_ebpf::proto::UDP, 0, 0]);
    message.extend(u32::MAX.to_ne_bytes());
    message.extend([port.to_be_bytes(), port.to_be_bytes()].concat());
    message.extend([LOOPBACK, LOOPBACK].concat());
    message.extend([0; 4]); // interface
    message.extend([u8::MAX; 8]); // no cookie
    message
}
