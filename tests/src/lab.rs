//! A cluster's network on one host.
//!
//! ```text
//!   outside 198.51.100.10 ── fabric (router and switch) ─┬─ n1 192.0.2.11 ── pods 10.244.1.0/24
//!           2001:db8:100::10                             └─ n2 192.0.2.12 ── pods 10.244.2.0/24, 2001:db8:2::/64
//! ```
//!
//! The fabric routes load-balancer addresses where a test says; it knows no pod address, so that an answer which
//! leaves a node with a pod's address is lost, as it would be in a cloud.

use std::{
    fs,
    ops::RangeInclusive,
    path::PathBuf,
    sync::{
        Once,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::{Context, Result};
use nix::unistd::geteuid;

use crate::{
    agent::Agent,
    leftovers,
    node::{Node, Spot},
    objects::{self, Object, Svc},
    place::Place,
    skip,
};

/// Nodes, an outside client, and the manifests that stand for the cluster's API.
#[derive(Debug)]
pub struct Lab {
    /// Prefix of everything it made.
    pub name: String,
    /// n1, n2 …
    pub nodes: Vec<Node>,
    /// 198.51.100.10 and 2001:db8:100::10, in no node's cgroup.
    pub outside: Place,
    /// Router and switch between them.
    pub fabric: Place,
    /// What `--manifests` of every agent names.
    pub manifests: PathBuf,
}

impl Lab {
    /// A lab of that many nodes, or `None` when this host cannot have one; the running test is then skipped.
    ///
    /// # Errors
    /// When a namespace, device or cgroup cannot be made.
    pub fn new(nodes: u8) -> Result<Option<Self>> {
        static SWEPT: Once = Once::new();
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        if let Some(reason) = unfit() {
            skip(reason);
            return Ok(None);
        }
        SWEPT.call_once(leftovers::sweep);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        Self::named(&format!("sheave-{}-{number}", std::process::id()), nodes, true).map(Some)
    }

    /// A lab of one node, and its agent.
    ///
    /// # Errors
    /// When the lab cannot be made, or the agent does not get ready.
    pub fn with_agent() -> Result<Option<(Self, Agent)>> {
        let Some(lab) = Self::new(1)? else { return Ok(None) };
        let agent = lab.n1().agent()?;
        Ok(Some((lab, agent)))
    }

    /// A lab of that name; what an older one of it left is removed first. Unless `mortal`, its processes outlive us.
    ///
    /// # Errors
    /// When a namespace, device or cgroup cannot be made.
    pub fn named(name: &str, nodes: u8, mortal: bool) -> Result<Self> {
        Self::of(name, 1..=nodes, nodes, mortal)
    }

    /// This machine's part of a lab that spans machines: one of its nodes. `uplink`, a device of this machine, leads to
    /// the other parts. With the first node's part goes no router: that node is the one which gets lost.
    ///
    /// # Errors
    /// When a namespace, device or cgroup cannot be made.
    pub fn part(number: u8, nodes: u8, uplink: &str) -> Result<Self> {
        let lab = Self::of("sheave-part", number..=number, nodes, true)?;
        crate::place::ip(&["link", "set", uplink, "netns", &lab.fabric.netns])?;
        lab.fabric.ip(&format!("link set {uplink} master br0 up"))?;
        if number == 1 {
            lab.fabric.ip("addr flush dev br0")?;
        }
        Ok(lab)
    }

    /// With those nodes out of so many.
    fn of(name: &str, numbers: RangeInclusive<u8>, nodes: u8, mortal: bool) -> Result<Self> {
        leftovers::remove(name);
        let guard = Cleanup(name);
        let manifests = leftovers::folder(name).join("manifests");
        fs::create_dir_all(&manifests).with_context(|| manifests.display().to_string())?;
        let cgroup = leftovers::cgroup_root().context("no cgroup v2 tree is mounted")?.join(name);
        let place = |part: &str| Place::new(format!("{name}-{part}"), cgroup.join(part), mortal);
        let (fabric, outside) = (place("fabric")?, place("outside")?);
        fabric.ip(&format!(
            "link add br0 type bridge
             addr add 192.0.2.1/24 dev br0
             addr add 2001:db8::1/64 dev br0 nodad
             link set br0 up
             link add outside type veth peer name eth0 netns {}
             addr add 198.51.100.1/24 dev outside
             addr add 2001:db8:100::1/64 dev outside nodad
             link set outside up",
            outside.netns
        ))?;
        outside.ip("addr add 198.51.100.10/24 dev eth0
             addr add 2001:db8:100::10/64 dev eth0 nodad
             link set eth0 up
             route add default via 198.51.100.1
             route add default via 2001:db8:100::1")?;
        let spots = numbers.map(|number| Spot { lab: name.to_owned(), number, nodes });
        let nodes = spots.map(|spot| Node::new(spot, &fabric, &manifests)).collect::<Result<Vec<_>>>()?;
        std::mem::forget(guard); // from here on the lab's own drop cleans up
        let lab = Self { name: name.to_owned(), nodes, outside, fabric, manifests };
        for node in &lab.nodes {
            lab.apply(&[&objects::node(node.number)])?;
        }
        Ok(lab)
    }

    /// Node n1.
    #[must_use]
    pub fn n1(&self) -> &Node {
        &self.nodes[0]
    }

    /// Node n2.
    ///
    /// # Panics
    /// When the lab has one node.
    #[must_use]
    pub fn n2(&self) -> &Node {
        &self.nodes[1]
    }

    /// Creates or changes objects of the cluster, in order: one rename each, seen whole by every agent.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn apply(&self, objects: &[&dyn Object]) -> Result<()> {
        for object in objects {
            let path = self.manifests.join(object.file());
            let part = path.with_extension("part"); // no name that an agent reads
            fs::write(&part, object.text()).and_then(|()| fs::rename(&part, &path)).with_context(|| object.file())?;
        }
        Ok(())
    }

    /// Waits until an agent has programmed all that was applied and deleted before: a Service named `marker`, which
    /// gets a new address, comes last.
    ///
    /// # Errors
    /// When it does not in time.
    pub fn settle(&self, agent: &Agent) -> Result<()> {
        static TURN: AtomicUsize = AtomicUsize::new(0);
        let turn = TURN.fetch_add(1, Ordering::Relaxed);
        let ip = format!("10.96.{}.{}", 200 + turn / 250 % 50, 1 + turn % 250);
        self.apply(&[&Svc::new("marker").ip(&ip).port("m", 1, "TCP")])?;
        agent.expect("marker", &[&format!("{ip}:1/TCP → refused")])
    }

    /// Deletes objects, in order.
    ///
    /// # Errors
    /// When one is not there.
    pub fn delete(&self, objects: &[&dyn Object]) -> Result<()> {
        objects
            .iter()
            .try_for_each(|object| fs::remove_file(self.manifests.join(object.file())).with_context(|| object.file()))
    }

    /// Routes an address or prefix from outside to a node, as a load balancer or BGP would.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn route(&self, prefix: &str, node: &Node) -> Result<()> {
        let via = if prefix.contains(':') { node.v6.to_string() } else { node.v4.to_string() };
        self.fabric.ip(&format!("route replace {prefix} via {via}"))
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.nodes.iter().for_each(Node::show_log);
        }
        if self.fabric.mortal {
            leftovers::remove(&self.name);
        }
    }
}

/// Removes a half-made lab.
struct Cleanup<'a>(&'a str);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        leftovers::remove(self.0);
    }
}

/// Why this host cannot have a lab.
fn unfit() -> Option<&'static str> {
    if !geteuid().is_root() {
        return Some("network namespaces and BPF need root");
    }
    if leftovers::cgroup_root().is_none() {
        return Some("no cgroup v2 tree is mounted");
    }
    if crate::place::ip(&["-Version"]).is_err() {
        return Some("the program ip is missing (package iproute2)");
    }
    None
}
