//! What a client outside the cluster pays for a NodePort, as ratios to plain routing to the pod over the same hops, in the
//! same round: through sheave and, where it is there, through kube-proxy. And what looking after the flow table costs.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};

use super::{
    Effort,
    kube_proxy::Cluster,
    numbers::Spread,
    report::{Row, Unit},
    rounds::Rounds,
    stage::{Batch, Worker, weigh},
    worker::{Order, PORT},
};
use crate::{
    agent::{Agent, Paths},
    flow_table::FlowTable,
    kube_proxy::{KubeProxy, Mode},
    lab::Lab,
    node::{Node, Pod},
    objects::{Object, Slice, Svc},
    wait::eventually,
};

/// Who serves a pair of nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Proxy {
    /// Nobody: the client knows the pods.
    Bare,
    /// The same again: the noise.
    BareAgain,
    Sheave,
    Nftables,
    Iptables,
}

const PROXIES: [Proxy; 5] = [Proxy::Bare, Proxy::BareAgain, Proxy::Sheave, Proxy::Nftables, Proxy::Iptables];

/// Two for each.
pub const NODES: usize = 2 * PROXIES.len();

/// What is dialled: by whom it is served, and whether the pod is on the node that is dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arm {
    proxy: Proxy,
    is_local: bool,
}

/// Two nodes with a server each; the client comes to the first.
struct Pair<'a> {
    proxy: Proxy,
    number: usize,
    near: &'a Node,
    far: &'a Node,
    servers: [(Pod, Worker); 2],
    agents: Vec<Agent>,
    proxies: Vec<KubeProxy>,
}

/// Measures on the lab's first [`NODES`] nodes.
///
/// # Errors
/// When an operation fails.
pub fn measure(lab: &Lab, cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let client = Worker::start(&lab.outside, cpu)?;
    let mut pairs = Vec::new();
    for (number, (proxy, nodes)) in PROXIES.into_iter().zip(lab.nodes.chunks(2)).enumerate() {
        let [near, far] = nodes else { break };
        pairs.push(Pair::new(lab, proxy, number, (near, far), cpu)?);
    }
    let objects: Vec<(Svc, Slice)> = pairs.iter().flat_map(Pair::objects).collect();
    let texts: Vec<&dyn Object> =
        objects.iter().flat_map(|(service, slice)| [service as &dyn Object, slice as &dyn Object]).collect();
    let cluster = if effort.kube_proxy {
        eprintln!("bench: packets: an API server for kube-proxy");
        Cluster::start(lab, &texts)?
    } else {
        None
    };
    for pair in &mut pairs {
        pair.start(lab, cluster.as_ref())?;
    }
    pairs.retain(|pair| cluster.is_some() || !matches!(pair.proxy, Proxy::Nftables | Proxy::Iptables));
    for pair in &pairs {
        for is_local in [true, false] {
            eventually("the way to the pod is open", Duration::from_secs(60), || {
                client_can_reach(lab, pair.to(is_local))
            })
            .with_context(|| format!("{:?}", pair.proxy))?;
        }
    }

    let batch = (effort.batch / 5).max(20); // a flow holds its port for a while, and there are 20,000
    let rounds = effort.rounds.min(40);
    let mut rows = Vec::new();
    for (group, order, bars) in [
        (
            "CPU of a connection from outside to a NodePort, client, nodes and server, × plain routing",
            Order::Connect as fn(SocketAddr, u32) -> Order,
            [1.2, 1.3],
        ),
        (
            "CPU of a datagram and its echo through a NodePort, known flow, × plain routing",
            Order::Datagrams,
            [1.1, 1.15],
        ),
        ("CPU of a datagram and its echo through a NodePort, new flow each, × plain routing", Order::Fresh, [1.4, 1.6]),
    ] {
        eprintln!("bench: {group}");
        let arms: Vec<Arm> =
            pairs.iter().flat_map(|pair| [true, false].map(|is_local| Arm { proxy: pair.proxy, is_local })).collect();
        let rounds = Rounds::run(&arms, rounds, |arm: Arm| {
            let pair = pairs.iter().find(|pair| pair.proxy == arm.proxy).context("no such pair")?;
            weigh(&client, &order(pair.to(arm.is_local), batch), &pair.servers.each_ref().map(|(_, worker)| worker))
        })?;
        rows.extend(table(group, &rounds, &arms, bars));
    }
    rows.extend(collection(effort)?);
    Ok(rows)
}

fn table(group: &'static str, rounds: &Rounds<Arm>, arms: &[Arm], bars: [f64; 2]) -> Vec<Row> {
    let cpu: fn(&Batch) -> f64 = |batch| batch.cpu;
    let mut rows = Vec::new();
    for arm in arms {
        let bare = Arm { proxy: Proxy::Bare, ..*arm };
        let place = if arm.is_local { "backend on the node" } else { "backend on another node" };
        let row = |what: String| Row::new(group, what, rounds.ratio(*arm, bare, cpu), Unit::TimesBare);
        rows.push(match arm.proxy {
            Proxy::Bare => Row::new(group, format!("plain routing, {place}"), rounds.plain(*arm, cpu), Unit::Micros),
            Proxy::BareAgain => row(format!("plain routing against plain routing, {place}: the noise")),
            Proxy::Sheave => row(format!("sheave, {place}")).bar(bars[usize::from(!arm.is_local)]),
            Proxy::Nftables => row(format!("kube-proxy nftables, {place}")),
            Proxy::Iptables => row(format!("kube-proxy iptables, {place}")),
        });
    }
    rows
}

/// One pass over a full table: the time of it, and how much of a CPU the collector's pace makes of that.
fn collection(effort: &Effort) -> Result<Vec<Row>> {
    const GROUP: &str = "one pass over the flow table";
    let flows = u32::try_from(effort.scaled(125_000))?;
    eprintln!("bench: a flow table of {} entries", 4 * flows);
    let mut table = FlowTable::new(4 * flows + flows)?;
    let collector = table.flows()?;
    let pass = || -> Result<f64> {
        let now = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from);
        let begin = now()?;
        collector.collect(false)?;
        Ok((now()? - begin).as_secs_f64() * 1e3)
    };
    table.fill(0..flows, false)?;
    let busy = (0..5).map(|_| pass()).collect::<Result<Vec<_>>>()?;
    let mut over = Vec::new();
    for _ in 0..3 {
        table.fill(0..flows, true)?;
        over.push(pass()?);
    }
    let row = |what: &str, samples| {
        Row::new(GROUP, format!("{} entries, {what}", 4 * flows), Spread::of(samples), Unit::Millis)
    };
    Ok(vec![row("all in use", busy), row("all over and removed", over)])
}

fn client_can_reach(lab: &Lab, to: SocketAddr) -> Result<()> {
    let connect = || std::net::TcpStream::connect_timeout(&to, Duration::from_millis(500));
    lab.outside.enter(connect)?.map(drop).with_context(|| to.to_string())
}

impl<'a> Pair<'a> {
    fn new(lab: &Lab, proxy: Proxy, number: usize, (near, far): (&'a Node, &'a Node), cpu: usize) -> Result<Self> {
        let server = |node: &Node| -> Result<(Pod, Worker)> {
            let pod = node.pod(2)?;
            let worker = Worker::start(&pod.place, cpu)?;
            worker.obey(&Order::Serve)?;
            Ok((pod, worker))
        };
        let servers = [server(near)?, server(far)?];
        // The same hops for everybody, there and back, and no node that knows a better way.
        for node in [near, far] {
            lab.fabric.ip(&format!("route replace 10.244.{}.0/24 via {}", node.number, near.v4))?;
            for device in ["all", "eth0"] {
                let file = format!("/proc/sys/net/ipv4/conf/{device}/send_redirects");
                node.host.enter(|| std::fs::write(&file, "0"))?.context(file.clone())?;
            }
        }
        far.host.ip(&format!("route add 198.51.100.0/24 via {}", near.v4))?;
        Ok(Self { proxy, number, near, far, servers, agents: Vec::new(), proxies: Vec::new() })
    }

    fn node_port(&self, is_local: bool) -> u16 {
        30_001 + 2 * self.number as u16 + u16::from(!is_local)
    }

    /// What the client dials.
    fn to(&self, is_local: bool) -> SocketAddr {
        match self.proxy {
            Proxy::Bare | Proxy::BareAgain => self.servers[usize::from(!is_local)].0.at(PORT),
            Proxy::Sheave | Proxy::Nftables | Proxy::Iptables => {
                SocketAddr::new(self.near.v4.into(), self.node_port(is_local))
            }
        }
    }

    /// Its Services: one for the near pod, one for the far one.
    fn objects(&self) -> Vec<(Svc, Slice)> {
        let of = |is_local: bool| {
            let (name, node_port) = (format!("bench-{}", self.node_port(is_local)), self.node_port(is_local));
            let number = node_port - 30_000;
            let service = Svc::new(&name).ip(&format!("10.96.1.{number}"));
            let service =
                service.port("t", PORT, "TCP").node_port(node_port).port("u", PORT, "UDP").node_port(node_port);
            let (pod, node) = if is_local { (&self.servers[0].0, self.near) } else { (&self.servers[1].0, self.far) };
            let slice = Slice::new(&name, &name).port("t", PORT, "TCP").port("u", PORT, "UDP");
            (service, slice.ready(&pod.v4.to_string(), &node.name))
        };
        vec![of(true), of(false)]
    }

    fn start(&mut self, lab: &Lab, cluster: Option<&Cluster>) -> Result<()> {
        let mode = match self.proxy {
            Proxy::Bare | Proxy::BareAgain => return Ok(()),
            Proxy::Sheave => {
                for (service, slice) in self.objects() {
                    lab.apply(&[&service, &slice])?;
                }
                for node in [self.near, self.far] {
                    let paths: Paths = node.paths().clone();
                    self.agents.push(Agent::start(&node.name, &node.host, &paths, &[])?);
                }
                return Ok(());
            }
            Proxy::Nftables => Mode::Nftables,
            Proxy::Iptables => Mode::Iptables,
        };
        if let Some(cluster) = cluster {
            for node in [self.near, self.far] {
                self.proxies.push(KubeProxy::start(node, mode, cluster.kubeconfig())?);
            }
        }
        Ok(())
    }
}
