//! nfnetlink: as much of nf_tables and of the kernel's conntrack as taking over from kube-proxy needs.

use std::{io, net::IpAddr};

use rtnetlink::sys::protocols::NETLINK_NETFILTER;

use crate::datapath::host::netlink::{Message, NESTED, Netlink, attribute, attributes, find, string, text};

/// A kind of message: subsystem and number, of `linux/netfilter`.
const fn kind(subsystem: u16, number: u16) -> u16 {
    subsystem << 8 | number
}
const NF_TABLES: u16 = 10;
const CONNTRACK: u16 = 1;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;

/// A family of nf_tables or conntrack, as `AF_INET` and `AF_INET6`.
pub const FAMILIES: [(u8, &str); 2] = [(2, "ip"), (10, "ip6")];

/// A socket to netfilter of this thread's network namespace.
pub struct Netfilter(Netlink);

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
        Netlink::open(NETLINK_NETFILTER).map(Self)
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
        let step = |step: &Step<'_>| {
            let (number, more) = match step {
                Step::Table => (2, Vec::new()),
                Step::Rule(chain, handle) => (8, [string(2, chain), attribute(3, &handle.to_be_bytes())].concat()),
                Step::Empty(chain) => (8, string(2, chain)),
                Step::Chain(chain) => (5, string(3, chain)),
            };
            message(kind(NF_TABLES, number), family, [string(1, table), more].concat())
        };
        let steps = steps.iter().map(step).collect::<Vec<_>>();
        self.0.change(&[edge(BATCH_BEGIN, NF_TABLES)], &steps, &[edge(BATCH_END, NF_TABLES)])
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
        match self.0.change(&[], &[message(kind(CONNTRACK, 2), entry.family, entry.name.clone())], &[]) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            done => done,
        }
    }

    fn dump(&self, kind: u16, family: u8, attributes: &[u8]) -> io::Result<Vec<Message>> {
        self.0.dump(&message(kind, family, attributes.to_owned()))
    }
}

/// `struct nfgenmsg`: family, version, resource.
const fn message(kind: u16, family: u8, attributes: Vec<u8>) -> Message {
    Message { kind, header: [family, 0, 0, 0], attributes }
}

/// Begin or end of a batch of a subsystem, which is the resource.
const fn edge(kind: u16, subsystem: u16) -> Message {
    let [high, low] = subsystem.to_be_bytes();
    Message { kind, header: [0, 0, high, low], attributes: Vec::new() }
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
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
