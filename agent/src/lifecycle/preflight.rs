//! Before the agent starts: can this host run it, and is no other agent running here? If not, nothing is changed.

use std::path::PathBuf;

use crate::{
    datapath::programs::probe::{Facts, find_cgroup_root},
    exit::Refused,
    lifecycle::{
        check::{self, Grade, Plan},
        lock::Locks,
        traces::Traces,
    },
    options::{AgentOptions, SourceOptions},
};

/// A host that can run the agent, and is now ours.
#[derive(Debug)]
pub struct Ready {
    /// Where to attach.
    pub cgroup_root: PathBuf,
    /// What could be better, one sentence each, for the log.
    pub warnings: Vec<String>,
    /// To be kept once the agent runs.
    pub traces: Traces,
    /// Keep them for as long as the agent runs.
    pub locks: Locks,
}

/// Checks what the agent cannot do without, then locks the run directory, the cgroup and the pins.
///
/// # Errors
///
/// One sentence that says what is missing and what to do.
pub fn preflight(options: &AgentOptions) -> Result<Ready, Refused> {
    if let SourceOptions::Manifests(directory) = &options.source
        && !directory.is_dir()
    {
        return Err(Refused(format!("--manifests: {} is not a directory", directory.display())));
    }
    let told = options.cgroup_root.as_deref();
    let facts = Facts::gather(told);
    let mut warnings = Vec::new();
    let snat_ports = options.packets.enabled.then_some(options.packets.switches.snat_ports);
    for finding in check::judge(&facts, Plan { bpffs: &options.paths.bpffs, cgroup_root: told, snat_ports }) {
        let sentence = format!("{}: {}; {}", finding.name, finding.found, finding.advice.unwrap_or_default());
        match finding.status {
            Grade::Ok => {}
            Grade::Warn => warnings.push(sentence),
            Grade::Fail => return Err(Refused(sentence)),
        }
    }
    let found = options.cgroup_root.clone().or_else(|| find_cgroup_root(&facts.mounts));
    let cgroup_root =
        found.ok_or_else(|| Refused("no cgroup v2 root was found; name it with --cgroup-root".to_owned()))?;
    let mut traces = Traces::before(&options.paths);
    // Whoever is refused here has made directories at most: what else has come meanwhile is the other agent's.
    let locks = Locks::take(&options.paths, &cgroup_root).inspect_err(|_| traces.keep_used())?;
    traces.look_at_pins();
    Ok(Ready { cgroup_root, warnings, traces, locks })
}
