//! A node and its pods.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use anyhow::{Context, Result};
use nix::mount::{MsFlags, mount};
use sheave_agent::datapath::tables::pins::Pins;

use crate::{
    agent::{Agent, Paths},
    echo::Echo,
    leftovers,
    place::{Place, ip},
};

/// Which node of which lab.
#[derive(Clone, Debug)]
pub(crate) struct Spot {
    pub(crate) lab: String,
    pub(crate) number: u8,
    pub(crate) nodes: u8,
}

/// A node: a network namespace with an uplink, a cgroup with its pods below it, a bpffs of its own.
#[derive(Debug)]
pub struct Node {
    /// 1 for n1.
    pub number: u8,
    /// n1, n2 …
    pub name: String,
    /// 192.0.2.11 for n1.
    pub v4: Ipv4Addr,
    /// 2001:db8::11 for n1.
    pub v6: Ipv6Addr,
    /// Its host side; host-network pods are here, too.
    pub host: Place,
    paths: Paths,
}

/// A pod: a network namespace behind a veth pair, a cgroup below its node's.
#[derive(Debug)]
pub struct Pod {
    /// Its address: 10.244.NODE.NUMBER.
    pub v4: Ipv4Addr,
    /// Its address: 2001:db8:NODE::NUMBER.
    pub v6: Ipv6Addr,
    /// Where its processes run.
    pub place: Place,
}

/// A pod, and what answers there.
#[derive(Debug)]
pub struct Server {
    /// Where.
    pub pod: Pod,
    /// Who.
    pub echo: Echo,
}

impl Node {
    /// Makes the node and connects it to the fabric and, by plain routes, to the pods of the other nodes.
    pub(crate) fn new(spot: Spot, fabric: &Place, manifests: &Path) -> Result<Self> {
        let Spot { lab, number, nodes } = spot;
        let name = format!("n{number}");
        let cgroup = leftovers::cgroup_root().context("no cgroup v2 tree is mounted")?.join(&lab).join(&name);
        let host = Place::new(format!("{lab}-{name}"), cgroup.clone(), fabric.mortal)?;
        fabric.ip(&format!(
            "link add {name} type veth peer name eth0 netns {}\nlink set {name} master br0 up",
            host.netns
        ))?;
        let (v4, v6) = addresses(number);
        host.ip(&format!(
            "addr add {v4}/24 dev eth0
             addr add {v6}/64 dev eth0 nodad
             link set eth0 up
             route add default via 192.0.2.1
             route add default via 2001:db8::1"
        ))?;
        for other in (1..=nodes).filter(|other| *other != number) {
            let (v4, v6) = addresses(other);
            let routes = format!("route add 10.244.{other}.0/24 via {v4}\nroute add 2001:db8:{other}::/64 via {v6}");
            host.ip(&routes)?;
        }
        let folder = leftovers::folder(&lab).join(&name);
        let paths = Paths {
            program: None,
            manifests: manifests.to_owned(),
            kubeconfig: None,
            cgroup,
            bpffs: folder.join("bpf"),
            run: folder.join("run"),
            log: folder.join("agent.log"),
        };
        fs::create_dir_all(&paths.bpffs)?;
        fs::create_dir_all(&paths.run)?;
        mount(Some("bpf"), &paths.bpffs, Some("bpf"), MsFlags::empty(), None::<&str>)
            .context("cannot mount a bpffs")?;
        Ok(Self { number, name, v4, v6, host, paths })
    }

    /// Makes a pod with that last part of its address.
    ///
    /// # Errors
    /// When a namespace, device or cgroup cannot be made.
    pub fn pod(&self, number: u8) -> Result<Pod> {
        let Self { number: node, v4: host4, v6: host6, .. } = self;
        let netns = format!("{}-{number}", self.host.netns);
        let place = Place::new(netns, self.host.cgroup.join(format!("pod{number}")), self.host.mortal)?;
        let v4 = Ipv4Addr::new(10, 244, *node, number);
        let v6 = v6((*node).into(), number);
        self.host.ip(&format!(
            "link add pod{number} type veth peer name eth0 netns {}
             addr add 10.244.{node}.1/32 dev pod{number}
             addr add 2001:db8:{node}::1/128 dev pod{number} nodad
             link set pod{number} up
             route add {v4}/32 dev pod{number} src {host4}
             route add {v6}/128 dev pod{number} src {host6}",
            place.netns
        ))?;
        place.ip(&format!(
            "addr add {v4}/32 dev eth0
             addr add {v6}/128 dev eth0 nodad
             link set eth0 up
             route add 10.244.{node}.1 dev eth0
             route add default via 10.244.{node}.1
             route add 2001:db8:{node}::1 dev eth0
             route add default via 2001:db8:{node}::1"
        ))?;
        Ok(Pod { v4, v6, place })
    }

    /// Makes a pod with a server on 8080/TCP and 8080/UDP.
    ///
    /// # Errors
    /// When a namespace, device or cgroup cannot be made.
    pub fn server(&self, number: u8, name: &str) -> Result<Server> {
        let pod = self.pod(number)?;
        let echo = pod.place.echo(name, &["8080/TCP", "8080/UDP"])?;
        Ok(Server { pod, echo })
    }

    /// Puts pods on a bridge, `cni0`, as many CNIs do.
    ///
    /// # Errors
    /// When `ip` refuses.
    pub fn bridge(&self, pods: &[&Pod]) -> Result<()> {
        let subnet = self.number;
        self.host.ip("link add cni0 type bridge")?;
        for pod in pods {
            let number = pod.v4.octets()[3];
            self.host.ip(&format!(
                "addr del 10.244.{subnet}.1/32 dev pod{number}
                 addr del 2001:db8:{subnet}::1/128 dev pod{number}
                 route del {}/128 dev pod{number}
                 link set pod{number} master cni0",
                pod.v6
            ))?;
        }
        self.host.ip(&format!(
            "addr add 10.244.{subnet}.1/24 dev cni0
             addr add 2001:db8:{subnet}::1/64 dev cni0 nodad
             link set cni0 up"
        ))
    }

    /// Ends a pod's processes and takes its network away; the address is free for another pod then.
    ///
    /// # Errors
    /// When `ip` refuses.
    #[expect(clippy::needless_pass_by_value, reason = "the pod is no more, so nobody may use it again")]
    pub fn remove(&self, pod: Pod) -> Result<()> {
        leftovers::remove_cgroup(&pod.place.cgroup);
        self.host.ip(&format!("link del pod{}", pod.v4.octets()[3]))?;
        ip(&["netns", "del", &pod.place.netns])
    }

    /// Starts the agent and waits until it has read the manifests and programmed the kernel.
    ///
    /// # Errors
    /// When it ends or does not get ready; its log is in the message.
    pub fn agent(&self) -> Result<Agent> {
        self.agent_with(&[])
    }

    /// The same, with more flags.
    ///
    /// # Errors
    /// When it ends or does not get ready; its log is in the message.
    pub fn agent_with(&self, flags: &[&str]) -> Result<Agent> {
        Agent::start(&self.name, &self.host, &self.paths, flags)
    }

    /// The same, with objects from a cluster in place of the manifests.
    ///
    /// # Errors
    /// When it ends or does not get ready; its log is in the message.
    pub fn agent_of(&self, kubeconfig: &Path) -> Result<Agent> {
        self.agent_at(&Paths { kubeconfig: Some(kubeconfig.to_owned()), ..self.paths.clone() })
    }

    /// The same, of another build of `sheave`.
    ///
    /// # Errors
    /// When it ends or does not get ready; its log is in the message.
    pub fn agent_built_as(&self, program: &Path) -> Result<Agent> {
        self.agent_at(&Paths { program: Some(program.to_owned()), ..self.paths.clone() })
    }

    /// The same, with other paths than [`paths`](Self::paths).
    ///
    /// # Errors
    /// When it ends or does not get ready; its log is in the message.
    pub fn agent_at(&self, paths: &Paths) -> Result<Agent> {
        Agent::start(&self.name, &self.host, paths, &[])
    }

    /// Where the node's agent keeps things.
    #[must_use]
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// What its agent has pinned.
    #[must_use]
    pub fn pins(&self) -> Pins {
        Pins::below(&self.paths.bpffs)
    }

    /// Prints what the agent said, for a test that has failed.
    pub(crate) fn show_log(&self) {
        if let Ok(log) = fs::read_to_string(&self.paths.log) {
            eprintln!("── agent of {}\n{log}", self.name);
        }
    }
}

impl Pod {
    /// Its IPv4 address and a port.
    #[must_use]
    pub fn at(&self, port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V4(self.v4), port)
    }

    /// Its IPv6 address and a port.
    #[must_use]
    pub fn at6(&self, port: u16) -> SocketAddr {
        SocketAddr::new(IpAddr::V6(self.v6), port)
    }
}

fn addresses(node: u8) -> (Ipv4Addr, Ipv6Addr) {
    (Ipv4Addr::new(192, 0, 2, 10 + node), v6(0, 10 + node))
}

/// 2001:db8:SUBNET::NUMBER, with the decimal digits of the number, as people write such addresses.
fn v6(subnet: u16, number: u8) -> Ipv6Addr {
    let digits = u16::from_str_radix(&number.to_string(), 16).unwrap_or_default();
    Ipv6Addr::new(0x2001, 0xdb8, subnet, 0, 0, 0, 0, digits)
}
