//! SCTP through the packet path. Its checksum covers the ports, so they stay what they are, the client's too. For its
//! sockets the kernel has no hook, so that pods' packets are translated as soon as there is an SCTP Service.

use std::{
    io::{Read, Write},
    mem::MaybeUninit,
    net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
    place::Place,
    skip,
    wait::{SOON, eventually},
};
use socket2::{Domain, Protocol, Socket, Type};

const SCTP: Protocol = Protocol::SCTP;
const PATIENCE: Duration = Duration::from_secs(2);

/// An SCTP Service with equal ports, NodePort 30005 and ClusterIP 10.96.0.5, served by a pod; `seen` shows the client.
fn services(lab: &Lab, pod: &Pod) -> Result<()> {
    let slice = |name: &str| {
        Slice::new(name, name).port("n", 30_005, "SCTP").port("c", 7000, "SCTP").ready(&pod.v4.to_string(), "n1")
    };
    let service = Svc::new("web").ip("10.96.0.5").port("n", 30_005, "SCTP").node_port(30_005).port("c", 7000, "SCTP");
    let seen = Svc::new("seen").ip("10.96.0.6").port("s", 30_006, "SCTP").node_port(30_006);
    let seen_slice = Slice::new("seen", "seen").port("s", 30_006, "SCTP").ready(&pod.v4.to_string(), "n1");
    lab.apply(&[&service, &slice("web"), &seen.set("externalTrafficPolicy", json!("Local")), &seen_slice])
}

/// Packets as associations begin with, sent and answered by processes that know the protocol no better than the wire.
#[test]
fn packets_go_there_and_back_unchanged() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (a, inside) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    services(&lab, &a)?;
    let _agent = lab.n1().agent()?;
    for (what, client, to, seen) in [
        ("hidden", &lab.outside, "192.0.2.11:30005", "10.244.1.1"),
        ("seen", &lab.outside, "192.0.2.11:30006", "198.51.100.10"),
        ("a pod", &inside.place, "10.96.0.5:7000", "10.244.1.20"),
    ] {
        let to: SocketAddrV4 = to.parse()?;
        // The pod's device gets its programs when the agent has seen that there is an SCTP Service.
        eventually(what, SOON, || {
            let (source, answer) = exchange(&a.place, client, to)?;
            ensure!(source == seen.parse::<Ipv4Addr>()?, "{what}: the server sees {source}");
            ensure!(answer == [to.port().to_be_bytes(), 5555_u16.to_be_bytes()].concat(), "{what}: {answer:?}");
            Ok(())
        })?;
    }
    Ok(())
}

/// A packet from port 5555 to a Service, and its answer: whom the server saw, and the ports of the answer.
fn exchange(server: &Place, client: &Place, to: SocketAddrV4) -> Result<(Ipv4Addr, Vec<u8>)> {
    let raw = || -> Result<Socket> {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(SCTP))?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        Ok(socket)
    };
    let mut here = client.enter(raw)??;
    let there = server.enter(raw)??;
    here.connect(&SocketAddr::from((*to.ip(), 0)).into())?;
    // Ports, a verification tag, a checksum that nobody here looks at, and the start of an INIT.
    let head = |from: u16, to: u16| [from.to_be_bytes(), to.to_be_bytes()].concat();
    let body = [0, 0, 0, 0, 0xde, 0xad, 0xbe, 0xef, 1, 0, 0, 20];
    here.write_all(&[head(5555, to.port()), body.to_vec()].concat())?;
    let mut packet = [MaybeUninit::uninit(); 200];
    let (length, source) = there.recv_from(&mut packet).context("the server hears nothing")?;
    let source = source.as_socket_ipv4().context("no IPv4")?;
    ensure!(length == 20 + 16, "the server hears {length} bytes");
    there.send_to(&[head(to.port(), 5555), body.to_vec()].concat(), &SocketAddr::from((*source.ip(), 0)).into())?;
    let mut answer = [0; 200];
    let length = here.read(&mut answer).context("the client hears nothing")?;
    ensure!(length == 20 + 16 && answer[24..36] == body, "the client hears {:?}", &answer[..length]);
    Ok((*source.ip(), answer[20..24].to_vec()))
}

/// Real associations, where the kernel can make them.
#[test]
fn associations_carry_messages() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    if lab.outside.enter(|| Socket::new(Domain::IPV4, Type::STREAM, Some(SCTP)))?.is_err() {
        skip("this kernel has no SCTP (CONFIG_IP_SCTP)");
        return Ok(());
    }
    let (a, inside) = (lab.n1().pod(10)?, lab.n1().pod(20)?);
    services(&lab, &a)?;
    let _agent = lab.n1().agent()?;
    for (client, to, listen) in [
        (&lab.outside, "192.0.2.11:30005", 30_005),
        (&lab.outside, "192.0.2.11:30006", 30_006),
        (&inside.place, "10.96.0.5:7000", 7000),
    ] {
        let to: SocketAddr = to.parse()?;
        let (listens, is_listening) = mpsc::channel();
        thread::scope(|scope| {
            let at = SocketAddr::new(IpAddr::V4(a.v4), listen);
            let place = &a.place;
            let serving = scope.spawn(move || place.enter(move || serve_once(at, &listens)));
            is_listening.recv_timeout(SOON).context("the server listens")?;
            let said = client.enter(move || talk(to))??;
            ensure!(said == *b"hello", "{to} answered {said:?}");
            serving.join().map_err(|_| anyhow::anyhow!("the server panicked"))??
        })?;
    }
    Ok(())
}

fn serve_once(at: SocketAddr, listens: &mpsc::Sender<()>) -> Result<()> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, Some(SCTP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&at.into())?;
    socket.listen(4)?;
    let _ = listens.send(());
    let (mut stream, _) = socket.accept()?;
    let mut message = [0; 5];
    stream.read_exact(&mut message)?;
    Ok(stream.write_all(&message)?)
}

fn talk(to: SocketAddr) -> Result<[u8; 5]> {
    let mut socket = Socket::new(Domain::IPV4, Type::STREAM, Some(SCTP))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.connect_timeout(&to.into(), PATIENCE)?;
    socket.write_all(b"hello")?;
    let mut answer = [0; 5];
    socket.read_exact(&mut answer)?;
    Ok(answer)
}
