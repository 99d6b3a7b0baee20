//! The real kube-proxy, on a node of the lab.

use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use crate::{api_server::programs, http, node::Node, skip, wait::eventually};

/// From the start of the process until it has synced, on a busy machine.
const START: Duration = Duration::from_secs(60);

/// Where it serves unless told otherwise.
const METRICS: &str = "127.0.0.1:10249";
const HEALTH: &str = "0.0.0.0:10256";

/// A gauge: when that was.
const LAST_SYNC: &str = "kubeproxy_sync_proxy_rules_last_timestamp_seconds{";

/// One program for each back end, which goes by the name it is called with.
const LEGACY: &str = "/usr/sbin/xtables-legacy-multi";

/// A mode of kube-proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// nf_tables, in tables of its own.
    Nftables,
    /// iptables on top of nf_tables.
    Iptables,
    /// iptables as it was before.
    IptablesLegacy,
    /// IPVS.
    Ipvs,
}

/// A kube-proxy; killed when dropped.
#[derive(Debug)]
pub struct KubeProxy {
    child: Child,
    log: PathBuf,
}

/// Whether what it takes to run one in that mode is here; if not, the running test is skipped.
///
/// # Errors
/// When nobody knows where programs are built.
pub fn is_available(mode: Mode) -> Result<bool> {
    let of_mode = match mode {
        Mode::Nftables => ("/usr/sbin/nft", "the program nft is missing (package nftables)"),
        Mode::Iptables => ("/usr/sbin/iptables-nft", "the program iptables-nft is missing (package iptables)"),
        Mode::IptablesLegacy => (LEGACY, "legacy iptables is missing (package iptables)"),
        Mode::Ipvs => ("/proc/net/ip_vs", "this kernel has no IPVS"),
    };
    let always = [
        ("/usr/sbin/nft", "the program nft is missing (package nftables)"),
        ("/usr/sbin/conntrack", "the program conntrack is missing (package conntrack)"),
        ("/usr/sbin/iptables-nft", "the program iptables-nft is missing (package iptables)"),
    ];
    let is_missing = |(path, _): &&(&str, &'static str)| !Path::new(path).exists();
    let missing = if programs()?.join("kube-proxy").exists() {
        always.iter().chain([&of_mode]).find(is_missing).map(|(_, sentence)| *sentence)
    } else {
        Some("kube-proxy is not built: run `cargo xtask kubernetes`")
    };
    if let Some(missing) = missing {
        skip(&format!("{mode:?}: {missing}"));
    }
    Ok(missing.is_none())
}

impl KubeProxy {
    /// Starts one and waits until it has synced.
    ///
    /// # Errors
    /// When it does not get ready; with its log.
    pub fn start(node: &Node, mode: Mode, kubeconfig: &Path) -> Result<Self> {
        Self::start_at(node, mode, kubeconfig, METRICS, HEALTH)
    }

    /// The same with metrics and health at addresses of one's own choice.
    ///
    /// # Errors
    /// When it does not get ready; with its log.
    pub fn start_at(node: &Node, mode: Mode, kubeconfig: &Path, metrics: &str, health: &str) -> Result<Self> {
        let folder = node.paths().run.clone();
        let log = folder.join("kube-proxy.log");
        let out = File::options().create(true).append(true).open(&log)?;
        let mut command = node.host.command(programs()?.join("kube-proxy"))?;
        let name = match mode {
            Mode::Nftables => "nftables",
            Mode::Iptables | Mode::IptablesLegacy => "iptables",
            Mode::Ipvs => "ipvs",
        };
        command.arg(format!("--proxy-mode={name}")).arg("--kubeconfig").arg(kubeconfig);
        command.arg(format!("--hostname-override={}", node.name)).arg("--cluster-cidr=10.244.0.0/16");
        // The limits of the host's conntrack are not the lab's to change.
        command.args(["--conntrack-max-per-core=0", "--conntrack-min=0", "--conntrack-tcp-timeout-established=0s"]);
        command.args(["--conntrack-tcp-timeout-close-wait=0s", "--nodeport-addresses=primary"]);
        command.arg(format!("--metrics-bind-address={metrics}")).arg(format!("--healthz-bind-address={health}"));
        if mode == Mode::IptablesLegacy {
            let path = std::env::var("PATH").unwrap_or_default();
            command.env("PATH", format!("{}:{path}", legacy_programs(&folder)?.display()));
        }
        let child = command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out).spawn()?;
        let proxy = Self { child, log };
        let synced = eventually("kube-proxy has synced", START, || {
            // /healthz is 200 before the first sync, too.
            let page = http::get(&node.host, metrics, "/metrics")?.body;
            let mut lines = page.lines().filter(|line| line.starts_with(LAST_SYNC));
            ensure!(lines.any(|line| !line.ends_with(" 0")), "it has not synced");
            Ok(())
        });
        synced.with_context(|| fs::read_to_string(&proxy.log).unwrap_or_default())?;
        Ok(proxy)
    }

    /// Ends it at once; its rules stay.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn stop(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for KubeProxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder where the usual names mean legacy iptables.
fn legacy_programs(folder: &Path) -> Result<PathBuf> {
    let folder = folder.join("legacy");
    fs::create_dir_all(&folder)?;
    for family in ["iptables", "ip6tables"] {
        for action in ["", "-save", "-restore"] {
            let link = folder.join(format!("{family}{action}"));
            if !link.exists() {
                symlink(LEGACY, link)?;
            }
        }
    }
    Ok(folder)
}
