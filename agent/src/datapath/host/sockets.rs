//! Closing sockets that are connected to a backend which left its Service: nothing else tells a connected UDP socket
//! that its peer is gone. SOCK_DESTROY over NETLINK_SOCK_DIAG, in every network namespace; only sockets that `PEERS`
//! knows we sent there, never one that dialled the pod itself.
//!
//! And sockets that dialled a frontend before it led anywhere: those that wait for an answer in vain, connected to the
//! discard address, and datagram sockets connected to the virtual address itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    path::{Path, PathBuf},
};

use aya::maps::{HashMap, Map, MapData};
use sheave_ebpf::{
    addr::Addr,
    discard, maps, proto,
    socket::{Peer, PeerKey},
};

use crate::datapath::{
    Result, Stale,
    host::netns,
    tables::{pinned, pins::Pins, words},
};

const BY_FAMILY: u16 = 20;
const DESTROY: u16 = 21;
const HEADER: usize = 16;
/// Request: header, family, protocol, extensions, padding, states, id.
const REQUEST: usize = HEADER + 8 + ID;
/// `inet_diag_sockid`: ports, addresses, interface, cookie.
const ID: usize = 48;
/// In an `inet_diag_msg` four bytes come before the id.
const ID_AT: usize = HEADER + 4;

type Id = [u8; ID];

/// TCP's state while a connection is being made, as a bit.
const SYN_SENT: u32 = 1 << 2;
/// And while a socket waits for connections.
const LISTEN: u32 = 1 << 10;
const EVERY_STATE: u32 = u32::MAX;

/// What a round of closing did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Closed {
    /// Sockets that were closed.
    pub sockets: usize,
    /// Network namespaces that could not be looked into.
    pub unreachable: usize,
}

/// Closes sockets of removed backends.
pub struct Closer {
    peers: HashMap<MapData, PeerKey, Peer>,
    /// Root of the cgroups whose sockets are translated.
    cgroup_root: PathBuf,
    /// TCP too; only where the programs were told to enter TCP sockets in `PEERS`.
    tcp: bool,
    /// Of pods' sockets none is translated: what they send is, packet by packet.
    host_only: bool,
}

/// What to look for.
#[derive(Default)]
struct Wanted {
    /// Protocol, address and port → the services that no longer lead there.
    backends: BTreeMap<(u8, Addr, u16), BTreeSet<u32>>,
    /// Protocol, address and port → the service that has it now, and whether it was dropped silently under that one
    /// too.
    frontends: BTreeMap<(u8, Addr, u16), (u32, bool)>,
}

impl Closer {
    /// Over the pinned peer table.
    ///
    /// # Errors
    /// When it cannot be opened.
    pub fn open(pins: &Pins, cgroup_root: &Path, tcp: bool, host_only: bool) -> Result<Self> {
        let peers = pinned::open(pins, maps::PEERS, Map::LruHashMap)?;
        Ok(Self { peers, cgroup_root: cgroup_root.to_owned(), tcp, host_only })
    }

    /// Closes the sockets that are meant, wherever they live.
    pub fn close(&mut self, stale: &[Stale]) -> Closed {
        let wanted = Wanted::new(stale, self.tcp);
        let protocols = wanted.protocols();
        let mut closed = Closed::default();
        if protocols.is_empty() {
            return closed;
        }
        // A program that chose the backend just before it left may be about to enter its socket.
        words::grace_period();
        // Sockets that no entry tells apart are ours only where our processes live: another agent may share this host.
        // In a container that cannot be told, and none but this node's namespaces were given to it.
        let ours = match wanted.frontends.is_empty() {
            true => None,
            false if self.host_only => Some(netns::own().into_iter().collect()),
            false => netns::of_cgroup(&self.cgroup_root),
        };
        for namespace in netns::all() {
            let (peers, wanted) = (&self.peers, &wanted);
            let close = |namespace: &File| {
                let is_ours =
                    ours.as_ref().is_none_or(|ours| netns::id(namespace).is_some_and(|id| ours.contains(&id)));
                netns::within(namespace, || {
                    let peer = |key: &PeerKey| peers.get(key, 0).ok();
                    let mut count = 0;
                    for (proto, states) in &protocols {
                        for family in [libc::AF_INET, libc::AF_INET6] {
                            count += close_here(*proto, family, *states, |key| wanted.names(key, peer, is_ours))?;
                        }
                    }
                    io::Result::Ok(count)
                })?
            };
            match namespace.and_then(|namespace| close(&namespace)) {
                Ok(count) => closed.sockets += count,
                Err(error) => {
                    tracing::debug!(%error, "cannot close sockets in a network namespace");
                    closed.unreachable += 1;
                }
            }
        }
        closed
    }
}

impl Wanted {
    fn new(stale: &[Stale], tcp: bool) -> Self {
        let mut wanted = Self::default();
        for stale in stale {
            match *stale {
                Stale::Backend { service, addr, port, proto } => {
                    if proto == proto::UDP || (tcp && proto == proto::TCP) {
                        wanted.backends.entry((proto, addr, port)).or_default().insert(service);
                    }
                }
                Stale::Frontend { service, was_silent, addr, port, proto } => {
                    let entry = wanted.frontends.entry((proto, addr, port)).or_insert((service, was_silent));
                    let same = entry.0 == service;
                    *entry = (service, was_silent || (same && entry.1));
                }
            }
        }
        wanted
    }

    /// The protocols, and in which states of theirs such sockets can be.
    fn protocols(&self) -> BTreeMap<u8, u32> {
        let mut protocols = BTreeMap::new();
        for (proto, ..) in self.frontends.keys() {
            // A TCP socket that met silence waits for an answer; most others need not even be listed.
            protocols.insert(*proto, if *proto == proto::TCP { SYN_SENT } else { EVERY_STATE });
        }
        protocols.extend(self.backends.keys().map(|(proto, ..)| (*proto, EVERY_STATE)));
        protocols
    }

    /// Whether a socket is meant. `peer` says what it dialled to get where it is connected to; `is_ours` whether it
    /// would have been translated, had there been a Service.
    fn names(&self, key: &PeerKey, peer: impl Fn(&PeerKey) -> Option<Peer>, is_ours: bool) -> bool {
        let left = self.backends.get(&(key.proto, key.addr, key.port));
        let (is_silent, is_udp) = (is_discard(&key.addr), key.proto == proto::UDP);
        if left.is_none() && !is_silent && (!is_udp || self.frontends.is_empty()) {
            return false; // most sockets: no look into the map
        }
        let Some(peer) = peer(key) else {
            return is_ours && is_udp && self.frontends.contains_key(&(key.proto, key.addr, key.port));
        };
        let owner = self.frontends.get(&(key.proto, peer.addr, peer.port));
        left.is_some_and(|services| services.contains(&peer.service))
            || owner.is_some_and(|(owner, was_silent)| {
                let is_anothers = *owner != peer.service;
                if is_silent { *was_silent || is_anothers } else { is_udp && is_anothers }
            })
    }
}

fn is_discard(addr: &Addr) -> bool {
    *addr == Addr::from(IpAddr::from(discard::V4)) || *addr == Addr::from(IpAddr::from(discard::V6))
}

/// Closes the sockets of one protocol and family in this thread's network namespace that `is_wanted` names.
fn close_here(proto: u8, family: i32, states: u32, is_wanted: impl Fn(&PeerKey) -> bool) -> io::Result<usize> {
    let mut closed = 0;
    for id in list(proto, family, states)? {
        if !is_wanted(&peer_key(&id, proto, family)) {
            continue;
        }
        let socket = open()?;
        let request = Request { kind: DESTROY, flags: libc::NLM_F_ACK, family, proto, states: EVERY_STATE, id: &id };
        send(&socket, &request)?;
        let mut buffer = [0; 512];
        let answer = receive(&socket, &mut buffer)?;
        match error_of(answer) {
            Some(0) => closed += 1,
            Some(libc::ENOENT) => {} // closed meanwhile
            Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
            None => return Err(io::ErrorKind::InvalidData.into()),
        }
    }
    Ok(closed)
}

/// Where TCP connections to this thread's network namespace are accepted.
///
/// # Errors
/// When the kernel cannot list sockets.
pub fn listening() -> io::Result<Vec<SocketAddr>> {
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        for id in list(proto::TCP, family, LISTEN)? {
            let port = u16::from_be_bytes([id[0], id[1]]);
            found.push(SocketAddr::new(address(&id, SOURCE, family).into(), port));
        }
    }
    Ok(found)
}

fn peer_key(id: &Id, proto: u8, family: i32) -> PeerKey {
    let cookie = u64::from(word(id, 44)) << 32 | u64::from(word(id, 40));
    let addr = address(id, DESTINATION, family);
    PeerKey { cookie, addr, port: u16::from_ne_bytes([id[2], id[3]]), proto, zero: 0, zero2: 0 }
}

/// An id is: source port, destination port, source, destination, interface, cookie (low half first).
const SOURCE: usize = 4;
const DESTINATION: usize = 20;

fn word(id: &Id, at: usize) -> u32 {
    u32::from_ne_bytes([id[at], id[at + 1], id[at + 2], id[at + 3]])
}

fn address(id: &Id, at: usize, family: i32) -> Addr {
    if family == libc::AF_INET {
        return Addr::v4(word(id, at));
    }
    Addr { words: [at, at + 4, at + 8, at + 12].map(|at| word(id, at)) }
}

fn open() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
    // SAFETY: a plain system call; a descriptor that it returns is ours.
    unsafe {
        let fd = libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_SOCK_DIAG);
        if fd < 0 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// An `inet_diag_req_v2`.
struct Request<'a> {
    kind: u16,
    flags: i32,
    family: i32,
    proto: u8,
    /// One bit each.
    states: u32,
    id: &'a Id,
}

fn send(socket: &OwnedFd, request: &Request<'_>) -> io::Result<()> {
    let Request { kind, flags, family, proto, states, id } = *request;
    let mut message = Vec::with_capacity(REQUEST);
    message.extend((REQUEST as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    message.extend([1, 0, 0, 0, 0, 0, 0, 0]); // sequence number, port
    message.extend([family as u8, proto, 0, 0]);
    message.extend(states.to_ne_bytes());
    message.extend(id);
    // SAFETY: the message lives across the call.
    let sent = unsafe { libc::send(socket.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
    if sent == REQUEST as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
    let length = uninterrupted(|| {
        // SAFETY: the buffer lives across the call.
        let received = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    })?;
    buffer.get(..length).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Tries an interrupted call again, a few times.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    const TRIES: usize = 10;
    for _ in 1..TRIES {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
    call()
}

/// The errno of an NLMSG_ERROR; 0 is an acknowledgement.
fn error_of(message: &[u8]) -> Option<i32> {
    let bytes = message.get(HEADER..HEADER + 4)?;
    Some(-i32::from_ne_bytes(bytes.try_into().ok()?))
}

/// The ids of the sockets of one protocol and family in those states.
fn list(proto: u8, family: i32, states: u32) -> io::Result<Vec<Id>> {
    let socket = open()?;
    let request = Request { kind: BY_FAMILY, flags: libc::NLM_F_DUMP, family, proto, states, id: &[0; ID] };
    send(&socket, &request)?;
    let (mut found, mut buffer) = (Vec::new(), vec![0; 32 << 10]);
    loop {
        let mut rest = receive(&socket, &mut buffer)?;
        while let Some(header) = rest.get(..HEADER) {
            let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
            match i32::from(u16::from_ne_bytes([header[4], header[5]])) {
                libc::NLMSG_DONE => return Ok(found),
                libc::NLMSG_ERROR => {
                    return Err(io::Error::from_raw_os_error(error_of(rest).unwrap_or(libc::EIO)));
                }
                _ => found.extend(rest.get(ID_AT..ID_AT + ID).and_then(|id| Id::try_from(id).ok())),
            }
            rest = rest.get(length.max(HEADER).next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{EVERY_STATE, close_here, listening, uninterrupted};
    use sheave_ebpf::{addr::Addr, proto};
    use std::{
        io::ErrorKind,
        net::{IpAddr, TcpListener, UdpSocket},
    };

    #[test]
    fn an_interrupted_listing_is_tried_again() {
        for (id, interrupts, ends, expected) in [
            ("K04 not interrupted", 0, Ok(7), Ok(7)),
            ("K04 a few times", 9, Ok(7), Ok(7)),
            ("K04 for ever", usize::MAX, Ok(7), Err(ErrorKind::Interrupted)),
            ("K04 any other error", 0, Err(ErrorKind::PermissionDenied), Err(ErrorKind::PermissionDenied)),
        ] {
            let mut left = interrupts;
            let result = uninterrupted(|| {
                if left == 0 {
                    return ends.map_err(Into::into);
                }
                left -= 1;
                Err(ErrorKind::Interrupted.into())
            });
            assert_eq!(result.map_err(|error| error.kind()), expected, "{id}");
        }
    }

    #[test]
    fn listeners_are_known_by_their_addresses() {
        for bind in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0"] {
            let listener = TcpListener::bind(bind).unwrap();
            let at = listener.local_addr().unwrap();
            assert!(listening().unwrap().contains(&at), "{bind}");
            drop(listener);
            assert!(!listening().unwrap().contains(&at), "{bind}, closed");
        }
    }

    /// Needs CAP_NET_ADMIN, as every test that closes foreign sockets does.
    #[test]
    fn a_connected_udp_socket_is_told_that_its_peer_is_gone() {
        for (bind, family) in [("127.0.0.1:0", libc::AF_INET), ("[::]:0", libc::AF_INET6)] {
            let server = UdpSocket::bind("127.0.0.1:0").unwrap();
            let peer = server.local_addr().unwrap();
            let client = UdpSocket::bind(bind).unwrap();
            match family {
                libc::AF_INET6 => client.connect(("::ffff:127.0.0.1", peer.port())).unwrap(),
                _ => client.connect(peer).unwrap(),
            }
            let addr = Addr::from(IpAddr::from([127, 0, 0, 1]));
            let wanted = |k: &super::PeerKey| k.addr == addr && k.port == peer.port().to_be() && k.cookie != 0;
            assert_eq!(close_here(proto::UDP, family, EVERY_STATE, wanted).unwrap(), 1, "{bind}");
            assert_eq!(client.recv(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionAborted, "{bind}");
            assert_eq!(close_here(proto::UDP, family, EVERY_STATE, wanted).unwrap(), 0, "{bind}");
        }
    }
}
