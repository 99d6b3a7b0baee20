//! `sheave check`.

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
};

use anyhow::bail;
use clap::Args;

use super::{
    host::HostArgs,
    list::Output,
    packets::{SNAT_PORTS, snat_ports},
};
use crate::{
    datapath::programs::{features::Features, probe::Facts},
    exit::{self, Unwell},
    lifecycle::{
        check::{self, Finding, Grade, Plan},
        lock, takeover,
    },
    render,
    view::Items,
};

const EXAMPLES: &str = "\
Changes nothing. The exit code is 1 if something is missing that the agent cannot start without.

Examples:
  sheave check
  sheave check --cgroup-root /run/sheave/cgroupv2 -o json | jq '.items[] | select(.status != \"ok\")'";

/// Flags of `sheave check`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CheckArgs {
    /// Output format; table is a page to read
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Output::Table)]
    output: Output,
    #[command(flatten)]
    host: HostArgs,
    /// Root of the cgroup v2 tree, as given to the agent [default: found in /proc/self/mountinfo]
    #[arg(long, value_name = "DIR", env = "SHEAVE_CGROUP_ROOT", help_heading = "Host")]
    cgroup_root: Option<PathBuf>,
    /// Source ports for masqueraded clients, as given to the agent
    #[arg(long, value_name = "FIRST-LAST", default_value = SNAT_PORTS, value_parser = snat_ports)]
    snat_ports: (u16, u16),
}

impl CheckArgs {
    /// Looks, judges and prints.
    pub fn run(self) -> anyhow::Result<()> {
        let paths = self.host.paths();
        let told = self.cgroup_root.as_deref();
        let plan = Plan { bpffs: &paths.bpffs, cgroup_root: told, snat_ports: Some(self.snat_ports) };
        let mut findings = check::judge(&Facts::gather(told), plan);
        findings.extend(check::features(&Features::foresee().views()));
        findings.push(running(lock::holder(&paths)));
        findings.push(takeover::finding(&paths));
        let missing = findings.iter().any(|f| f.status == Grade::Fail);

        let list = Items { items: findings };
        let colours = render::colours_wanted(io::stdout().is_terminal());
        let text = match self.output {
            Output::Table | Output::Wide => render::check::page(&list, colours),
            Output::Json => render::json(&list)?,
            Output::Yaml => render::yaml(&list)?,
            Output::Name => list.items.iter().map(|f| format!("{}\n", f.name)).collect(),
        };
        exit::print(text)?;
        if missing {
            bail!(Unwell);
        }
        Ok(())
    }
}

fn running(holder: Option<u32>) -> Finding {
    let found = match holder {
        None => "none is running with this run directory".to_owned(),
        Some(0) => "one is running".to_owned(),
        Some(pid) => format!("one is running, pid {pid}"),
    };
    Finding { name: "agent".to_owned(), status: Grade::Ok, found, advice: None }
}
