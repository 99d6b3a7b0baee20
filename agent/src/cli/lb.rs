//! `sheave lb`: what the kernel does, read from the pinned maps. Works while the agent is down.

use std::{collections::BTreeSet, thread::sleep, time::Duration};

use clap::{Args, Subcommand};
use serde::Serialize;

use super::{
    block_on,
    host::HostArgs,
    list::{FormatArgs, Listing, NamespaceArgs, Printer},
    selector::Selector,
};
use crate::{
    api::{Filter, client::Client},
    datapath, lb,
    render::{
        Table,
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
SCOPE says whose traffic a line decides: that of clients in the cluster (internal), outside it (external), or both.
WEIGHT is a backend's share of the slots that a new connection chooses among. CONNECTIONS counts sockets of this node.

Examples:
  sheave lb list
  sheave lb list --frontends -o wide
  sheave lb list --backends -n shop --watch
  sheave lb list -o json | jq '.items[] | select(.verdict != \"forward\")'";

/// Flags of `sheave lb list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// One line for every frontend [default: one for every frontend and backend]
    #[arg(long)]
    frontends: bool,
    /// One line for every backend
    #[arg(long)]
    backends: bool,
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// Only Services with these labels, as with `svc list`; the agent must run, since the kernel knows no labels
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
        let lines = match (self.frontends, self.backends) {
            (true, false) => Lines::Frontends,
            (false, true) => Lines::Backends,
            (false, false) | (true, true) => Lines::Pairs,
        };
        let watch = self.format.watch;
        let tables = datapath::open_tables(&self.host.paths())?;
        let only = self.selected()?;
        let in_namespace = |service: &str, ns: &str| service.strip_prefix(ns).is_some_and(|rest| rest.starts_with('/'));
        let list = {
            let namespace = self.namespace.only().map(str::to_owned);
            move || {
                let mut items = lb::views(&*tables);
                items.items.retain(|view| {
                    let service = view.service.as_deref().unwrap_or_default();
                    namespace.as_ref().is_none_or(|ns| in_namespace(service, ns))
                        && only.as_ref().is_none_or(|names| names.contains(service))
                });
                LbList { items, lines }
            }
        };
        let mut printer = Printer::new(self.format);
        loop {
            printer.print(&list())?;
            if !watch {
                return Ok(());
            }
            sleep(LOOK_AGAIN);
        }
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
