//! What serves Services: sheave from its chart, or kube-proxy to compare with.

use std::{
    fmt,
    process::{Command, Stdio},
};

use anyhow::Result;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::{
    cgroup,
    images::{Images, KUBE_PROXY},
    lab::{API, Lab, PODS, namespace},
    node::import,
    process::said,
};
use crate::root;

/// Who serves Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Proxy {
    /// sheave from this checkout's Helm chart, with an image built from it
    Sheave,
    /// kube-proxy in its mode of that name
    Nftables,
    /// kube-proxy in its mode of that name
    Iptables,
    /// Nothing
    None,
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sheave => "sheave",
            Self::Nftables => "kube-proxy (nftables)",
            Self::Iptables => "kube-proxy (iptables)",
            Self::None => "nobody",
        })
    }
}

/// Brings the wanted one to every node and takes the others away; returns when it is ready everywhere.
pub fn install(lab: &Lab, images: &Images, proxy: Proxy) -> Result<()> {
    println!("cluster: Services are to be served by {proxy}");
    match proxy {
        Proxy::Sheave => {
            remove_kube_proxy(lab)?;
            install_sheave(lab, images)
        }
        Proxy::Nftables => kube_proxy(lab, "nftables"),
        Proxy::Iptables => kube_proxy(lab, "iptables"),
        Proxy::None => {
            remove_sheave(lab)?;
            remove_kube_proxy(lab)
        }
    }
}

/// From the chart, with the image of this checkout; an installed one is upgraded.
fn install_sheave(lab: &Lab, images: &Images) -> Result<()> {
    let runs = has(lab, "sheave");
    import_sheave(lab, images)?;
    helm(
        lab,
        &[&["upgrade", "--install", "sheave", &chart(), "--reset-values"], words(&values()?).as_slice()].concat(),
    )?;
    if runs {
        // The image's name is the same as before, so nothing else would start it anew.
        lab.said(&["-n", "kube-system", "rollout", "restart", "daemonset/sheave"])?;
    }
    rolled_out(lab, "sheave")
}

/// Brings sheave's image to every node.
pub fn import_sheave(lab: &Lab, images: &Images) -> Result<()> {
    let Some(archive) = &images.sheave else { return Ok(()) };
    lab.numbers().try_for_each(|number| import(lab, number, archive))
}

/// The chart of this checkout.
pub fn chart() -> String {
    root::workspace().join("helm").display().to_string()
}

/// What the chart has to be told here.
pub fn values() -> Result<Vec<String>> {
    Ok(vec![
        format!("apiServer.host={API}"),
        format!("agent.cgroupRoot={}/lab-$(NODE_NAME)", cgroup::unified()?.display()),
        "agent.metricsBindAddress=0.0.0.0:10249".into(), // for tests that ask for it from elsewhere
    ])
}

/// As words for Helm.
pub fn words(values: &[String]) -> Vec<&str> {
    values.iter().flat_map(|value| ["--set", value]).collect()
}

/// As docs/migrating-from-kube-proxy.md has it: every node is cleaned before the chart goes.
pub fn remove_sheave(lab: &Lab) -> Result<()> {
    if !has(lab, "sheave") {
        return Ok(());
    }
    let set = ["--set", "cleanup=true", "--set", "updateStrategy.rollingUpdate.maxUnavailable=100%"];
    helm(lab, &[&["upgrade", "sheave", &chart(), "--reset-then-reuse-values"], set.as_slice()].concat())?;
    rolled_out(lab, "sheave")?;
    helm(lab, &["uninstall", "sheave", "--wait"])
}

/// Takes sheave away once kube-proxy serves.
fn kube_proxy(lab: &Lab, mode: &str) -> Result<()> {
    apply_kube_proxy(lab, mode)?;
    remove_sheave(lab)?;
    rolled_out(lab, "kube-proxy")
}

/// Creates kube-proxy's objects; does not wait.
pub fn apply_kube_proxy(lab: &Lab, mode: &str) -> Result<()> {
    let yaml = include_str!("kube-proxy.yaml");
    let yaml = yaml.replace("MODE", mode).replace("API:", &format!("{API}:")).replace("IMAGE", KUBE_PROXY);
    lab.apply(&yaml.replace("PODS", PODS))
}

fn remove_kube_proxy(lab: &Lab) -> Result<()> {
    if !has(lab, "kube-proxy") {
        return Ok(());
    }
    lab.said(&["-n", "kube-system", "delete", "daemonset", "kube-proxy", "--wait"])?;
    clean_kube_proxy(lab)
}

/// Removes kube-proxy's rules from every node.
pub fn clean_kube_proxy(lab: &Lab) -> Result<()> {
    for number in lab.numbers() {
        said(lab.enter(&format!("n{number}"))?.arg(lab.program("kube-proxy")).arg("--cleanup"))?;
    }
    Ok(())
}

fn has(lab: &Lab, daemonset: &str) -> bool {
    lab.said(&["-n", "kube-system", "get", "daemonset", daemonset]).is_ok()
}

/// Waits until every node has its pod, and the new one.
pub fn rolled_out(lab: &Lab, daemonset: &str) -> Result<()> {
    let daemonset = format!("daemonset/{daemonset}");
    lab.said(&["-n", "kube-system", "rollout", "status", &daemonset, "--timeout=120s"]).map(drop)
}

/// Helm, from outside of the nodes.
pub fn helm(lab: &Lab, words: &[&str]) -> Result<()> {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", namespace("out"))).arg(lab.programs.join("helm"));
    command.args(["--namespace", "kube-system", "--kubeconfig"]).arg(lab.kubeconfig()).args(words);
    said(command.stderr(Stdio::piped())).map(drop)
}
