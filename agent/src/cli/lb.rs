//! `sheave lb`: what the kernel does, read from the pinned maps. Works while the agent is down.

use std::{collections::BTreeSet, net::IpAddr, thread::sleep, time::Duration};

use clap::{Args, Subcommand};
use ipnet::IpNet;
use serde::Serialize;

use super::{
    block_on,
    host::HostArgs,
    list::{FormatArgs, Listing, NamespaceArgs, Presence, Printer},
    selector::Selector,
};
use crate::{
    api::{
        Filter,
        client::{Client, Watched as _},
    },
    conntrack::FlowView,
    datapath::{self, tables::clock},
    lb::{
        self,
        clients::{self, AffinityView, SourceRangeView},
    },
    render::{
        Table, clients as client_text, flows,
        lb::{self as text, Lines},
    },
    view::{Items, LbView},
};

/// `sheave lb …`
#[derive(Debug, Subcommand)]
pub enum LbCommand {
    /// List frontends and their backends
    #[command(alias = "ls", after_help = LIST_EXAMPLES)]
    List(ListArgs),
}

const LIST_EXAMPLES: &str = "\
SCOPE says which clients a line is about: those in the cluster (internal), outside it (external), or both. WEIGHT is the
backend's share of the slots that new connections choose from. CONNECTIONS counts sockets on this node.

Examples:
  sheave lb list
  sheave lb list --frontends -o wide
  sheave lb list --backends -n shop --watch
  sheave lb list --conntrack --client 198.51.100.0/24 -o wide
  sheave lb list --affinity -n shop
  sheave lb list -o json | jq '.items[] | select(.verdict != \"forward\")'";

/// Flags of `sheave lb list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// One line per frontend [default: one per frontend and backend]
    #[arg(long)]
    frontends: bool,
    /// One line per backend
    #[arg(long)]
    backends: bool,
    /// Flows of clients outside this node instead, one line per flow
    #[arg(long, group = "instead", conflicts_with_all = ["frontends", "backends"])]
    conntrack: bool,
    /// Clients that session affinity sends where they went before instead, one line per client
    #[arg(long, group = "instead", conflicts_with_all = ["frontends", "backends"])]
    affinity: bool,
    /// Networks of loadBalancerSourceRanges instead, one line per network
    #[arg(long, group = "instead", conflicts_with_all = ["frontends", "backends", "client"])]
    source_ranges: bool,
    /// Only clients in this network, with --conntrack or --affinity; pods and this host are clients without an address
    #[arg(long, value_name = "CIDR", requires = "instead")]
    client: Option<IpNet>,
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// Only Services with these labels, as with `svc list`; needs a running agent, since the kernel knows no labels
    #[arg(short = 'l', long, value_name = "SELECTOR")]
    selector: Option<Selector>,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    host: HostArgs,
}

/// The kernel tells nobody of its changes, so a watch looks again this often.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl LbCommand {
    /// Reads and prints.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::List(args) => args.run(),
        }
    }
}

impl ListArgs {
    fn run(self) -> anyhow::Result<()> {
        let only = self.selected()?;
        let namespace = self.namespace.only().map(str::to_owned);
        let in_namespace = |service: &str, ns: &str| service.strip_prefix(ns).is_some_and(|rest| rest.starts_with('/'));
        let is_meant = move |service: Option<&str>| {
            let service = service.unwrap_or_default();
            namespace.as_ref().is_none_or(|ns| in_namespace(service, ns))
                && only.as_ref().is_none_or(|names| names.contains(service))
        };
        let paths = self.host.paths();
        let comes_from =
            |address: Option<IpAddr>| self.client.is_none_or(|net| address.is_some_and(|ip| net.contains(&ip)));
        if self.conntrack {
            return print(self.format, || {
                let mut items = datapath::open_flows(&paths)?.list()?;
                items.retain(|flow| is_meant(flow.service.as_deref()) && comes_from(Some(flow.client.ip())));
                Ok(FlowList { items })
            });
        }
        if self.affinity {
            return print(self.format, || {
                let mut list = clients::affinity(&*datapath::open_tables(&paths)?, clock::seconds());
                list.items.retain(|view| is_meant(view.port.service.as_deref()) && comes_from(view.address()));
                Ok(list)
            });
        }
        if self.source_ranges {
            return print(self.format, || {
                let mut list = clients::source_ranges(&*datapath::open_tables(&paths)?);
                list.items.retain(|view| is_meant(view.port.service.as_deref()));
                Ok(list)
            });
        }
        let lines = match (self.frontends, self.backends) {
            (true, false) => Lines::Frontends,
            (false, true) => Lines::Backends,
            (false, false) | (true, true) => Lines::Pairs,
        };
        print(self.format, || {
            let mut items = lb::views(&*datapath::open_tables(&paths)?);
            items.items.retain(|view| is_meant(view.service.as_deref()));
            Ok(LbList { items, lines })
        })
    }

    /// "namespace/name" of the Services that the selector means; `None` = all.
    fn selected(&self) -> anyhow::Result<Option<BTreeSet<String>>> {
        let Some(selector) = &self.selector else { return Ok(None) };
        let client = Client { socket: self.host.paths().socket() };
        let services = block_on(client.services(&Filter::default()))?.items.into_iter();
        let meant = services.filter(|s| selector.matches(&s.labels)).map(|s| format!("{}/{}", s.namespace, s.name));
        Ok(Some(meant.collect()))
    }
}

/// Prints a list once, or again and again. The maps are opened for every look, since `sheave cleanup` and the next
/// agent may have put others in their place.
fn print<L: Listing>(format: FormatArgs, list: impl Fn() -> anyhow::Result<L>) -> anyhow::Result<()> {
    let watch = format.watch;
    let mut printer = Printer::new(format);
    let mut presence = Presence::of("the load balancer");
    printer.print(&list()?)?;
    if !watch {
        return Ok(());
    }
    loop {
        sleep(LOOK_AGAIN);
        match list() {
            Ok(list) => {
                presence.here();
                printer.print(&list)?;
            }
            Err(why) => presence.away(&why),
        }
    }
}

/// Flows of the packet path.
#[derive(Serialize)]
struct FlowList {
    items: Vec<FlowView>,
}

impl Listing for FlowList {
    fn table(&self, wide: bool) -> Table {
        flows::table(&self.items, wide)
    }

    fn names(&self) -> String {
        flows::names(&self.items)
    }
}

impl Listing for Items<AffinityView> {
    fn table(&self, wide: bool) -> Table {
        client_text::affinity(&self.items, wide)
    }

    fn names(&self) -> String {
        client_text::affinity_names(&self.items)
    }
}

impl Listing for Items<SourceRangeView> {
    fn table(&self, _wide: bool) -> Table {
        client_text::source_ranges(&self.items)
    }

    fn names(&self) -> String {
        client_text::range_names(&self.items)
    }
}

/// The list, and which lines of it are wanted. JSON and YAML are the same for all of them.
#[derive(Serialize)]
#[serde(transparent)]
struct LbList {
    items: Items<LbView>,
    #[serde(skip)]
    lines: Lines,
}

impl Listing for LbList {
    fn table(&self, wide: bool) -> Table {
        text::table(&self.items, self.lines, wide)
    }

    fn names(&self) -> String {
        text::names(&self.items)
    }
}
