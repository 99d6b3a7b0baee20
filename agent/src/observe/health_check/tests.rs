//! The healthCheckNodePort server as kube-proxy 1.36 has it.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    future, io,
    net::{IpAddr, SocketAddr},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::net::TcpStream;

use super::{HealthCheck, HealthChecks, Http, Listen, Servers, reply};
use crate::{
    model::{Family, ServiceName},
    observe::{
        health::SharedHealth,
        server::{Stack, bind},
    },
    plan::node_ports::NodePortAddresses,
    source::convert::fixtures::service_name,
};

/// What is open: address → whose, and its count.
type Open = Rc<RefCell<BTreeMap<SocketAddr, (ServiceName, Arc<AtomicUsize>)>>>;

/// Opens nothing but remembers.
#[derive(Default)]
struct Fake {
    open: Open,
    taken: Rc<RefCell<BTreeSet<SocketAddr>>>,
}

struct Listener {
    open: Open,
    addresses: Vec<SocketAddr>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.open.borrow_mut().retain(|address, _| !self.addresses.contains(address));
    }
}

impl Listen for Fake {
    type Listener = Listener;

    fn listen(
        &mut self,
        service: &ServiceName,
        addresses: &[SocketAddr],
        local_ready: &Arc<AtomicUsize>,
    ) -> io::Result<Listener> {
        let mut listener = Listener { open: self.open.clone(), addresses: Vec::new() };
        for address in addresses {
            if self.taken.borrow().contains(address) || self.open.borrow().contains_key(address) {
                return Err(io::ErrorKind::AddrInUse.into());
            }
            self.open.borrow_mut().insert(*address, (service.clone(), local_ready.clone()));
            listener.addresses.push(*address);
        }
        Ok(listener)
    }

    fn close(&mut self, listener: Listener) -> impl Future<Output = ()> + Send {
        drop(listener);
        future::ready(())
    }
}

/// `a/b 18, c/d 3`
fn numbers(text: &str) -> BTreeMap<ServiceName, usize> {
    let entries = text.split(", ").filter(|entry| !entry.is_empty());
    entries.map(|entry| entry.split_once(' ').unwrap()).map(|(n, c)| (service_name(n), c.parse().unwrap())).collect()
}

fn ports(text: &str) -> BTreeMap<ServiceName, u16> {
    numbers(text).into_iter().map(|(name, port)| (name, u16::try_from(port).unwrap())).collect()
}

/// `a/b 0.0.0.0:9376 200 18`, in order of the addresses.
fn shown(open: &Open, healthy: bool) -> String {
    let line = |(address, (service, count)): (&SocketAddr, &(ServiceName, Arc<AtomicUsize>))| {
        let count = count.load(Ordering::Relaxed);
        let (code, body) = reply(service, count, healthy);
        assert!(body.contains(&format!("\"serviceProxyHealthy\": {healthy}\n")), "{body}");
        format!("{service} {address} {} {count}", code.as_u16())
    };
    open.borrow().iter().map(line).collect::<Vec<_>>().join(", ")
}

const ANY: &[IpAddr] = &[IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED)];

enum Step {
    Services(&'static str),
    Endpoints(&'static str),
    Healthy(bool),
}
use Step::{Endpoints, Healthy, Services};

#[tokio::test]
async fn listeners_follow_services_and_answers_follow_endpoints() {
    let fake = Fake::default();
    let open = fake.open.clone();
    let mut servers = Servers::new(fake);
    let mut healthy = true;
    for (row, step, expected) in [
        ("HC-1 no Services", Services(""), ""),
        ("HC-1 no endpoints", Endpoints(""), ""),
        ("HC-1 endpoints only", Endpoints("a/b 93"), ""),
        ("HC-2", Services("a/b 9376"), "a/b 0.0.0.0:9376 503 0"),
        ("HC-3", Endpoints("a/b 18"), "a/b 0.0.0.0:9376 200 18"),
        ("HC-4", Endpoints("a/b 0"), "a/b 0.0.0.0:9376 503 0"),
        ("HC-5", Endpoints("a/b 11"), "a/b 0.0.0.0:9376 200 11"),
        ("HC-6", Endpoints(""), "a/b 0.0.0.0:9376 503 0"),
        ("HC-7 endpoints", Endpoints("a/b 18"), "a/b 0.0.0.0:9376 200 18"),
        ("HC-7", Services(""), ""),
        (
            "HC-8",
            Services("a/b 9376, c/d 12909, e/f 11113"),
            "a/b 0.0.0.0:9376 503 0, e/f 0.0.0.0:11113 503 0, c/d 0.0.0.0:12909 503 0",
        ),
        (
            "HC-9",
            Endpoints("a/b 9, c/d 3, e/f 7"),
            "a/b 0.0.0.0:9376 200 9, e/f 0.0.0.0:11113 200 7, c/d 0.0.0.0:12909 200 3",
        ),
        (
            "HC-10",
            Services("c/d 12909, e/f 11114, g/h 11878"),
            "e/f 0.0.0.0:11114 503 0, g/h 0.0.0.0:11878 503 0, c/d 0.0.0.0:12909 200 3",
        ),
        (
            "HC-11",
            Endpoints("a/b 9, c/d 3, e/f 7, g/h 6"),
            "e/f 0.0.0.0:11114 200 7, g/h 0.0.0.0:11878 200 6, c/d 0.0.0.0:12909 200 3",
        ),
        (
            "HC-12",
            Endpoints("e/f 7, g/h 6"),
            "e/f 0.0.0.0:11114 200 7, g/h 0.0.0.0:11878 200 6, c/d 0.0.0.0:12909 503 0",
        ),
        ("HC-13", Healthy(false), "e/f 0.0.0.0:11114 503 7, g/h 0.0.0.0:11878 503 6, c/d 0.0.0.0:12909 503 0"),
        ("HC-14", Healthy(true), "e/f 0.0.0.0:11114 200 7, g/h 0.0.0.0:11878 200 6, c/d 0.0.0.0:12909 503 0"),
    ] {
        match step {
            Services(text) => assert!(servers.sync_services(ANY, &ports(text)).await.is_empty(), "{row}"),
            Endpoints(text) => servers.sync_endpoints(&numbers(text)),
            Healthy(is) => healthy = is,
        }
        assert_eq!(shown(&open, healthy), expected, "{row}");
    }
}

#[tokio::test]
async fn listeners_are_on_the_node_port_addresses() {
    // HC-15
    let addresses: NodePortAddresses = "127.0.0.0/8".parse().unwrap();
    let interfaces = ["10.0.0.1", "127.0.0.1"].map(|ip| ip.parse().unwrap());
    let served = addresses.of_family(Family::V4, &[], &interfaces);
    let fake = Fake::default();
    let open = fake.open.clone();
    let mut servers = Servers::new(fake);
    assert!(servers.sync_services(&served.addresses, &ports("a/b 9376")).await.is_empty());
    assert_eq!(shown(&open, true), "a/b 127.0.0.1:9376 503 0");
}

#[tokio::test]
async fn a_taken_port_is_tried_again_and_is_served_everywhere_or_nowhere() {
    // HC-16
    let fake = Fake::default();
    let (open, taken) = (fake.open.clone(), fake.taken.clone());
    let mut servers = Servers::new(fake);
    let check = HealthCheck { port: 9376, local_ready: 2 };
    let addresses = ["192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().unwrap());
    let wanted = HealthChecks { addresses: addresses.into(), services: BTreeMap::from([(service_name("a/b"), check)]) };
    taken.borrow_mut().insert("[2001:db8::1]:9376".parse().unwrap());
    let failed = servers.sync(&wanted).await;
    assert_eq!((failed.len(), failed[0].port), (1, 9376));
    assert_eq!(shown(&open, true), "");
    taken.borrow_mut().clear();
    assert!(servers.sync(&wanted).await.is_empty());
    assert_eq!(shown(&open, true), "a/b 192.0.2.1:9376 200 2, a/b [2001:db8::1]:9376 200 2");
}

#[tokio::test]
async fn a_port_that_moves_is_free_at_once() {
    let port = bind("127.0.0.1:0".parse().unwrap(), Stack::Single).unwrap().local_addr().unwrap().port();
    let mut servers = Servers::new(Http { health: SharedHealth::default() });
    for (row, addresses, name) in [
        ("opened", &["127.0.0.1"][..], "a/b"),
        ("the node has one more address", &["127.0.0.1", "127.0.0.2"], "a/b"),
        ("every address", &["0.0.0.0"], "a/b"),
        ("one again", &["127.0.0.2"], "a/b"),
        ("another Service has the port", &["127.0.0.2"], "c/d"),
    ] {
        let addresses: Vec<_> = addresses.iter().map(|ip| ip.parse().unwrap()).collect();
        let failed = servers.sync_services(&addresses, &BTreeMap::from([(service_name(name), port)])).await;
        assert!(failed.is_empty(), "{row}: {failed:?}");
        // The server is at work, as it is when something changes.
        drop(TcpStream::connect((addresses[0], port)).await.expect(row));
    }
}

#[test]
fn the_body_is_that_of_kube_proxy() {
    let (_, body) = reply(&service_name("ns/svc"), 2, true);
    let expected = "{\n\t\"service\": {\n\t\t\"namespace\": \"ns\",\n\t\t\"name\": \"svc\"\n\t},\n\t\"localEndpoints\": \
                    2,\n\t\"serviceProxyHealthy\": true\n}";
    assert_eq!(body, expected);
}
