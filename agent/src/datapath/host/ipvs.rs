//! IPVS, by generic netlink: as much as taking over from kube-proxy needs.

use std::io;

use rtnetlink::sys::protocols::NETLINK_GENERIC;

use crate::datapath::host::netlink::{Message, Netlink, find, string};

/// GENL_ID_CTRL, which knows the families, and its CTRL_CMD_GETFAMILY.
const CONTROL: u16 = 0x10;
const GET_FAMILY: u8 = 3;
/// CTRL_ATTR_FAMILY_ID and CTRL_ATTR_FAMILY_NAME.
const FAMILY_ID: u16 = 1;
const FAMILY_NAME: u16 = 2;
/// IPVS_CMD_GET_SERVICE and IPVS_CMD_FLUSH of `linux/ip_vs.h`.
const GET_SERVICE: u8 = 4;
const FLUSH: u8 = 17;

/// What kube-proxy keeps the addresses of Services on in ipvs mode.
pub const DEVICE: &str = "kube-ipvs0";

/// The virtual servers of this thread's network namespace.
pub struct Ipvs {
    netlink: Netlink,
    family: u16,
}

impl Ipvs {
    /// `None` where the kernel has no IPVS. One that could have it loads it: ask only where it is in use.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn open() -> io::Result<Option<Self>> {
        let netlink = Netlink::open(NETLINK_GENERIC)?;
        let family = match netlink.ask(&message(CONTROL, GET_FAMILY, string(FAMILY_NAME, "IPVS"))) {
            Ok(answer) => {
                find(&answer.attributes, &[FAMILY_ID]).and_then(|id| Some(u16::from_ne_bytes(id.try_into().ok()?)))
            }
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) => return Err(error),
        };
        Ok(Some(Self { netlink, family: family.ok_or(io::ErrorKind::InvalidData)? }))
    }

    /// How many virtual servers there are.
    ///
    /// # Errors
    /// What the kernel says; it asks for CAP_NET_ADMIN.
    pub fn virtual_servers(&self) -> io::Result<usize> {
        self.netlink.dump(&message(self.family, GET_SERVICE, Vec::new())).map(|servers| servers.len())
    }

    /// Removes all of them.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn flush(&self) -> io::Result<()> {
        self.change(FLUSH, Vec::new())
    }

    /// A command that is acknowledged.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn change(&self, command: u8, attributes: Vec<u8>) -> io::Result<()> {
        self.netlink.change(&[], &[message(self.family, command, attributes)], &[])
    }
}

/// `struct genlmsghdr`: command, version.
const fn message(kind: u16, command: u8, attributes: Vec<u8>) -> Message {
    Message { kind, header: [command, 1, 0, 0], attributes }
}
