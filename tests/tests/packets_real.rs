//! The packet path on networks as they are: small links, fragments, a full turn of the flow table.

use std::{
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::mpsc,
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sheave_tests::{
    client::Way,
    lab::Lab,
    node::Pod,
    objects::{Slice, Svc},
    place::Place,
    wait::{SOON, eventually},
};

/// Longer than any round trip here, and short of a TCP retransmission that would hide a lost error.
const PATIENCE: Duration = Duration::from_secs(5);

/// A NodePort service for TCP and UDP in both families, on target port 7000, served by one pod.
fn serve(lab: &Lab, name: &str, number: u16, pod: &Pod, policy: &str) -> Result<()> {
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
        is_listening.recv_timeout(SOON).context("the server listens")?;
        outside.enter(client)??;
        serving.join().map_err(|_| anyhow::anyhow!("the server panicked"))??
    })
}

/// F33: links in the middle that are smaller than both ends believe. Nothing gets through unless "too big" finds its way
/// back through both translations, to the client and to the backend.
#[test]
fn path_mtu_is_found_through_a_node_port_in_both_directions() -> Result<()> {
    const AMOUNT: usize = 300_000;
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
    serve(&lab, "near", 1, &a, "Cluster")?;
    serve(&lab, "far", 2, &b, "Cluster")?;
    serve(&lab, "seen", 3, &a, "Local")?;
    lab.n1().host.ip("link set pod10 mtu 1320")?;
    lab.n2().host.ip("link set pod20 mtu 1320")?;
    lab.fabric.ip("link set outside mtu 1340")?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    for (pod, port) in [(&a, 30001), (&b, 30002), (&a, 30003)] {
        for v6 in [false, true] {
            let node: IpAddr = if v6 { lab.n1().v6.into() } else { lab.n1().v4.into() };
            let server = |ip: IpAddr, listens: &dyn Fn()| {
                let listener = TcpListener::bind((ip, 7000))?;
                listens();
                let (mut stream, _) = listener.accept()?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let mut bytes = vec![0; AMOUNT];
                stream.read_exact(&mut bytes).context("the server reads")?;
                stream.write_all(&bytes)?;
                Ok(())
            };
            let client = || {
                let mut stream = TcpStream::connect_timeout(&SocketAddr::new(node, port), PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                let sent: Vec<u8> = (0..AMOUNT).map(|i| (i % 251) as u8).collect();
                stream.write_all(&sent)?;
                let mut received = vec![0; AMOUNT];
                stream.read_exact(&mut received).context("the client reads")?;
                ensure!(sent == received, "what came back is not what was sent");
                Ok(())
            };
            with_server(pod, &lab.outside, v6, server, client).with_context(|| format!("port {port}, v6 {v6}"))?;
        }
    }
    Ok(())
}

/// F34: datagrams of several fragments, both ways, to hidden and visible clients.
#[test]
fn fragments_follow_their_first_one() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
    serve(&lab, "near", 1, &a, "Cluster")?;
    serve(&lab, "far", 2, &b, "Cluster")?;
    serve(&lab, "seen", 3, &a, "Local")?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    for (pod, port) in [(&a, 30001), (&b, 30002), (&a, 30003)] {
        for v6 in [false, true] {
            let node: IpAddr = if v6 { lab.n1().v6.into() } else { lab.n1().v4.into() };
            let sizes = [100, 1472, 1473, 4000, 9000, 60_000];
            let server = |ip: IpAddr, listens: &dyn Fn()| {
                let socket = UdpSocket::bind((ip, 7000))?;
                socket.set_read_timeout(Some(PATIENCE))?;
                listens();
                let mut bytes = vec![0; 65_536];
                for _ in sizes {
                    let (length, from) = socket.recv_from(&mut bytes).context("the server receives")?;
                    socket.send_to(&bytes[..length], from)?;
                }
                Ok(())
            };
            let client = || {
                let any: IpAddr = if v6 { "::".parse()? } else { "0.0.0.0".parse()? };
                let socket = UdpSocket::bind((any, 0))?;
                socket.set_read_timeout(Some(PATIENCE))?;
                socket.connect((node, port))?;
                let mut received = vec![0; 65_536];
                for size in sizes {
                    let sent: Vec<u8> = (0..size).map(|i| (i % 251) as u8).collect();
                    socket.send(&sent)?;
                    let length = socket.recv(&mut received).with_context(|| format!("the answer to {size} bytes"))?;
                    ensure!(received[..length] == sent, "{size} bytes came back changed");
                }
                Ok(())
            };
            with_server(pod, &lab.outside, v6, server, client).with_context(|| format!("port {port}, v6 {v6}"))?;
        }
    }
    Ok(())
}

/// A closed port of a backend is told to the client by whoever it dialled, at once.
#[test]
fn a_backends_refusal_reaches_the_client() -> Result<()> {
    let Some(lab) = Lab::new(2)? else { return Ok(()) };
    let (a, b) = (lab.n1().pod(10)?, lab.n2().pod(20)?);
    serve(&lab, "near", 1, &a, "Cluster")?;
    serve(&lab, "far", 2, &b, "Cluster")?;
    serve(&lab, "seen", 3, &a, "Local")?;
    let _agents = [lab.n1().agent()?, lab.n2().agent()?];
    let outside = lab.outside.client()?;
    for way in [Way::Tcp, Way::Udp] {
        for to in [
            "192.0.2.11:30001",
            "192.0.2.11:30002",
            "192.0.2.11:30003",
            "[2001:db8::11]:30001",
            "[2001:db8::11]:30002",
            "[2001:db8::11]:30003",
        ] {
            assert_eq!(outside.outcome(way, to)?, "ECONNREFUSED", "{way:?} {to}");
        }
    }
    Ok(())
}

/// Flows are listed by name while they live and forgotten when they are closed.
#[test]
fn flows_are_listed_and_forgotten() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let a = lab.n1().pod(10)?;
    let _server = a.place.echo("a", &["7000/TCP", "7000/UDP"])?;
    serve(&lab, "near", 1, &a, "Cluster")?;
    let agent = lab.n1().agent()?;
    let outside = lab.outside.client()?;
    let flows = |filter: &[&str]| -> Result<Vec<Value>> {
        let text = agent.sheave(&[&["lb", "list", "--conntrack", "-o", "json"], filter].concat())?;
        let list: Value = serde_json::from_str(&text)?;
        Ok(list["items"].as_array().context("no items")?.clone())
    };
    assert_eq!(flows(&[])?, Vec::<Value>::new());

    let socket = outside.connect(Way::Tcp, "192.0.2.11:30001")?;
    let seen_as = socket.ask()?.answer.client.to_string();
    let listed = flows(&[])?;
    assert_eq!(listed.len(), 1, "{listed:?}");
    for (field, value) in [
        ("protocol", json!("TCP")),
        ("client", json!(socket.local()?.to_string())),
        ("frontend", json!("192.0.2.11:30001")),
        ("backend", json!("10.244.1.10:7000")),
        ("masqueradedAs", json!(seen_as)),
        ("service", json!("t/near")),
        ("state", json!("open")),
    ] {
        assert_eq!(listed[0][field], value, "{field}");
    }
    assert_eq!(flows(&["--client", "198.51.100.0/24"])?.len(), 1);
    assert_eq!(flows(&["--client", "203.0.113.0/24"])?.len(), 0);
    assert_eq!(flows(&["-n", "other"])?.len(), 0);

    drop(socket);
    eventually("both sides have closed", SOON, || {
        let state = flows(&[])?[0]["state"].clone();
        ensure!(state == "closed", "it is {state}");
        Ok(())
    })?;
    eventually("it is forgotten", Duration::from_secs(40), || {
        let left = flows(&[])?;
        ensure!(left.is_empty(), "{left:?}");
        Ok(())
    })
}
