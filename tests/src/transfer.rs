//! Bytes to a NodePort and back, whole: for networks as they are, where packets are cut, dropped and summed on the way.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    setsockopt_impl,
    sys::socket::{setsockopt, sockopt::SetStruct},
};
use serde_json::json;
use socket2::SockRef;

use crate::{
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
    place::Place,
    wait::{SOON, slowness},
};

/// Longer than any round trip here, and short of a TCP retransmission that would hide a lost error; an emulated machine
/// is given more.
fn patience() -> Duration {
    Duration::from_secs(5) * slowness()
}

/// A NodePort service for TCP and UDP in both families, on target port 7000, served by one pod.
///
/// # Errors
/// When a manifest cannot be written.
pub fn serve(lab: &Lab, name: &str, number: u16, pod: &Pod, policy: &str) -> Result<()> {
    let node = if pod.v4.octets()[2] == 1 { "n1" } else { "n2" };
    let node_port = 30_000 + number;
    let service = Svc::new(name).ip(&format!("10.96.0.{number}")).ip(&format!("2001:db8:96::{number}"));
    let service = service.port("t", 80, "TCP").node_port(node_port).port("u", 80, "UDP").node_port(node_port);
    lab.apply(&[&service.set("externalTrafficPolicy", json!(policy))])?;
    for (family, address) in [("v4", pod.v4.to_string()), ("v6", pod.v6.to_string())] {
        let slice = Slice::new(&format!("{name}-{family}"), name);
        lab.apply(&[&slice.port("t", 7000, "TCP").port("u", 7000, "UDP").ready(&address, node)])?;
    }
    Ok(())
}

/// A pod on each of two nodes, and [`serve_near_far_seen`].
///
/// # Errors
/// When a pod or a manifest cannot be made.
pub fn near_far_seen(lab: &Lab) -> Result<(Pod, Pod)> {
    let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
    serve_near_far_seen(lab, &a, &b)?;
    Ok((a, b))
}

/// Serves masqueraded (30001 by n1's pod, 30002 by n2's) and seen (30003 by n1's).
///
/// # Errors
/// When a manifest cannot be written.
pub fn serve_near_far_seen(lab: &Lab, a: &Pod, b: &Pod) -> Result<()> {
    serve(lab, "near", 1, a, "Cluster")?;
    serve(lab, "far", 2, b, "Cluster")?;
    serve(lab, "seen", 3, a, "Local")
}

/// Runs a server in a pod while a client runs outside. Both bind to whatever family they are given.
fn with_server<S, C>(pod: &Pod, outside: &Place, v6: bool, server: S, client: C) -> Result<()>
where
    S: FnOnce(IpAddr, &dyn Fn()) -> Result<()> + Send,
    C: FnOnce() -> Result<()> + Send,
{
    let ip: IpAddr = if v6 { pod.v6.into() } else { pod.v4.into() };
    thread::scope(|scope| {
        let (listening, is_listening) = mpsc::channel();
        let serving = scope.spawn(move || {
            pod.place.enter(move || {
                server(ip, &|| {
                    let _ = listening.send(());
                })
            })
        });
        if is_listening.recv_timeout(SOON).is_err() {
            serving.join().map_err(|_| anyhow::anyhow!("the server panicked"))??.context("the server")?;
            bail!("the server does not listen");
        }
        outside.enter(client)??;
        serving.join().map_err(|_| anyhow::anyhow!("the server panicked"))??
    })
}

/// A stream of bytes there and back, whole.
fn transfer(pod: &Pod, outside: &Place, node: IpAddr, port: u16) -> Result<()> {
    const AMOUNT: usize = 300_000;
    let server = |ip: IpAddr, listens: &dyn Fn()| {
        let listener = TcpListener::bind((ip, 7000))?;
        SockRef::from(&listener).set_read_timeout(Some(patience()))?; // accept(2) ends with it, too
        listens();
        let (mut stream, _) = listener.accept().context("the server accepts")?;
        stream.set_read_timeout(Some(patience()))?;
        let mut bytes = vec![0; AMOUNT];
        stream.read_exact(&mut bytes).context("the server reads")?;
        stream.write_all(&bytes)?;
        Ok(())
    };
    let client = || {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::new(node, port), patience())?;
        stream.set_read_timeout(Some(patience()))?;
        let sent: Vec<u8> = (0..AMOUNT).map(|i| (i % 251) as u8).collect();
        stream.write_all(&sent)?;
        let mut received = vec![0; AMOUNT];
        stream.read_exact(&mut received).context("the client reads")?;
        ensure!(sent == received, "what came back is not what was sent");
        Ok(())
    };
    with_server(pod, outside, node.is_ipv6(), server, client)
}

/// Datagrams of several sizes there and back, whole. What both ends send is as `prepare` makes their sockets send it.
fn datagrams(
    pod: &Pod,
    outside: &Place,
    (node, port): (IpAddr, u16),
    prepare: impl Fn(&UdpSocket) -> Result<()> + Sync,
) -> Result<()> {
    const SIZES: [usize; 6] = [100, 1472, 1473, 4000, 9000, 60_000];
    let server = |ip: IpAddr, listens: &dyn Fn()| {
        let socket = UdpSocket::bind((ip, 7000))?;
        prepare(&socket)?;
        socket.set_read_timeout(Some(patience()))?;
        listens();
        let mut bytes = vec![0; 65_536];
        loop {
            match socket.recv_from(&mut bytes).context("the server receives")? {
                (0, _) => return Ok(()),
                (length, from) => socket.send_to(&bytes[..length], from)?,
            };
        }
    };
    let client = || {
        let any: IpAddr = if node.is_ipv6() { "::".parse()? } else { "0.0.0.0".parse()? };
        let socket = UdpSocket::bind((any, 0))?;
        prepare(&socket)?;
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        socket.connect((node, port))?;
        let mut received = vec![0; 65_536];
        for size in SIZES {
            let sent: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
            // The first one of a size may be lost to "too big", there and back: both ends know then.
            let is_answered = (0..4).any(|_| {
                let mut answers = std::iter::from_fn(|| socket.recv(&mut received).ok());
                socket.send(&sent).is_ok() && answers.any(|length| length == size) // others come late
            });
            ensure!(is_answered, "no answer to {size} bytes");
            ensure!(received[..size] == sent, "{size} bytes came back changed");
        }
        socket.send(&[])?;
        Ok(())
    };
    with_server(pod, outside, node.is_ipv6(), server, client)
}

/// What [`near_far_seen`] serves is reached, when somebody has changed the nodes' network before the first one's agent
/// starts. The second has none: what comes to its pod is no Service's any more.
///
/// # Errors
/// What does not arrive.
pub fn in_both_families(change: impl FnOnce(&Lab) -> Result<()>) -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = near_far_seen(&lab)?;
    change(&lab)?;
    let _agent = lab.n1().agent()?;
    reached(&lab, &a, &b)
}

/// Streams and datagrams from outside to all that [`near_far_seen`] serves, in both families.
///
/// # Errors
/// What does not arrive.
pub fn reached(lab: &Lab, a: &Pod, b: &Pod) -> Result<()> {
    for (pod, port) in [(a, 30001), (b, 30002), (a, 30003)] {
        for node in [IpAddr::from(lab.n1().v4), IpAddr::from(lab.n1().v6)] {
            transfer(pod, &lab.outside, node, port).with_context(|| format!("a stream to {node} port {port}"))?;
            let datagrams = datagrams(pod, &lab.outside, (node, port), |_| Ok(()));
            datagrams.with_context(|| format!("datagrams to {node} port {port}"))?;
        }
    }
    Ok(())
}

/// Datagrams behind IPv6 extension headers, whole and in fragments, from outside to all that [`near_far_seen`] serves, and
/// answers of the same kind.
///
/// # Errors
/// What does not arrive.
pub fn reached_behind_extensions(lab: &Lab, a: &Pod, b: &Pod) -> Result<()> {
    // The header that follows, the length, and an option of nothing (RFC 8200, 4.2).
    const PADDING: [u8; 8] = [0, 0, 1, 4, 0, 0, 0, 0];
    for (pod, port) in [(a, 30001), (b, 30002), (a, 30003)] {
        for (name, hop_by_hop, destination) in
            [("hop-by-hop options", true, false), ("destination options", false, true), ("both", true, true)]
        {
            let with_options = |socket: &UdpSocket| {
                if hop_by_hop {
                    setsockopt(socket, HopByHop, &PADDING).context("IPV6_HOPOPTS")?;
                }
                if destination {
                    setsockopt(socket, Destination, &PADDING).context("IPV6_DSTOPTS")?;
                }
                Ok(())
            };
            let datagrams = datagrams(pod, &lab.outside, (lab.n1().v6.into(), port), with_options);
            datagrams.with_context(|| format!("datagrams with {name} to port {port}"))?;
        }
    }
    Ok(())
}

/// Extension headers that the kernel puts before the ports of all that a socket sends.
#[derive(Clone)]
struct HopByHop;
setsockopt_impl!(HopByHop, libc::IPPROTO_IPV6, libc::IPV6_HOPOPTS, [u8; 8], SetStruct<[u8; 8]>);
#[derive(Clone)]
struct Destination;
setsockopt_impl!(Destination, libc::IPPROTO_IPV6, libc::IPV6_DSTOPTS, [u8; 8], SetStruct<[u8; 8]>);
