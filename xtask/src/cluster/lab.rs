//! Where everything of the cluster is: addresses, folders, namespaces.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{Proxy, process};
use crate::{kubernetes, root};

/// Where the API server answers; its ClusterIP is of no use before there is a proxy.
pub const API: &str = "172.18.0.10";
/// ClusterIPs of both families.
pub const SERVICES: &str = "10.96.0.0/16,fd00:10:96::/112";
/// Pods' addresses of both families; each node has a part of them.
pub const PODS: &str = "10.244.0.0/16,fd00:10:244::/48";

/// The cluster that is or will be.
pub struct Lab {
    /// How many nodes it has.
    pub nodes: u8,
    /// Everything that it writes; removed with it.
    pub state: PathBuf,
    /// Where Kubernetes' programs are.
    pub programs: PathBuf,
}

/// What was last asked for and has been reached.
#[derive(Serialize, Deserialize)]
pub struct Shape {
    /// Number of nodes.
    pub nodes: u8,
    /// What serves Services.
    pub proxy: Proxy,
}

impl Shape {
    /// Nothing when no cluster is up.
    pub fn read(lab: &Lab) -> Option<Self> {
        serde_json::from_slice(&fs::read(lab.state.join("shape.json")).ok()?).ok()
    }

    /// Called last of all, when everything runs.
    pub fn write(&self, lab: &Lab) -> Result<()> {
        fs::write(lab.state.join("shape.json"), serde_json::to_vec(self)?).context("cannot note the cluster's shape")
    }
}

impl Lab {
    /// The one cluster of this host.
    pub fn new(nodes: u8) -> Result<Self> {
        Ok(Self { nodes, state: root::cache()?.join("cluster"), programs: kubernetes::folder()? })
    }

    /// Nodes are counted from 1.
    pub fn numbers(&self) -> std::ops::RangeInclusive<u8> {
        1..=self.nodes
    }

    /// What its processes print, a file for each.
    pub fn logs(&self) -> PathBuf {
        self.state.join("log")
    }

    /// Everything of one node.
    pub fn folder(&self, node: u8) -> PathBuf {
        self.state.join(format!("n{node}"))
    }

    /// Credentials of the administrator.
    pub fn kubeconfig(&self) -> PathBuf {
        self.state.join("admin.conf")
    }

    /// Words to put before a command, so that it runs in a place: n1, n2 … for everything a node's process sees;
    /// lan, out, cp for the network alone.
    pub fn inside(&self, place: &str) -> Result<Vec<String>> {
        let mut words = vec!["nsenter".to_owned()];
        match place.strip_prefix('n').filter(|number| number.parse::<u8>().is_ok()) {
            Some(_) => {
                let file = self.state.join(place).join("pid");
                let process = fs::read_to_string(&file).with_context(|| format!("there is no node {place}"))?;
                words.extend([
                    format!("--target={}", process.trim()),
                    "--mount".into(),
                    "--uts".into(),
                    "--net".into(),
                ]);
            }
            None => words.push(format!("--net={}", namespace(place))),
        }
        Ok(words)
    }

    /// A command in a place.
    pub fn enter(&self, place: &str) -> Result<Command> {
        let words = self.inside(place)?;
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        Ok(command)
    }

    /// kubectl from outside of the nodes.
    pub fn kubectl(&self, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", namespace("out"))).arg(self.programs.join("kubectl"));
        command.arg("--kubeconfig").arg(self.kubeconfig()).args(words);
        command
    }

    /// What kubectl prints.
    pub fn said(&self, words: &[&str]) -> Result<String> {
        process::said(&mut self.kubectl(words))
    }

    /// Creates or changes objects.
    pub fn apply(&self, yaml: &str) -> Result<()> {
        let file = self.state.join("apply.yaml");
        fs::write(&file, yaml)?;
        self.said(&["apply", "-f", &file.to_string_lossy()]).map(drop)
    }

    /// Whether the API server answers and every node is ready.
    pub fn is_ready(&self) -> bool {
        let nodes = self.said(&["get", "nodes", "--no-headers", "--request-timeout=5s"]).unwrap_or_default();
        let ready = nodes.lines().filter(|line| line.split_whitespace().nth(1) == Some("Ready")).count();
        ready == usize::from(self.nodes)
    }

    /// A program of Kubernetes, as a word of a command line.
    pub fn program(&self, name: &str) -> String {
        self.programs.join(name).display().to_string()
    }
}

/// The file of a network namespace.
pub fn namespace(place: &str) -> String {
    format!("/run/netns/lab-{place}")
}

/// Addresses of a node, the control plane (0), or the router (-9) on the network between them: 172.18.0.10 and up.
pub fn addresses(node: u8) -> [String; 2] {
    [format!("172.18.0.{}", 10 + node), format!("fd00:172:18::{}", 10 + node)]
}

/// Pod networks of a node.
pub fn pod_networks(node: u8) -> [String; 2] {
    [format!("10.244.{node}.0/24"), format!("fd00:10:244:{node}::/64")]
}

/// Writes a file below a folder that is there.
pub fn write(path: &Path, text: &str) -> Result<()> {
    ensure!(!path.as_os_str().is_empty(), "a file needs a name");
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
