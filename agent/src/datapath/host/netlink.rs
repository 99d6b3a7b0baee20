//! Messages of netlink whose kinds rtnetlink does not know: netfilter's and IPVS's. Both have four bytes of their own
//! before the attributes.

use std::io;

use nix::sys::socket::{setsockopt, sockopt::SndBufForce};
use rtnetlink::sys::{Socket, SocketAddr};

/// `struct nlmsghdr`.
const HEADER: usize = 16;
/// `struct nfgenmsg` or `struct genlmsghdr`.
const OWN_HEADER: usize = 4;
/// What may be sent at once without asking for more: the usual buffer, of which the kernel takes a little, is larger.
const ROOM: usize = 1 << 16;
/// Attribute types have two flags on top.
const TYPE_MASK: u16 = 0x3fff;
/// One of them: the value is a list of attributes.
pub const NESTED: u16 = 0x8000;

/// A message to the kernel or from it.
#[derive(Clone, Debug)]
pub struct Message {
    /// What it is: of a subsystem or family.
    pub kind: u16,
    /// The family's own header.
    pub header: [u8; OWN_HEADER],
    /// One behind the other.
    pub attributes: Vec<u8>,
}

/// A socket to the kernel of this thread's network namespace.
pub struct Netlink {
    socket: Socket,
}

impl Netlink {
    /// # Errors
    /// When the kernel has no such protocol.
    pub fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket })
    }

    /// All that there is of a kind.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn dump(&self, request: &Message) -> io::Result<Vec<Message>> {
        self.send(&bytes(request, libc::NLM_F_DUMP))?;
        let mut found = Vec::new();
        loop {
            let (data, _) = self.socket.recv_from_full()?;
            for (kind, body) in messages(&data) {
                if i32::from(kind) == libc::NLMSG_DONE {
                    return Ok(found);
                }
                if let Some(errno) = errno(kind, body) {
                    return Err(io::Error::from_raw_os_error(errno));
                }
                found.extend(message(kind, body));
            }
        }
    }

    /// The one answer to a question.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn ask(&self, request: &Message) -> io::Result<Message> {
        self.send(&bytes(request, 0))?;
        let (data, _) = self.socket.recv_from_full()?;
        let (kind, body) = messages(&data).next().ok_or(io::ErrorKind::InvalidData)?;
        match errno(kind, body) {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => message(kind, body).ok_or_else(|| io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends steps in one go, between messages that go with them, and waits until they are done. Only the last step is
    /// acknowledged: thousands of answers, which the kernel gives at once, would not fit into the socket.
    ///
    /// # Errors
    /// What the kernel says about the first step that it refuses.
    pub fn change(&self, before: &[Message], steps: &[Message], after: &[Message]) -> io::Result<()> {
        let Some((last, steps)) = steps.split_last() else { return Ok(()) };
        let plain = |list: &[Message]| list.iter().flat_map(|message| bytes(message, 0)).collect::<Vec<_>>();
        self.send(&[plain(before), plain(steps), bytes(last, libc::NLM_F_ACK), plain(after)].concat())?;
        loop {
            let data = match self.socket.recv_from_full() {
                Ok((data, _)) => data,
                // Refusals come without being asked for; there were more than fit, and the first waits to be read.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => continue,
                Err(error) => return Err(error),
            };
            match messages(&data).find_map(|(kind, body)| errno(kind, body)) {
                Some(0) => return Ok(()),
                Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
                None => {}
            }
        }
    }

    fn send(&self, data: &[u8]) -> io::Result<()> {
        if data.len() > ROOM {
            setsockopt(&self.socket, SndBufForce, &data.len())?;
        }
        self.socket.send(data, 0).map(drop)
    }
}

fn bytes(message: &Message, flags: i32) -> Vec<u8> {
    let length = HEADER + OWN_HEADER + message.attributes.len();
    let mut bytes = Vec::with_capacity(length);
    bytes.extend((length as u32).to_ne_bytes());
    bytes.extend(message.kind.to_ne_bytes());
    bytes.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    bytes.extend([0; 8]); // sequence number, port
    bytes.extend(message.header);
    bytes.extend(&message.attributes);
    bytes
}

/// The messages in what was received: kind and body.
fn messages(mut data: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = data.get(..HEADER)?;
        let length = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let message = (u16::from_ne_bytes([header[4], header[5]]), data.get(HEADER..length)?);
        data = data.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    })
}

fn message(kind: u16, body: &[u8]) -> Option<Message> {
    let (header, attributes) = body.split_first_chunk()?;
    Some(Message { kind, header: *header, attributes: attributes.to_owned() })
}

/// The errno of an NLMSG_ERROR; 0 is an acknowledgement.
fn errno(kind: u16, body: &[u8]) -> Option<i32> {
    let code = body.first_chunk::<4>().filter(|_| i32::from(kind) == libc::NLMSG_ERROR)?;
    Some(-i32::from_ne_bytes(*code))
}

/// An attribute, padded.
#[must_use]
pub fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = 4 + value.len();
    let mut bytes = Vec::with_capacity(length.next_multiple_of(4));
    bytes.extend((length as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

/// An attribute that is text.
#[must_use]
pub fn string(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

/// The attributes in a list: type and value.
pub fn attributes(mut list: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = list.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let found = (u16::from_ne_bytes([header[2], header[3]]) & TYPE_MASK, list.get(4..length)?);
        list = list.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(found)
    })
}

/// What stands at the end of a path of types.
#[must_use]
pub fn find<'a>(list: &'a [u8], path: &[u16]) -> Option<&'a [u8]> {
    path.iter().try_fold(list, |list, wanted| attributes(list).find(|(kind, _)| kind == wanted).map(|(_, value)| value))
}

/// The text of an attribute.
#[must_use]
pub fn text(list: &[u8], kind: u16) -> Option<String> {
    let bytes = find(list, &[kind])?;
    Some(String::from_utf8_lossy(bytes.strip_suffix(&[0]).unwrap_or(bytes)).into_owned())
}
