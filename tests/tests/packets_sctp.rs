//! SCTP through the packet path. Its checksum covers the ports, so they stay what they are, the client's too. For its
//! sockets the kernel has no hook, so that pods' packets are translated as soon as there is an SCTP Service.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, UdpSocket},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sheave_tests::{
    flow_table::age,
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
    packet,
    place::Place,
    skip,
    wait::{SOON, eventually},
};
use socket2::{Domain, Protocol, Socket, Type};

const SCTP: Protocol = Protocol::SCTP;
const PATIENCE: Duration = Duration::from_secs(2);

/// SCTP Services with equal ports, of both families, served by a pod: NodePort 30005 and ClusterIP number 5; NodePort
/// 30006, where that pod sees the client.
fn services(lab: &Lab, pod: &Pod) -> Result<()> {
    let web = Svc::new("web").ip("10.96.0.5").ip("2001:db8:96::5");
    let web = web.port("n", 30_005, "SCTP").node_port(30_005).port("c", 7000, "SCTP");
    let seen = Svc::new("seen").ip("10.96.0.6").ip("2001:db8:96::6").port("s", 30_006, "SCTP").node_port(30_006);
    lab.apply(&[&web, &seen.set("externalTrafficPolicy", json!("Local"))])?;
    for (family, address) in [("IPv4", pod.v4.to_string()), ("IPv6", pod.v6.to_string())] {
        let slice = |service: &str| Slice::new(&format!("{service}-{}", family.to_lowercase()), service);
        let web = slice("web").address_type(family).port("n", 30_005, "SCTP").port("c", 7000, "SCTP");
        let seen = slice("seen").address_type(family).port("s", 30_006, "SCTP");
        lab.apply(&[&web.ready(&address, "n1"), &seen.ready(&address, "n1")])?;
    }
    Ok(())
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
        ("hidden", &lab.outside, "[2001:db8::11]:30005", "2001:db8:1::1"),
        ("seen", &lab.outside, "192.0.2.11:30006", "198.51.100.10"),
        ("seen", &lab.outside, "[2001:db8::11]:30006", "2001:db8:100::10"),
        ("a pod", &inside.place, "10.96.0.5:7000", "10.244.1.20"),
        ("a pod", &inside.place, "[2001:db8:96::5]:7000", "2001:db8:1::20"),
    ] {
        // The pod's device gets its programs when the agent has seen that there is an SCTP Service.
        eventually(&format!("{what}, {to}"), SOON, || {
            let source = exchange(&a.place, client, to.parse()?)?;
            ensure!(source == seen.parse::<IpAddr>()?, "the server sees {source}");
            Ok(())
        })?;
    }
    Ok(())
}

/// The start of an INIT: its header, and what must be there.
const INIT: [u8; 20] = [1, 0, 0, 20, 0xc0, 0xff, 0xee, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1];

/// A packet whose checksum nobody here looks at.
fn sctp(from: u16, to: u16, chunk: &[u8]) -> Vec<u8> {
    [&from.to_be_bytes(), &to.to_be_bytes(), &[0, 0, 0, 0, 0xde, 0xad, 0xbe, 0xef][..], chunk].concat()
}

/// Packets of a protocol, from its header on.
struct Raw {
    socket: UdpSocket, // in all but what it was opened as
    ip_header: usize,
}

impl Raw {
    fn open(place: &Place, domain: Domain, protocol: Protocol) -> Result<Self> {
        let socket: UdpSocket = place.enter(move || Socket::new(domain, Type::RAW, Some(protocol)))??.into();
        socket.set_read_timeout(Some(Duration::from_millis(500)))?;
        Ok(Self { socket, ip_header: if domain == Domain::IPV4 { 20 } else { 0 } })
    }

    fn send(&self, packet: &[u8], to: IpAddr) -> Result<()> {
        self.socket.send_to(packet, (to, 0))?;
        Ok(())
    }

    fn receive(&self) -> Result<(IpAddr, Vec<u8>)> {
        let mut packet = [0; 2048];
        let (length, source) = self.socket.recv_from(&mut packet)?;
        Ok((source.ip(), packet[self.ip_header..length].to_vec()))
    }
}

/// A packet from port 5555 to a Service, and its answer, unchanged on their ways; whom the server saw.
fn exchange(server: &Place, client: &Place, to: SocketAddr) -> Result<IpAddr> {
    let domain = Domain::for_address(to);
    let (here, there) = (Raw::open(client, domain, SCTP)?, Raw::open(server, domain, SCTP)?);
    let (question, answer) = (sctp(5555, to.port(), &INIT), sctp(to.port(), 5555, &INIT));
    here.send(&question, to.ip())?;
    let (source, heard) = there.receive().context("the server hears nothing")?;
    ensure!(heard == question, "the server hears {heard:?}");
    there.send(&answer, source)?;
    let (from, heard) = here.receive().context("the client hears nothing")?;
    ensure!(from == to.ip() && heard == answer, "the client hears {heard:?} of {from}");
    Ok(source)
}

/// V-1, V-4: what would open an association is refused by the ICMP error that netfilter's REJECT gives; what belongs to
/// an unknown one is dropped.
#[test]
fn what_nobody_takes_is_refused_by_an_icmp_error() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let inside = lab.n1().pod(20)?;
    let none = Svc::new("none").ip("10.96.0.7").ip("2001:db8:96::7").port("n", 7000, "SCTP").node_port(30_007);
    lab.apply(&[&none.set("externalIPs", json!(["203.0.113.7", "2001:db8:203::7"]))])?;
    for prefix in ["203.0.113.0/24", "2001:db8:203::/64"] {
        lab.route(prefix, lab.n1())?;
    }
    let _agent = lab.n1().agent()?;
    for (row, client, to) in [
        ("V-1, from outside", &lab.outside, "192.0.2.11:30007"),
        ("V-1, from outside", &lab.outside, "203.0.113.7:7000"),
        ("V-1, from outside", &lab.outside, "[2001:db8::11]:30007"),
        ("V-1, from outside", &lab.outside, "[2001:db8:203::7]:7000"),
        ("F31, from outside", &lab.outside, "203.0.113.7:7001"),
        ("F31, from outside", &lab.outside, "[2001:db8:203::7]:7001"),
        ("V-1, from a pod", &inside.place, "10.96.0.7:7000"),
        ("V-1, from a pod", &inside.place, "[2001:db8:96::7]:7000"),
        ("V-4, from a pod", &inside.place, "10.96.0.7:7001"),
        ("V-4, from a pod", &inside.place, "[2001:db8:96::7]:7001"),
    ] {
        // The pod's device gets its programs when the agent has seen that there is an SCTP Service.
        eventually(&format!("{row}, {to}"), SOON, || is_refused(client, to.parse()?))?;
    }
    Ok(())
}

fn is_refused(client: &Place, to: SocketAddr) -> Result<()> {
    let (domain, is_v6) = (Domain::for_address(to), to.is_ipv6());
    let (protocol, unreachable) = if is_v6 { (Protocol::ICMPV6, [1, 4]) } else { (Protocol::ICMPV4, [3, 3]) };
    let (mouth, ear) = (Raw::open(client, domain, SCTP)?, Raw::open(client, domain, protocol)?);
    // Data first: its error would be the first to come.
    mouth.send(&sctp(5554, to.port(), &[&[0], &INIT[1..]].concat()), to.ip())?;
    let opening = sctp(5555, to.port(), &INIT);
    mouth.send(&opening, to.ip())?;
    loop {
        let (source, error) = ear.receive().context("no error comes")?;
        if error[..2] != unreachable {
            continue; // neighbours are looked for by ICMPv6, too
        }
        // The kernel looks at checksums of ICMPv6 itself.
        ensure!(is_v6 || packet::sum(0, &error) == 0xffff, "the checksum is wrong: {error:02x?}");
        let quoted = packet::ip(&error, 8, is_v6).with_context(|| format!("nothing is quoted: {error:02x?}"))?;
        ensure!((source, quoted.dst) == (to.ip(), to.ip()), "{source} says it of {quoted:?}");
        ensure!(error[quoted.l4..] == opening, "it quotes {:02x?}", &error[quoted.l4..]);
        return Ok(());
    }
}

/// Whoever sends with somebody else's address has the errors sent to that one: no more than a kernel would send.
#[test]
fn errors_have_a_limit() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let none = Svc::new("none").ip("10.96.0.7").ip("2001:db8:96::7").port("n", 7000, "SCTP").node_port(30_007);
    lab.apply(&[&none])?;
    let agent = lab.n1().agent()?;
    for to in ["192.0.2.11:30007".parse::<SocketAddr>()?, "[2001:db8::11]:30007".parse()?] {
        eventually("the first one is refused", SOON, || is_refused(&lab.outside, to))?;
        let counted = |name| anyhow::Ok(agent.status()?.counters.get(name).copied().unwrap_or_default());
        let (unanswered, refused) = (counted("packet_error_limit")?, counted("packet_reject")?);
        let mouth = Raw::open(&lab.outside, Domain::for_address(to), SCTP)?;
        let opening = sctp(5555, to.port(), &INIT);
        eventually("there are too many", SOON, || {
            (0..500).try_for_each(|_| mouth.send(&opening, to.ip()))?;
            ensure!(counted("packet_error_limit")? > unanswered, "all are answered");
            Ok(())
        })?;
        let (unanswered, refused) = (counted("packet_error_limit")? - unanswered, counted("packet_reject")? - refused);
        assert!(unanswered < refused, "{to}: {unanswered} of {refused} are not answered");
        eventually("the next one is refused", SOON, || is_refused(&lab.outside, to))?;
    }
    Ok(())
}

/// Two flows of one client port and one backend would be the same packets there, and SCTP's ports stay what they are: the
/// second one is dropped while the first one lasts. That ends in time, though no agent is there to remove it.
#[test]
fn an_older_flow_is_in_the_way_while_it_lasts() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let a = lab.n1().pod(10)?;
    services(&lab, &a)?;
    lab.route("10.96.0.0/16", lab.n1())?;
    let mut agent = lab.n1().agent()?;
    let [older, newer]: [SocketAddr; 2] = ["192.0.2.11:30005".parse()?, "10.96.0.5:30005".parse()?];
    let reaches = |to| exchange(&a.place, &lab.outside, to);
    let is_dropped = |to| reaches(to).is_err_and(|error| error.to_string() == "the server hears nothing");
    eventually("the older flow", SOON, || reaches(older))?;
    assert!(is_dropped(newer), "the newer one is dropped");
    assert_eq!(agent.status()?.counters.get("packet_clash"), Some(&1));
    agent.kill()?;
    assert!(is_dropped(newer), "it is dropped without an agent, too");
    age(lab.n1(), 211)?;
    reaches(newer).context("the older one is over")?;
    assert!(is_dropped(older), "from now on it is the other way round");
    Ok(())
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
