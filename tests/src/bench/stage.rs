//! A node with what the bench needs: a client's pod, pods with servers, and perhaps an agent over a cluster of some size.

use std::{
    cell::RefCell,
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    cluster::{self, Port, Size, VIP},
    usage,
    worker::{Order, Took},
};
use crate::{
    agent::{Agent, Paths},
    fake_api::FakeApi,
    lab::Lab,
    node::{Node, Pod},
    objects::Object as _,
    place::{Place, program},
};

/// Last part of the client's address.
const CLIENT: u8 = 10;
/// Last parts of the servers' addresses.
const SERVERS: [u8; 2] = [2, 3];

/// A node, its pods and the processes in them.
#[derive(Debug)]
pub struct Stage<'a> {
    node: &'a Node,
    client: Worker,
    servers: Vec<(Pod, Worker)>,
    ports: &'static [Port],
    paths: Paths,
}

/// What so many operations took.
#[derive(Clone, Copy, Debug)]
pub struct Batch {
    /// Of the client.
    pub took: Took,
    /// CPU time of an operation in µs: client, servers, and the packets that went between them.
    pub cpu: f64,
}

impl<'a> Stage<'a> {
    /// Makes the pods and starts the workers for a Service with these ports, all on one CPU: what they do to each other's caches is then the same in
    /// every round.
    ///
    /// # Errors
    /// When something cannot be made.
    pub fn new(lab: &Lab, node: &'a Node, ports: &'static [Port], cpu: usize) -> Result<Self> {
        let client = Worker::start(&node.pod(CLIENT)?.place, cpu)?;
        let server = |number: &u8| {
            let pod = node.pod(*number)?;
            let worker = Worker::start(&pod.place, cpu)?;
            worker.obey(&Order::Serve)?;
            anyhow::Ok((pod, worker))
        };
        let servers = SERVERS.iter().map(server).collect::<Result<_>>()?;
        let manifests = lab.manifests.join(&node.name);
        Ok(Self { node, client, servers, ports, paths: Paths { manifests, ..node.paths().clone() } })
    }

    /// Starts an agent over a cluster of that size, in which the bench's Service leads to the first server; returns
    /// when everything is programmed.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn agent(&self, size: Size) -> Result<Agent> {
        self.write(size)?;
        Agent::start(&self.node.name, &self.node.host, &self.paths, &[])
    }

    /// As [`agent`](Self::agent), for an agent that watches an API server.
    ///
    /// # Errors
    /// When it does not get there.
    pub fn agent_watching(&self, api: &FakeApi, size: Size) -> Result<Agent> {
        cluster::publish(api, size, self.ports, self.servers[0].0.v4);
        let kubeconfig = self.paths.manifests.with_extension("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        let paths = Paths { kubeconfig: Some(kubeconfig), ..self.paths.clone() };
        Agent::start(&self.node.name, &self.node.host, &paths, &[])
    }

    /// Writes the manifests of such a cluster.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, size: Size) -> Result<()> {
        cluster::write(&self.paths.manifests, size, self.ports, self.servers[0].0.v4)
    }

    /// Starts an agent over the manifests that are there, and does not wait for it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn begin(&self) -> Result<Agent> {
        Agent::begin(&self.node.name, &self.node.host, &self.paths, &[])
    }

    /// Takes every trace of an agent that has ended out of the kernel.
    ///
    /// # Errors
    /// When a pin cannot be removed.
    pub fn clear(&self) -> Result<()> {
        let pins = self.paths.bpffs.join("sheave");
        fs::remove_dir_all(&pins).with_context(|| pins.display().to_string())
    }

    /// Where its agent keeps things.
    #[must_use]
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// The first server, dialled directly.
    #[must_use]
    pub fn direct(&self, port: u16) -> SocketAddr {
        self.servers[0].0.at(port)
    }

    /// Lets the client repeat something and weighs what it costs.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn measure(&self, order: &Order) -> Result<Batch> {
        weigh(&self.client, order, &self.servers.iter().map(|(_, worker)| worker).collect::<Vec<_>>())
    }

    /// Makes the Service's backend the other server, or the first again, by renaming a manifest, and dials until it
    /// answers; how long that took from the rename on, in milliseconds.
    ///
    /// # Errors
    /// When it does not within ten seconds.
    pub fn change(&self, turn: usize) -> Result<f64> {
        let server = self.server(turn);
        let from = cluster::next_slice(&self.paths.manifests, self.ports, server)?;
        let to = cluster::slice_file(&self.paths.manifests);
        Ok(self.client.obey(&Order::Follow { from, to, server })?.p50 / 1e3)
    }

    /// The same through an API server that the agent watches, from the object's change on.
    ///
    /// # Errors
    /// When it does not within ten seconds.
    pub fn change_in(&self, api: &FakeApi, turn: usize) -> Result<f64> {
        let server = self.server(turn);
        let slice = cluster::slice(self.ports, server).text();
        let begin = Instant::now();
        api.put(&slice);
        self.client.obey(&Order::Await(server))?;
        Ok(begin.elapsed().as_secs_f64() * 1e3)
    }

    fn server(&self, turn: usize) -> Ipv4Addr {
        self.servers[(turn + 1) % SERVERS.len()].0.v4
    }
}

/// Lets a client repeat something and weighs what it costs, itself and these servers together.
///
/// # Errors
/// When an operation fails.
pub fn weigh(client: &Worker, order: &Order, servers: &[&Worker]) -> Result<Batch> {
    let times = match order {
        Order::Connect(_, times) | Order::Ask(_, times) | Order::Datagrams(_, times) | Order::Fresh(_, times) => *times,
        Order::Serve | Order::Follow { .. } | Order::Await(_) => bail!("{order:?} has no cost of one operation"),
    };
    let used =
        || servers.iter().chain([&client]).map(|worker| usage::cgroup_micros(&worker.cgroup)).sum::<Result<u64>>();
    let begin = used()?;
    let took = client.obey(order)?;
    Ok(Batch { took, cpu: (used()? - begin) as f64 / f64::from(times) })
}

/// The Service of the bench.
#[must_use]
pub fn vip(port: u16) -> SocketAddr {
    SocketAddr::from((VIP, port))
}

/// A process that obeys; ends when dropped.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
    cgroup: PathBuf,
}

impl Worker {
    /// Starts one in a place, bound to that CPU.
    ///
    /// # Errors
    /// When the place is gone.
    pub fn start(place: &Place, cpu: usize) -> Result<Self> {
        let mut command = place.command(program("sheave-bench")?)?;
        command.args(["worker", &cpu.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("cannot start a worker")?;
        let orders = child.stdin.take().context("a worker has no stdin")?;
        let replies = BufReader::new(child.stdout.take().context("a worker has no stdout")?);
        Ok(Self { child, pipes: RefCell::new((orders, replies)), cgroup: place.cgroup.clone() })
    }

    /// Does what it is told; says how long one operation took.
    ///
    /// # Errors
    /// When an operation fails.
    pub fn obey(&self, order: &Order) -> Result<Took> {
        let (orders, replies) = &mut *self.pipes.borrow_mut();
        writeln!(orders, "{}", serde_json::to_string(order)?)?;
        let mut line = String::new();
        ensure!(replies.read_line(&mut line)? > 0, "a worker ended over {order:?}");
        serde_json::from_str(&line).with_context(|| format!("a worker said {line}"))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
