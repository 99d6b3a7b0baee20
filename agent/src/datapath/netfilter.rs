//! nfnetlink: as much of nf_tables and of the kernel's conntrack as taking over from kube-proxy needs.

use std::{io, net::IpAddr};

use rtnetlink::sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};

/// A kind of message: subsystem and number, of `linux/netfilter`.
const fn kind(subsystem: u16, number: u16) -> u16 {
    subsystem << 8 | number
}
const NF_TABLES: u16 = 10;
const CONNTRACK: u16 = 1;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

const HEADER: usize = 16;
/// `struct nfgenmsg`: family, version, resource.
const GENERIC: usize = 4;
/// Attribute types have two flags on top.
const TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;

/// A message to the kernel or from it: what it is, which family, and its attributes.
#[derive(Clone, Debug)]
struct Message {
    kind: u16,
    family: u8,
    attributes: Vec<u8>,
}

/// A family of nf_tables or conntrack, as `AF_INET` and `AF_INET6`.
pub const FAMILIES: [(u8, &str); 2] = [(2, "ip"), (10, "ip6")];

/// A socket to netfilter of this thread's network namespace.
pub struct Netfilter {
    socket: Socket,
}

/// A rule of nf_tables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NftRule {
    /// Where it stands.
    pub chain: String,
    /// What names it.
    pub handle: u64,
    /// The chain that it jumps or goes to.
    pub target: Option<String>,
}

/// One step of a change.
#[derive(Clone, Debug)]
pub enum Step<'a> {
    /// Delete a table with all that is in it.
    Table,
    /// Delete a rule.
    Rule(&'a str, u64),
    /// Delete all rules of a chain.
    Empty(&'a str),
    /// Delete a chain, which has to be empty.
    Chain(&'a str),
}

/// An entry of the kernel's conntrack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// `AF_INET` or `AF_INET6`.
    family: u8,
    /// IANA protocol number.
    pub protocol: u8,
    /// Where its packets were sent to; port in host order.
    pub destination: (IpAddr, u16),
    /// Where its answers come from; port in host order.
    pub answers_from: (IpAddr, u16),
    /// What deletes it: its tuple and its zone, as the kernel told them.
    name: Vec<u8>,
}

impl Netfilter {
    /// # Errors
    /// When netlink cannot be used, or needs CAP_NET_ADMIN.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Self { socket })
    }

    /// Names of the tables of a family.
    ///
    /// # Errors
    /// What the kernel says; a kernel without nf_tables has none.
    pub fn tables(&self, family: u8) -> io::Result<Vec<String>> {
        match self.dump(kind(NF_TABLES, 1), family, &[]) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => Ok(Vec::new()),
            tables => Ok(tables?.iter().filter_map(|table| text(&table.attributes, 1)).collect()),
        }
    }

    /// Names of the chains of a table.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn chains(&self, family: u8, table: &str) -> io::Result<Vec<String>> {
        let all = self.dump(kind(NF_TABLES, 4), family, &[])?;
        let here = all.iter().filter(|chain| text(&chain.attributes, 1).as_deref() == Some(table));
        Ok(here.filter_map(|chain| text(&chain.attributes, 3)).collect())
    }

    /// The rules of a table.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn rules(&self, family: u8, table: &str) -> io::Result<Vec<NftRule>> {
        let all = self.dump(kind(NF_TABLES, 7), family, &string(1, table))?;
        Ok(all.iter().filter_map(|rule| nft_rule(&rule.attributes, table)).collect())
    }

    /// Changes a table: all steps or none.
    ///
    /// # Errors
    /// What the kernel says about the first step that it refuses.
    pub fn change(&self, family: u8, table: &str, steps: &[Step<'_>]) -> io::Result<()> {
        let message = |step: &Step<'_>| {
            let (number, more) = match step {
                Step::Table => (2, Vec::new()),
                Step::Rule(chain, handle) => (8, [string(2, chain), attribute(3, &handle.to_be_bytes())].concat()),
                Step::Empty(chain) => (8, string(2, chain)),
                Step::Chain(chain) => (5, string(3, chain)),
            };
            Message { kind: kind(NF_TABLES, number), family, attributes: [string(1, table), more].concat() }
        };
        let mut batch = bytes(&Message { kind: BATCH_BEGIN, family: 0, attributes: Vec::new() }, 0, NF_TABLES);
        for step in steps {
            batch.extend(bytes(&message(step), libc::NLM_F_ACK, 0));
        }
        batch.extend(bytes(&Message { kind: BATCH_END, family: 0, attributes: Vec::new() }, 0, NF_TABLES));
        self.send(&batch)?;
        let mut acknowledged = 0;
        while acknowledged < steps.len() {
            let (data, _) = self.socket.recv_from_full()?;
            for (kind, body) in messages(&data) {
                match errno(kind, body) {
                    Some(0) => acknowledged += 1,
                    Some(errno) => return Err(io::Error::from_raw_os_error(errno)),
                    None => {}
                }
            }
        }
        Ok(())
    }

    /// The entries of the kernel's conntrack.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn entries(&self, family: u8) -> io::Result<Vec<Entry>> {
        let all = self.dump(kind(CONNTRACK, 1), family, &[])?;
        Ok(all.iter().filter_map(|entry| conntrack_entry(family, &entry.attributes)).collect())
    }

    /// Deletes an entry; one that is gone already is no failure.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn delete(&self, entry: &Entry) -> io::Result<()> {
        let message = Message { kind: kind(CONNTRACK, 2), family: entry.family, attributes: entry.name.clone() };
        self.send(&bytes(&message, libc::NLM_F_ACK, 0))?;
        let (data, _) = self.socket.recv_from_full()?;
        match messages(&data).find_map(|(kind, body)| errno(kind, body)) {
            Some(0 | libc::ENOENT) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn dump(&self, kind: u16, family: u8, attributes: &[u8]) -> io::Result<Vec<Message>> {
        let request = Message { kind, family, attributes: attributes.to_owned() };
        self.send(&bytes(&request, libc::NLM_F_DUMP, 0))?;
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
                if let (Some(family), Some(attributes)) = (body.first(), body.get(GENERIC..)) {
                    found.push(Message { kind, family: *family, attributes: attributes.to_owned() });
                }
            }
        }
    }

    fn send(&self, data: &[u8]) -> io::Result<()> {
        self.socket.send(data, 0).map(drop)
    }
}

fn bytes(message: &Message, flags: i32, resource: u16) -> Vec<u8> {
    let length = HEADER + GENERIC + message.attributes.len();
    let mut bytes = Vec::with_capacity(length);
    bytes.extend((length as u32).to_ne_bytes());
    bytes.extend(message.kind.to_ne_bytes());
    bytes.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    bytes.extend([0; 8]); // sequence number, port
    bytes.extend([message.family, 0]);
    bytes.extend(resource.to_be_bytes());
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

/// The errno of an NLMSG_ERROR; 0 is an acknowledgement.
fn errno(kind: u16, body: &[u8]) -> Option<i32> {
    let code = body.first_chunk::<4>().filter(|_| i32::from(kind) == libc::NLMSG_ERROR)?;
    Some(-i32::from_ne_bytes(*code))
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = 4 + value.len();
    let mut bytes = Vec::with_capacity(length.next_multiple_of(4));
    bytes.extend((length as u16).to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(value);
    bytes.resize(length.next_multiple_of(4), 0);
    bytes
}

fn string(kind: u16, text: &str) -> Vec<u8> {
    attribute(kind, &[text.as_bytes(), &[0]].concat())
}

/// The attributes in a list: type and value.
fn attributes(mut list: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let header = list.first_chunk::<4>()?;
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let found = (u16::from_ne_bytes([header[2], header[3]]) & TYPE_MASK, list.get(4..length)?);
        list = list.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(found)
    })
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// What stands at the end of a path of types.
fn find<'a>(list: &'a [u8], path: &[u16]) -> Option<&'a [u8]> {
    path.iter().try_fold(list, |list, wanted| attributes(list).find(|(kind, _)| kind == wanted).map(|(_, value)| value))
}

fn text(list: &[u8], kind: u16) -> Option<String> {
    let bytes = find(list, &[kind])?;
    Some(String::from_utf8_lossy(bytes.strip_suffix(&[0]).unwrap_or(bytes)).into_owned())
}

/// NFTA_RULE_TABLE 1, _CHAIN 2, _HANDLE 3, _EXPRESSIONS 4; an expression NFTA_LIST_ELEM 1 has NFTA_EXPR_DATA 2, where a
/// verdict is NFTA_IMMEDIATE_DATA 2, NFTA_DATA_VERDICT 2, NFTA_VERDICT_CHAIN 2.
fn nft_rule(rule: &[u8], table: &str) -> Option<NftRule> {
    if text(rule, 1)? != table {
        return None;
    }
    let expressions = attributes(find(rule, &[4]).unwrap_or_default());
    let target = expressions
        .filter(|(_, expression)| text(expression, 1).as_deref() == Some("immediate"))
        .find_map(|(_, expression)| text(find(expression, &[2, 2, 2])?, 2));
    let handle = u64::from_be_bytes(find(rule, &[3])?.try_into().ok()?);
    Some(NftRule { chain: text(rule, 2)?, handle, target })
}

/// CTA_TUPLE_ORIG 1, CTA_TUPLE_REPLY 2, CTA_ZONE 18; in a tuple CTA_TUPLE_IP 1 and CTA_TUPLE_PROTO 2; there the
/// addresses are 1 and 2, or 3 and 4 of IPv6, protocol number and ports 1, 2 and 3.
fn conntrack_entry(family: u8, entry: &[u8]) -> Option<Entry> {
    let (source, destination) = if family == 2 { (1, 2) } else { (3, 4) };
    let end = |tuple: u16, address: u16, port: u16| {
        let port = find(entry, &[tuple, 2, port])?.try_into().ok()?;
        Some((ip(find(entry, &[tuple, 1, address])?)?, u16::from_be_bytes(port)))
    };
    let mut name = attribute(1 | NESTED, find(entry, &[1])?);
    if let Some(zone) = find(entry, &[18]) {
        name.extend(attribute(18, zone));
    }
    Some(Entry {
        family,
        protocol: *find(entry, &[1, 2, 1])?.first()?,
        destination: end(1, destination, 3)?,
        answers_from: end(2, source, 2)?,
        name,
    })
}
