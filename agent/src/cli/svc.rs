//! `sheave svc`: what the agent wants, asked of the agent.

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};

use super::{
    block_on,
    host::HostArgs,
    list::{FormatArgs, Listing, NamespaceArgs, Output, Presence, Printer},
    selector::Selector,
};
use crate::{
    api::{Filter, client::Client},
    exit,
    render::{self, Table, services},
    view::{Items, ServiceView},
};

/// `sheave svc …`
#[derive(Debug, Subcommand)]
pub enum SvcCommand {
    /// List Services, one line for each address and port they answer on
    #[command(alias = "ls", after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Show one Service with its backends
    #[command(after_help = GET_EXAMPLES)]
    Get(GetArgs),
}

const LIST_EXAMPLES: &str = "\
READY is the number of ready endpoints, out of all in any slice. PROGRAMMED says whether the kernel has exactly this.

Examples:
  sheave svc list
  sheave svc list -n kube-system -l k8s-app=kube-dns -o wide
  sheave svc list -o json | jq '.items[] | select(.frontends[].programmed | not) | .name'
  sheave svc list --watch";

const GET_EXAMPLES: &str = "\
Examples:
  sheave svc get kube-dns
  sheave svc get -n kube-system kube-dns -o yaml
  sheave svc get kube-system/kube-dns";

/// Flags of `sheave svc list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// Only Services with these labels: app=web, app!=web, 'app in (a,b)', 'app notin (a,b)', app, '!app'; comma = and
    #[arg(short = 'l', long, value_name = "SELECTOR", default_value = "", hide_default_value = true)]
    selector: Selector,
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    host: HostArgs,
}

/// Flags of `sheave svc get`.
#[derive(Debug, Args)]
pub struct GetArgs {
    /// NAME, or NAMESPACE/NAME as printed by `svc list -o name`
    name: String,
    /// Its namespace; only needed if several namespaces have a Service of that name
    #[arg(short, long, value_name = "NAMESPACE")]
    namespace: Option<String>,
    /// Output format; table is a page to read
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    host: HostArgs,
}

impl SvcCommand {
    /// Asks and prints.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::List(args) => args.run(),
            Self::Get(args) => args.run(),
        }
    }
}

impl ListArgs {
    fn run(self) -> anyhow::Result<()> {
        let client = Client { socket: self.host.paths().socket() };
        let filter = Filter { namespace: self.namespace.only().map(str::to_owned), name: None };
        let watch = self.format.watch;
        let mut printer = Printer::new(self.format);
        let mut print = |mut services: Items<ServiceView>| {
            services.items.retain(|s| self.selector.matches(&s.labels));
            printer.print(&services)
        };
        block_on(async {
            if watch {
                client.watch_services(&filter, print, &mut Presence::of("the agent")).await
            } else {
                print(client.services(&filter).await?)
            }
        })
    }
}

impl GetArgs {
    fn run(self) -> anyhow::Result<()> {
        let client = Client { socket: self.host.paths().socket() };
        let (namespace, name) = match self.name.split_once('/') {
            Some((namespace, name)) => (Some(namespace.to_owned()), name.to_owned()),
            None => (self.namespace, self.name),
        };
        let filter = Filter { namespace, name: Some(name.clone()) };
        let mut found = block_on(client.services(&filter))?;
        if found.items.len() > 1 {
            let names = services::names(&found);
            bail!("{name:?} is a Service in several namespaces; choose one with -n:\n{}", names.trim_end());
        }
        let service = found.items.pop().with_context(|| match &filter.namespace {
            Some(namespace) => format!("namespace {namespace:?} has no Service {name:?}"),
            None => format!("no namespace has a Service {name:?}"),
        })?;
        let text = match self.output {
            Output::Table | Output::Wide => services::details(&service),
            Output::Json => render::json(&service)?,
            Output::Yaml => render::yaml(&service)?,
            Output::Name => services::names(&Items { items: vec![service] }),
        };
        exit::print(text)
    }
}

impl Listing for Items<ServiceView> {
    fn table(&self, wide: bool) -> Table {
        services::table(self, wide)
    }

    fn names(&self) -> String {
        services::names(self)
    }
}
