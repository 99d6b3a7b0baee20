//! Taking over from kube-proxy: what it left on this node, and how that goes.
//!
//! nf_tables are read and changed by netlink: kube-proxy's own tables (nftables mode) and its chains in the tables that
//! `iptables-nft` keeps there. Legacy iptables is changed by its programs. Connections that kube-proxy has translated live
//! in the kernel's conntrack and outlive its rules; entries of UDP flows to backends that serve no more would do so
//! forever, and go.

mod legacy;
mod rules;
pub mod running;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use anyhow::{Context as _, Result};
use sheave_ebpf::proto;

use crate::{
    datapath::{
        self,
        host::{
            ipvs::{self, Ipvs},
            netfilter::{self, Entry, Netfilter, Step},
        },
    },
    lb::ReadTables,
    lifecycle::check::{Finding, Grade},
    options::HostPaths,
};
use rules::{Removal, Rule, Table, judge};

/// kube-proxy's table in nftables mode.
const OWN_TABLE: &str = "kube-proxy";
/// The tables of `iptables-nft` that it has chains in.
const SHARED_TABLES: [&str; 3] = ["filter", "mangle", "nat"];

/// Said where rules are left and [`running::may_hide`].
pub const MAY_HIDE: &str = "whether it still runs cannot be told from here: both of its ports are taken, and a pod sees \
                            no process of the host";

/// What kube-proxy left.
#[derive(Debug, Default)]
pub struct Leftovers {
    /// Families whose table `kube-proxy` is there.
    own_tables: Vec<(u8, &'static str)>,
    shared: Vec<Shared>,
    legacy: Vec<(legacy::Family, BTreeMap<String, Removal<String>>)>,
    /// The device, and how many virtual servers there are beside it.
    ipvs: Option<usize>,
    /// Entries of UDP flows to backends that serve no more.
    stale: Vec<Entry>,
    /// What could not be looked at, a sentence each.
    unknown: Vec<String>,
}

/// Chains in a table of `iptables-nft`.
#[derive(Debug)]
struct Shared {
    family: (u8, &'static str),
    table: &'static str,
    removal: Removal<u64>,
}

impl Leftovers {
    /// Looks at everything that any mode of kube-proxy makes.
    ///
    /// # Errors
    /// When netfilter cannot be read at all.
    pub fn find(paths: &HostPaths) -> Result<Self> {
        let netfilter = Netfilter::open().context("cannot open netfilter's netlink socket")?;
        let mut found = Self::default();
        if datapath::remove_device(ipvs::DEVICE, true)? {
            let ipvs = Ipvs::open().context("cannot ask for IPVS")?;
            let servers = ipvs.map(|ipvs| ipvs.virtual_servers()).transpose();
            found.ipvs = Some(servers.context("cannot list IPVS's virtual servers")?.unwrap_or_default());
        }
        for family in netfilter::FAMILIES {
            let tables = netfilter.tables(family.0).context("cannot list the tables of nf_tables")?;
            if tables.iter().any(|table| table == OWN_TABLE) {
                found.own_tables.push(family);
            }
            for table in SHARED_TABLES.into_iter().filter(|shared| tables.iter().any(|table| table == shared)) {
                let removal = judge(&read(&netfilter, family.0, table)?);
                if !removal.is_empty() || !removal.kept.is_empty() {
                    found.shared.push(Shared { family, table, removal });
                }
            }
        }
        for family in legacy::FAMILIES.into_iter().filter(|family| family.is_in_use()) {
            match family.find() {
                Ok(tables) if tables.is_empty() => {}
                Ok(tables) => found.legacy.push((family, tables)),
                Err(error) => found.unknown.push(format!("{error:#}")),
            }
        }
        // Without tables of ours nobody knows which backends serve.
        if let Ok(tables) = datapath::open_tables(paths) {
            let serving = Serving::read(&*tables);
            for (family, _) in netfilter::FAMILIES {
                // A kernel without conntrack has no entries.
                let entries = netfilter.entries(family).unwrap_or_default();
                found.stale.extend(entries.into_iter().filter(|entry| serving.is_stale(entry)));
            }
        }
        Ok(found)
    }

    /// A line for each thing that is there.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let chains = |name: String, jumps: usize, chains: usize| {
            (jumps + chains > 0).then(|| format!("{chains} chains of {name} and {jumps} jumps to them"))
        };
        let own = self.own_tables.iter().map(|(_, family)| format!("table {family} {OWN_TABLE} of nf_tables"));
        let shared = self.shared.iter().filter_map(|Shared { family, table, removal }| {
            chains(format!("table {} {table}", family.1), removal.jumps.len(), removal.chains.len())
        });
        let legacy = self.legacy.iter().flat_map(|(_, tables)| tables).filter_map(|(table, removal)| {
            chains(format!("legacy table {table}"), removal.jumps.len(), removal.chains.len())
        });
        let ipvs = self.ipvs.iter().flat_map(|servers| {
            let servers = (*servers > 0).then(|| format!("every virtual server of IPVS ({servers})"));
            std::iter::once(format!("device {}", ipvs::DEVICE)).chain(servers)
        });
        let stale = (!self.stale.is_empty())
            .then(|| format!("{} conntrack entries of UDP flows to backends that serve no more", self.stale.len()));
        own.chain(shared).chain(legacy).chain(ipvs).chain(stale).collect()
    }

    /// What stays although kube-proxy made it, and why; and what could not be looked at.
    #[must_use]
    pub fn remarks(&self) -> Vec<String> {
        let shared = self.shared.iter().map(|shared| &shared.removal.kept);
        let kept: BTreeSet<_> = shared
            .chain(self.legacy.iter().flat_map(|(_, tables)| tables.values()).map(|removal| &removal.kept))
            .flatten()
            .collect();
        let mut remarks = self.unknown.clone();
        if !kept.is_empty() {
            let kept: Vec<_> = kept.into_iter().map(String::as_str).collect();
            remarks.push(format!("{} stay: rules of somebody else jump to them", kept.join(", ")));
        }
        remarks
    }

    /// Whether everything could be looked at; [`Self::remarks`] say what could not.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.unknown.is_empty()
    }

    /// Removes everything; each table in one step.
    ///
    /// # Errors
    /// What was refused; what was removed before stays removed, and it may be run again.
    pub fn remove(&self) -> Result<()> {
        let netfilter = Netfilter::open()?;
        for (family, name) in &self.own_tables {
            netfilter
                .change(*family, OWN_TABLE, &[Step::Table])
                .with_context(|| format!("cannot remove table {name} {OWN_TABLE}"))?;
        }
        for Shared { family, table, removal } in &self.shared {
            let jumps = removal.jumps.iter().map(|Rule { chain, id, .. }| Step::Rule(chain, *id));
            let empty = removal.chains.iter().map(|chain| Step::Empty(chain));
            let delete = removal.chains.iter().map(|chain| Step::Chain(chain));
            let steps: Vec<_> = jumps.chain(empty).chain(delete).collect();
            netfilter
                .change(family.0, table, &steps)
                .with_context(|| format!("cannot remove chains of table {} {table}", family.1))?;
        }
        for (family, removals) in &self.legacy {
            family.remove(removals)?;
        }
        if let Some(servers) = self.ipvs {
            // No owner is written on them. Where it ran, kube-proxy removed others' as well, and so does its --cleanup.
            if servers > 0
                && let Some(ipvs) = Ipvs::open()?
            {
                ipvs.flush().context("cannot remove IPVS's virtual servers")?;
            }
            datapath::remove_device(ipvs::DEVICE, false)?;
        }
        for entry in &self.stale {
            netfilter.delete(entry).context("cannot delete a conntrack entry")?;
        }
        Ok(())
    }
}

fn read(netfilter: &Netfilter, family: u8, table: &str) -> Result<Table<u64>> {
    let context = || format!("cannot read table {table} of nf_tables");
    let chains = netfilter.chains(family, table).with_context(context)?;
    let rules = netfilter.rules(family, table).with_context(context)?;
    let rules = rules.into_iter().map(|rule| Rule { chain: rule.chain, target: rule.target, id: rule.handle });
    Ok(Table { chains: chains.into_iter().collect(), rules: rules.collect() })
}

/// Where UDP is answered, and by whom.
#[derive(Debug, Default)]
struct Serving {
    /// Address and port of a frontend → service id.
    frontends: BTreeMap<(IpAddr, u16), u32>,
    /// Service id, address and port.
    backends: BTreeSet<(u32, IpAddr, u16)>,
}

impl Serving {
    fn read(tables: &dyn ReadTables) -> Self {
        let is_udp = |proto: u8| proto == proto::UDP;
        let frontends = tables.frontends().into_iter().filter(|(key, _)| is_udp(key.proto));
        let backends = tables.backends().into_iter().filter(|backend| is_udp(backend.proto));
        Self {
            frontends: frontends
                .map(|(key, f)| ((IpAddr::from(key.addr), u16::from_be(key.port)), f.service))
                .collect(),
            backends: backends.map(|b| (b.service, IpAddr::from(b.addr), u16::from_be(b.port))).collect(),
        }
    }

    /// Whether an entry leads from a frontend to what is none of its backends.
    fn is_stale(&self, entry: &Entry) -> bool {
        let service = self.frontends.get(&entry.destination).filter(|_| entry.protocol == proto::UDP);
        let (address, port) = entry.answers_from;
        service.is_some_and(|service| {
            entry.destination != entry.answers_from && !self.backends.contains(&(*service, address, port))
        })
    }
}

/// What `sheave check` says.
#[must_use]
pub fn finding(paths: &HostPaths) -> Finding {
    const NAME: &str = "kube-proxy";
    const ADVICE: &str = "stop kube-proxy, then: sheave cleanup --kube-proxy";
    let warn = |found: String, advice: &str| Finding {
        name: NAME.to_owned(),
        status: Grade::Warn,
        found,
        advice: Some(advice.to_owned()),
    };
    if let Some(running) = running::find() {
        return warn(running.to_string(), "once sheave serves: docs/migrating-from-kube-proxy.md, step 3");
    }
    match Leftovers::find(paths) {
        Err(error) => warn(format!("cannot be looked for: {error:#}"), "run as root"),
        Ok(leftovers) => match (leftovers.lines(), leftovers.remarks()) {
            (lines, remarks) if lines.is_empty() && remarks.is_empty() => {
                Finding { name: NAME.to_owned(), status: Grade::Ok, found: "not a trace".to_owned(), advice: None }
            }
            (lines, remarks) if lines.is_empty() => warn("no more than this".to_owned(), &remarks.join("; ")),
            (lines, remarks) => {
                let hides = running::may_hide().then(|| MAY_HIDE.to_owned());
                let left = [format!("left {}", lines.join(", "))];
                warn(left.into_iter().chain(hides).chain(remarks).collect::<Vec<_>>().join("; "), ADVICE)
            }
        },
    }
}
