//! A load balancer for the cluster: gives Services of type LoadBalancer an address out of 172.19.0.0/24 and routes it,
//! from the router before the nodes, to nodes; with policy Local to those whose health check says so.
//!
//! It runs in the router's network namespace, as a process of its own.

use std::{
    collections::BTreeMap,
    io::{BufReader, Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    process::{Child, Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::json;

use super::{
    lab::{self, Lab},
    process::said,
};
use crate::root;

/// Between two looks at health checks.
const PERIOD: Duration = Duration::from_millis(500);

/// The process; ended when dropped.
pub struct LoadBalancer(Child);

impl LoadBalancer {
    /// Starts it for the cluster that runs.
    pub fn start(lab: &Lab) -> Result<Self> {
        let mut command = lab.enter("lan")?;
        command.arg(root::this_program()).args(["cluster", "load-balancer"]).stdin(Stdio::null());
        Ok(Self(command.spawn().context("cannot start the load balancer")?))
    }
}

impl Drop for LoadBalancer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(Deserialize)]
struct Event {
    r#type: String,
    object: Service,
}

#[derive(Deserialize)]
struct Service {
    metadata: Metadata,
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    namespace: String,
    name: String,
    deletion_timestamp: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    r#type: String,
    load_balancer_class: Option<String>,
    #[serde(rename = "loadBalancerIP")]
    load_balancer_ip: Option<Ipv4Addr>,
    external_traffic_policy: Option<String>,
    session_affinity: Option<String>,
    health_check_node_port: Option<u16>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Status {
    load_balancer: Ingresses,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ingresses {
    ingress: Vec<Ingress>,
}

#[derive(Deserialize)]
struct Ingress {
    ip: Option<Ipv4Addr>,
}

impl Service {
    fn is_ours(&self) -> bool {
        self.spec.r#type == "LoadBalancer"
            && self.spec.load_balancer_class.is_none()
            && self.metadata.deletion_timestamp.is_none()
    }

    fn health_check(&self) -> Option<u16> {
        (self.spec.external_traffic_policy.as_deref() == Some("Local")).then_some(self.spec.health_check_node_port)?
    }

    fn says(&self) -> Vec<Ipv4Addr> {
        self.status.load_balancer.ingress.iter().filter_map(|ingress| ingress.ip).collect()
    }
}

type Name = (String, String);

struct Balancer<'a> {
    lab: &'a Lab,
    services: BTreeMap<Name, Service>,
    addresses: BTreeMap<Name, Ipv4Addr>,
    /// Numbers of the nodes that an address is routed to.
    routes: BTreeMap<Ipv4Addr, Vec<u8>>,
}

/// Works until it is ended; to be run in the router's network namespace.
pub fn run(lab: &Lab) -> Result<()> {
    // By ports, too: one client's connections come to all nodes.
    std::fs::write("/proc/sys/net/ipv4/fib_multipath_hash_policy", "1").context("this is not the router")?;
    let events = watch(lab)?;
    let mut balancer = Balancer { lab, services: BTreeMap::new(), addresses: BTreeMap::new(), routes: BTreeMap::new() };
    loop {
        match events.recv_timeout(PERIOD) {
            Ok(event) => balancer.hear(event)?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("kubectl has ended"),
        }
        balancer.route()?;
    }
}

fn watch(lab: &Lab) -> Result<Receiver<Event>> {
    let words = ["get", "services", "--all-namespaces", "--watch", "--output-watch-events", "--output=json"];
    let mut child = lab.kubectl(&words).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.take().context("kubectl has no stdout")?;
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        let events = serde_json::Deserializer::from_reader(BufReader::new(output)).into_iter::<Event>();
        for event in events.map_while(|event| event.inspect_err(|error| eprintln!("load balancer: {error}")).ok()) {
            if send.send(event).is_err() {
                break;
            }
        }
        let _ = child.kill();
        let _ = child.wait();
    });
    Ok(receive)
}

impl Balancer<'_> {
    fn hear(&mut self, event: Event) -> Result<()> {
        let Metadata { namespace, name, .. } = &event.object.metadata;
        let name = (namespace.clone(), name.clone());
        if event.r#type != "DELETED" && event.object.is_ours() {
            let address = self.address(&name, &event.object)?;
            if event.object.says() != [address] {
                self.tell(&name, &[address]);
            }
            self.services.insert(name, event.object);
            return Ok(());
        }
        self.services.remove(&name);
        if let Some(address) = self.addresses.remove(&name) {
            if event.r#type != "DELETED" && !event.object.says().is_empty() {
                self.tell(&name, &[]);
            }
            if self.routes.remove(&address).is_some() {
                said(Command::new("ip").args(["route", "delete", &format!("{address}/32")]))?;
            }
        }
        Ok(())
    }

    fn address(&mut self, name: &Name, service: &Service) -> Result<Ipv4Addr> {
        if let Some(address) = self.addresses.get(name) {
            return Ok(*address);
        }
        let free = (1..=254)
            .map(|host| Ipv4Addr::new(172, 19, 0, host))
            .find(|address| self.addresses.values().all(|taken| taken != address));
        let address = service.spec.load_balancer_ip.or(free).context("all addresses are in use")?;
        self.addresses.insert(name.clone(), address);
        Ok(address)
    }

    /// Writes the status; a Service that is gone in the meantime is no matter.
    fn tell(&self, (namespace, name): &Name, addresses: &[Ipv4Addr]) {
        let ingress: Vec<_> = addresses.iter().map(|address| json!({ "ip": address })).collect();
        let patch = json!({ "status": { "loadBalancer": { "ingress": ingress } } }).to_string();
        let words = ["patch", "service", name, "--subresource=status", "--type=merge", "--patch", &patch];
        if let Err(error) = self.lab.said(&[&["--namespace", namespace], words.as_slice()].concat()) {
            eprintln!("load balancer: {error:#}");
        }
    }

    fn route(&mut self) -> Result<()> {
        for (name, service) in &self.services {
            let Some(address) = self.addresses.get(name) else { continue };
            let mut nodes: Vec<u8> = match service.health_check() {
                Some(port) => self.lab.numbers().filter(|node| is_healthy(*node, port)).collect(),
                None => self.lab.numbers().collect(),
            };
            if service.spec.session_affinity.as_deref() == Some("ClientIP") {
                nodes.truncate(1); // each node remembers its own clients only
            }
            if self.routes.get(address) == Some(&nodes) {
                continue;
            }
            let mut ip = Command::new("ip");
            let prefix = format!("{address}/32");
            if nodes.is_empty() {
                ip.args(["route", "replace", "blackhole", &prefix]);
            } else {
                ip.args(["route", "replace", &prefix]);
            }
            for node in &nodes {
                ip.args(["nexthop", "via", &lab::addresses(*node)[0]]);
            }
            said(&mut ip)?;
            self.routes.insert(*address, nodes);
        }
        Ok(())
    }
}

/// Whether a node's health check of a Service answers 200.
fn is_healthy(node: u8, port: u16) -> bool {
    let ask = || -> Result<bool> {
        let address: SocketAddr = format!("{}:{port}", lab::addresses(node)[0]).parse()?;
        let mut stream = TcpStream::connect_timeout(&address, PERIOD)?;
        stream.set_read_timeout(Some(PERIOD))?;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: health\r\nConnection: close\r\n\r\n")?;
        let mut head = [0; 12];
        stream.read_exact(&mut head)?;
        Ok(head == *b"HTTP/1.1 200")
    };
    ask().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::Event;

    #[test]
    fn services_are_ours_by_their_type_and_class() {
        let event = |spec: Value, deleted: Value| -> Event {
            let metadata = json!({ "namespace": "a", "name": "b", "deletionTimestamp": deleted });
            serde_json::from_value(json!({ "type": "MODIFIED", "object": { "metadata": metadata, "spec": spec } }))
                .unwrap()
        };
        let local = json!({ "type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 31000 });
        for (name, spec, deleted, is_ours, health_check) in [
            ("a cluster IP", json!({ "type": "ClusterIP" }), Value::Null, false, None),
            ("policy Cluster", json!({ "type": "LoadBalancer" }), Value::Null, true, None),
            ("policy Local", local.clone(), Value::Null, true, Some(31000)),
            ("going away", local, json!("2026-01-01T00:00:00Z"), false, Some(31000)),
            ("others'", json!({ "type": "LoadBalancer", "loadBalancerClass": "x/y" }), Value::Null, false, None),
        ] {
            let service = event(spec, deleted).object;
            assert_eq!((service.is_ours(), service.health_check()), (is_ours, health_check), "{name}");
            assert!(service.says().is_empty(), "{name}");
        }
    }
}
