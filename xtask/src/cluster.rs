//! `cargo xtask cluster`: a real Kubernetes on this host. Each node is a network, a mount and a host name namespace with
//! a cgroup of its own, and in it containerd and a kubelet; dual stack, without a registry of images.
//!
//! What belongs to the cluster is what is in its cgroups and its network namespaces: that is how `down` finds it, even
//! after a crash.

mod cgroup;
mod control_plane;
mod images;
mod lab;
mod load_balancer;
mod migrate;
mod network;
mod node;
mod process;
mod proxy;
mod traffic;

use std::{
    fs,
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use self::{images::Images, lab::Shape, process::eventually};
pub use self::{lab::Lab, load_balancer::LoadBalancer, proxy::Proxy};
use crate::{kubernetes, root, setup};

/// What to do with the cluster.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Start the cluster, or change a running one to match; builds what it needs, once
    Up(Up),
    /// Stop and remove all of it
    Down,
    /// Show what is running
    Status,
    /// Run kubectl as the cluster's administrator, from outside the nodes
    #[command(disable_help_flag = true)]
    Kubectl {
        /// As for kubectl
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Give Services of type LoadBalancer an address, until ended; for the router's namespace
    #[command(hide = true)]
    LoadBalancer,
    /// Go from kube-proxy to sheave and back as docs/migrating-from-kube-proxy.md says, under traffic
    Migrate {
        #[command(flatten)]
        cluster: Up,
    },
    /// Ask addresses, until ended; for namespaces of the cluster
    #[command(hide = true)]
    Ask {
        /// Addresses with ports
        addresses: Vec<std::net::SocketAddr>,
    },
    /// Run a program on a node (n1, n2 …), on the router between them (lan), or outside (out)
    Exec {
        /// n1, n2 … lan, out, cp
        place: String,
        /// The program and its arguments
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        words: Vec<String>,
    },
}

/// What cluster to have.
#[derive(clap::Args, Clone, Debug)]
pub struct Up {
    /// Nodes; three or more are spread over three zones
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=9))]
    pub nodes: u8,
    /// What serves Services
    #[arg(long, value_enum, default_value_t = Proxy::Sheave)]
    pub proxy: Proxy,
    /// An archive of sheave's image, instead of one built from this checkout
    #[arg(long, value_name = "FILE")]
    pub image: Option<PathBuf>,
}

/// Debian packages, by a program of each that shows whether it is there.
const PACKAGES: [(&str, &str); 9] = [
    ("/usr/bin/containerd", "containerd"),
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/ptp", "containernetworking-plugins"),
    ("/usr/sbin/iptables", "iptables"),
    ("/usr/sbin/conntrack", "conntrack"),
    ("/usr/bin/openssl", "openssl"),
    ("/usr/bin/mmdebstrap", "mmdebstrap"),
    ("/bin/busybox", "busybox-static"),
    ("/sbin/ip", "iproute2"),
];

/// Kubernetes' programs that run in every cluster.
pub const PROGRAMS: [&str; 11] = [
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "etcd",
    "agnhost",
    "regression-issue-74839",
    "coredns",
    "helm",
];

/// Runs what is asked for.
pub fn run(args: &Args) -> Result<()> {
    match &args.command {
        Command::Up(wanted) => up(wanted).map(drop),
        Command::Down => down(),
        Command::Status => status(),
        Command::Kubectl { words } => {
            let lab = running()?;
            root::run(lab.kubectl(&[]).args(words))
        }
        Command::LoadBalancer => load_balancer::run(&running()?),
        Command::Migrate { cluster } => migrate::tally(cluster).map(|tally| tally.conclude()),
        Command::Ask { addresses } => traffic::ask(addresses),
        Command::Exec { place, words } => {
            let lab = running()?;
            root::run(lab.enter(place)?.args(words))
        }
    }
}

/// What this host needs and lacks; `Err` says it in a sentence.
///
/// # Errors
/// When it cannot be had: no root, no cgroup v2, no Go, no package.
pub fn prepare() -> Result<()> {
    ensure!(root::is_root(), "a cluster needs root: namespaces, cgroups, mounts");
    cgroup::unified()?;
    let missing: Vec<&str> =
        PACKAGES.iter().filter(|(program, _)| !Path::new(program).exists()).map(|(_, name)| *name).collect();
    if !missing.is_empty() {
        setup::install(&missing)?;
    }
    kubernetes::programs(&PROGRAMS).map(drop)
}

/// Starts the cluster, or brings the running one to what is wanted.
///
/// # Errors
/// When something cannot be built or does not start; what was started stays, to be looked at, until `down`.
pub fn up(wanted: &Up) -> Result<Lab> {
    let start = Instant::now();
    prepare()?;
    let lab = Lab::new(wanted.nodes)?;
    let images = Images::make(&lab.programs, wanted)?;
    let runs = Shape::read(&lab).is_some_and(|shape| shape.nodes == wanted.nodes) && lab.is_ready();
    if !runs {
        clear(&lab)?;
        create(&lab, &images)?;
    }
    proxy::install(&lab, &images, wanted.proxy)?;
    eventually("the cluster's DNS runs", 120, || {
        lab.said(&["-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=2s"])
    })?;
    Shape { nodes: wanted.nodes, proxy: wanted.proxy }.write(&lab)?;
    println!("cluster: up with {} nodes and {}, after {} s", wanted.nodes, wanted.proxy, start.elapsed().as_secs());
    Ok(lab)
}

/// Everything but the proxy.
fn create(lab: &Lab, images: &Images) -> Result<()> {
    fs::create_dir_all(lab.logs()).with_context(|| format!("cannot make {}", lab.logs().display()))?;
    println!("cluster: starting etcd and the API server");
    network::create(lab)?;
    control_plane::start(lab)?;
    println!("cluster: starting {} nodes", lab.nodes);
    thread::scope(|scope| {
        let starts: Vec<_> =
            lab.numbers().map(|number| scope.spawn(move || node::start(lab, number, images))).collect();
        starts.into_iter().try_for_each(|start| start.join().unwrap_or_else(|_| bail!("a thread died")))
    })?;
    let nodes = usize::from(lab.nodes);
    eventually("all nodes are ready", 90, || {
        let said = lab.said(&["get", "nodes", "--no-headers"])?;
        let ready = said.lines().filter(|line| line.split_whitespace().nth(1) == Some("Ready")).count();
        ensure!(ready == nodes, "{ready} of {nodes} are");
        Ok(())
    })?;
    for number in lab.numbers() {
        let [v4, v6] = lab::pod_networks(number);
        let networks = format!(r#"{{"spec": {{"podCIDR": "{v4}", "podCIDRs": ["{v4}", "{v6}"]}}}}"#);
        lab.said(&["patch", "node", &format!("n{number}"), "--patch", &networks])?;
        if nodes >= 3 {
            let zone = format!("topology.kubernetes.io/zone=z{}", (number - 1) % 3 + 1);
            lab.said(&["label", "--overwrite", "node", &format!("n{number}"), &zone])?;
        }
    }
    lab.apply(include_str!("cluster/coredns.yaml"))
}

/// Removes whatever there is.
///
/// # Errors
/// When processes do not end, or something cannot be removed.
pub fn down() -> Result<()> {
    ensure!(root::is_root(), "a cluster needs root");
    clear(&Lab::new(0)?)?;
    println!("cluster: down");
    Ok(())
}

fn clear(lab: &Lab) -> Result<()> {
    cgroup::clear()?;
    network::remove()?;
    if lab.state.exists() {
        fs::remove_dir_all(&lab.state).with_context(|| format!("cannot remove {}", lab.state.display()))?;
    }
    Ok(())
}

/// The cluster that runs.
///
/// # Errors
/// When there is none, or it is not whole.
pub fn running() -> Result<Lab> {
    let Some(shape) = Shape::read(&Lab::new(0)?) else {
        bail!("no cluster runs here; start one: cargo xtask cluster up")
    };
    Lab::new(shape.nodes)
}

fn status() -> Result<()> {
    let lab = running()?;
    if let Some(shape) = Shape::read(&lab) {
        println!("{} nodes, Services by {}; logs in {}", shape.nodes, shape.proxy, lab.logs().display());
    }
    root::run(&mut lab.kubectl(&["get", "nodes,daemonsets,pods", "-A", "-o", "wide"]))
}
