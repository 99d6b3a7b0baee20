//! `sheave-echo NAME PORT/TCP ADDRESS:PORT/UDP …`: see `sheave_tests::echo`. Says "ready" when it listens; to each line "seen"
//! on stdin it says how many connections and datagrams there were.

use std::{
    env,
    io::{self, BufRead, BufReader, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use anyhow::{Context, Result, bail};
use sheave_tests::echo::Answer;
use socket2::{Domain, Protocol, Socket, Type};

static SEEN: AtomicU64 = AtomicU64::new(0);

fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let name: &'static str = args.next().context("usage: sheave-echo NAME PORT/PROTOCOL …")?.leak();
    for arg in args {
        let (port, protocol) = arg.split_once('/').with_context(|| format!("{arg} is not PORT/PROTOCOL"))?;
        // One socket for both families: IPV6_V6ONLY is off by default on Linux.
        let at = match port.parse() {
            Ok(port) => SocketAddr::from(([0u16; 8], port)),
            Err(_) => port.parse().with_context(|| format!("{port} is neither a port nor an address and a port"))?,
        };
        match protocol {
            "TCP" => {
                let listener = TcpListener::bind(at).context(arg)?;
                thread::spawn(move || listener.incoming().flatten().for_each(|stream| accept(name, stream)));
            }
            "MPTCP" => {
                let listener = Socket::new(Domain::IPV6, Type::STREAM, Some(Protocol::MPTCP))?;
                listener.bind(&at.into()).context(arg)?;
                listener.listen(128)?;
                let listener = TcpListener::from(listener);
                thread::spawn(move || listener.incoming().flatten().for_each(|stream| accept(name, stream)));
            }
            "UDP" => {
                let socket = UdpSocket::bind(at).context(arg)?;
                thread::spawn(move || datagrams(name, &socket));
            }
            other => bail!("{other} is none of TCP, MPTCP and UDP"),
        }
    }
    println!("ready");
    for line in io::stdin().lines() {
        match line?.as_str() {
            "seen" => println!("{}", SEEN.load(Ordering::Relaxed)),
            other => bail!("no such order: {other}"),
        }
    }
    loop {
        thread::park(); // stdin is closed, a demo goes on
    }
}

/// One connection: a line for a line.
fn accept(name: &'static str, stream: TcpStream) {
    SEEN.fetch_add(1, Ordering::Relaxed);
    thread::spawn(move || -> io::Result<()> {
        let answer = answer(name, stream.peer_addr()?);
        let mut writer = stream.try_clone()?;
        for line in BufReader::new(stream).lines() {
            line?;
            writer.write_all(format!("{answer}\n").as_bytes())?;
        }
        Ok(())
    });
}

/// Every datagram: a datagram.
fn datagrams(name: &str, socket: &UdpSocket) {
    let mut buffer = [0; 2048];
    loop {
        // An error here is an ICMP message about an earlier answer: the client has gone. Not our concern.
        if let Ok((_, client)) = socket.recv_from(&mut buffer) {
            SEEN.fetch_add(1, Ordering::Relaxed);
            let _ = socket.send_to(answer(name, client).as_bytes(), client);
        }
    }
}

fn answer(name: &str, client: SocketAddr) -> String {
    let address: IpAddr = client.ip().to_canonical();
    let answer = Answer { name: name.to_owned(), client: SocketAddr::new(address, client.port()) };
    serde_json::to_string(&answer).unwrap_or_default()
}
