//! `sheave-client`: does on its sockets what `sheave_tests::client` tells it on stdin.
//! `sheave-client tcp|udp|sendto ADDRESS:PORT [COUNT]`: for people, dials and prints who answered.

use std::{
    collections::BTreeMap,
    env,
    io::{self, Read},
    net::{SocketAddr, UdpSocket},
    os::fd::AsRawFd as _,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::errno::Errno as Code;
use serde::Serialize;
use sheave_tests::{
    client::{Errno, Load, LoadKind, Received, Report, Request, Way},
    echo::Answer,
};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

/// How long a load waits for one answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// ICMP's type of a ping.
const ECHO_REQUEST: u8 = 8;
/// The same of ICMPv6.
const ECHO_REQUEST_V6: u8 = 128;
/// Failures that a report tells in words.
const TOLD: usize = 10;

fn main() -> Result<()> {
    let args: Vec<_> = env::args().skip(1).collect();
    if !args.is_empty() {
        return by_hand(&args);
    }
    let mut client = Client::default();
    for line in io::stdin().lines() {
        let request = serde_json::from_str(&line?)?;
        println!("{}", client.serve(&request)?);
    }
    Ok(())
}

/// A person at the keyboard.
fn by_hand(args: &[String]) -> Result<()> {
    let usage = "usage: sheave-client tcp|udp|sendto ADDRESS:PORT [COUNT]";
    let [way, to, count @ ..] = args else { bail!(usage) };
    let way = match way.as_str() {
        "tcp" => Way::Tcp,
        "udp" => Way::Udp,
        "sendto" => Way::UdpSendto,
        _ => bail!(usage),
    };
    let to: SocketAddr = to.parse().context(usage)?;
    for _ in 0..count.first().map_or(Ok(1), |n| n.parse::<u32>())? {
        let start = Instant::now();
        match dial(way, to, PATIENCE) {
            Ok((_, Received { answer, source })) => {
                println!("{} answered from {source}; it saw {} ({:?})", answer.name, answer.client, start.elapsed());
            }
            Err(error) => println!("{} ({:?})", name_of(&error), start.elapsed()),
        }
    }
    Ok(())
}

/// What is open and running.
#[derive(Default)]
struct Client {
    sockets: BTreeMap<usize, (Way, Socket)>,
    loads: BTreeMap<usize, (Arc<Shared>, JoinHandle<()>)>,
    next: usize,
}

/// What a load and its client share.
#[derive(Default)]
struct Shared {
    report: Mutex<Report>,
    stop: AtomicBool,
}

impl Client {
    /// Does one thing; the line to print, a `Result` as JSON.
    fn serve(&mut self, request: &Request) -> Result<String> {
        let start = Instant::now();
        match *request {
            Request::Open { way, like, bind } => reply(start, self.open(way, like, bind)),
            Request::Connect(socket, to, patience) => reply(start, connect(&self.socket(socket)?.1, to, patience)),
            Request::Disconnect(socket) => reply(start, disconnect(&self.socket(socket)?.1)),
            Request::Send(socket, to) => {
                let (way, socket) = self.socket(socket)?;
                reply(start, send(*way, socket, to))
            }
            Request::Receive(number, patience) => {
                let (way, socket) = self.socket(number)?;
                reply(start, receive(*way, socket, patience))
            }
            Request::Peer(socket) => reply(start, self.socket(socket)?.1.peer_addr().and_then(|a| address(&a))),
            Request::Local(socket) => reply(start, self.socket(socket)?.1.local_addr().and_then(|a| address(&a))),
            Request::Close(socket) => {
                self.sockets.remove(&socket);
                reply(start, Ok(()))
            }
            Request::Start(load) => {
                let shared = Arc::new(Shared::default());
                let thread = thread::spawn({
                    let shared = shared.clone();
                    move || run(load, &shared)
                });
                let number = self.number();
                self.loads.insert(number, (shared, thread));
                reply(start, Ok(number))
            }
            Request::Report(load) => {
                let (shared, _) = self.loads.get(&load).context("no such load")?;
                reply(start, Ok(shared.report.lock().unwrap_or_else(PoisonError::into_inner).clone()))
            }
            Request::Stop(load) => {
                let (shared, thread) = self.loads.remove(&load).context("no such load")?;
                shared.stop.store(true, Ordering::Relaxed);
                let _ = thread.join();
                reply(start, Ok(shared.report.lock().unwrap_or_else(PoisonError::into_inner).clone()))
            }
        }
    }

    fn open(&mut self, way: Way, like: SocketAddr, bind: Option<SocketAddr>) -> io::Result<usize> {
        let socket = open(way, like, bind)?;
        let number = self.number();
        self.sockets.insert(number, (way, socket));
        Ok(number)
    }

    fn socket(&self, number: usize) -> Result<&(Way, Socket)> {
        self.sockets.get(&number).context("no such socket")
    }

    fn number(&mut self) -> usize {
        self.next += 1;
        self.next
    }
}

fn open(way: Way, like: SocketAddr, bind: Option<SocketAddr>) -> io::Result<Socket> {
    let (kind, protocol) = match way {
        Way::Tcp => (Type::STREAM, None),
        Way::Mptcp => (Type::STREAM, Some(Protocol::MPTCP)),
        Way::Udp | Way::UdpSendto => (Type::DGRAM, None),
        Way::Ping if like.is_ipv6() => (Type::DGRAM, Some(Protocol::ICMPV6)),
        Way::Ping => (Type::DGRAM, Some(Protocol::ICMPV4)),
    };
    let socket = Socket::new(Domain::for_address(like), kind, protocol)?;
    if let Some(bind) = bind {
        socket.set_reuse_address(true)?;
        socket.bind(&bind.into())?;
    }
    Ok(socket)
}

fn connect(socket: &Socket, to: SocketAddr, patience: Duration) -> io::Result<()> {
    socket.connect_timeout(&to.into(), patience)
}

fn disconnect(socket: &Socket) -> io::Result<()> {
    let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as _, sa_data: [0; 14] };
    // SAFETY: the address lives across the call, which reads no more than its size.
    let result = unsafe { libc::connect(socket.as_raw_fd(), &raw const nobody, size_of_val(&nobody) as _) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn send(way: Way, socket: &Socket, to: Option<SocketAddr>) -> io::Result<()> {
    let is_v6 = socket.domain()? == Domain::IPV6;
    let question: &[u8] = match way {
        Way::Ping if is_v6 => &[ECHO_REQUEST_V6, 0, 0, 0, 0, 0, 0, 0],
        Way::Ping => &[ECHO_REQUEST, 0, 0, 0, 0, 0, 0, 0],
        Way::Tcp | Way::Mptcp | Way::Udp | Way::UdpSendto => b"?\n",
    };
    match to {
        Some(to) => socket.send_to(question, &to.into())?,
        None => socket.send(question)?,
    };
    Ok(())
}

fn receive(way: Way, socket: &Socket, patience: Duration) -> io::Result<Received> {
    socket.set_read_timeout(Some(patience))?;
    let (text, source) = match way {
        Way::Tcp | Way::Mptcp => (line(socket)?, address(&socket.peer_addr()?)?),
        Way::Ping => {
            let length = (&*socket).read(&mut [0; 2048])?;
            let client = address(&socket.local_addr()?)?;
            let answer = Answer { name: format!("{length} bytes"), client };
            return Ok(Received { answer, source: address(&socket.peer_addr()?)? });
        }
        Way::Udp | Way::UdpSendto => {
            let mut buffer = [0; 2048];
            let (length, source) = UdpSocket::from(socket.try_clone()?).recv_from(&mut buffer)?;
            (buffer[..length].to_vec(), source)
        }
    };
    Ok(Received { answer: serde_json::from_slice(&text)?, source })
}

/// One line, read byte by byte: nothing of the next answer is taken.
fn line(mut socket: &Socket) -> io::Result<Vec<u8>> {
    let (mut text, mut byte) = (Vec::new(), [0]);
    loop {
        match socket.read(&mut byte)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            _ if byte == *b"\n" => return Ok(text),
            _ => text.extend(byte),
        }
    }
}

fn address(address: &SockAddr) -> io::Result<SocketAddr> {
    address.as_socket().ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Open, connect, ask.
fn dial(way: Way, to: SocketAddr, patience: Duration) -> io::Result<(Socket, Received)> {
    let socket = open(way, to, None)?;
    let at = if way == Way::UdpSendto {
        Some(to)
    } else {
        connect(&socket, to, patience)?;
        None
    };
    send(way, &socket, at)?;
    let received = receive(way, &socket, patience)?;
    Ok((socket, received))
}

/// A load, until it is told to stop.
fn run(load: Load, shared: &Shared) {
    let Load { way, to, kind, pause } = load;
    let (mut open_socket, mut last) = (None, Instant::now());
    while !shared.stop.load(Ordering::Relaxed) {
        let result = match kind {
            LoadKind::Dial => dial(way, to, PATIENCE).map(|(_, received)| Some(received)),
            LoadKind::Ask => ask(&mut open_socket, way, to).map(Some),
            LoadKind::Send => fire(&mut open_socket, way, to).map(|()| None),
        };
        let mut report = shared.report.lock().unwrap_or_else(PoisonError::into_inner);
        match result {
            Ok(received) => {
                report.answered += 1;
                if let Some(received) = received {
                    *report.names.entry(received.answer.name).or_default() += 1;
                }
                report.longest_gap = report.longest_gap.max(last.elapsed());
                last = Instant::now();
            }
            Err(error) => {
                open_socket = None;
                report.failed += 1;
                if report.failures.len() < TOLD {
                    report.failures.push(name_of(&error));
                }
            }
        }
        drop(report);
        thread::sleep(pause);
    }
    let mut report = shared.report.lock().unwrap_or_else(PoisonError::into_inner);
    report.longest_gap = report.longest_gap.max(last.elapsed());
}

/// One question on a socket that stays open.
fn ask(open_socket: &mut Option<Socket>, way: Way, to: SocketAddr) -> io::Result<Received> {
    if let Some(socket) = open_socket {
        send(way, socket, (way == Way::UdpSendto).then_some(to))?;
        return receive(way, socket, PATIENCE);
    }
    let (socket, received) = dial(way, to, PATIENCE)?;
    *open_socket = Some(socket);
    Ok(received)
}

/// One datagram that nobody waits for an answer to. Errors of earlier ones are told by the kernel on the next.
fn fire(open_socket: &mut Option<Socket>, way: Way, to: SocketAddr) -> io::Result<()> {
    if open_socket.is_none() {
        let socket = open(way, to, None)?;
        if way == Way::Udp {
            connect(&socket, to, PATIENCE)?;
        }
        *open_socket = Some(socket);
    }
    open_socket.as_ref().map_or(Ok(()), |socket| send(way, socket, (way == Way::UdpSendto).then_some(to)))
}

fn reply<T: Serialize>(start: Instant, result: io::Result<T>) -> Result<String> {
    let result = result.map_err(|error| Errno { name: name_of(&error), after: start.elapsed() });
    Ok(serde_json::to_string(&result)?)
}

/// The name of an errno; "TIMEOUT" when nothing came in time, "CLOSED" when the other side has closed.
fn name_of(error: &io::Error) -> String {
    match (error.kind(), error.raw_os_error()) {
        // An ETIMEDOUT of the kernel is something else: whoever dialled was told.
        (io::ErrorKind::TimedOut, None) | (io::ErrorKind::WouldBlock, _) => "TIMEOUT".into(),
        (io::ErrorKind::UnexpectedEof, _) => "CLOSED".into(),
        (_, code) => code.map_or_else(|| error.to_string(), |code| format!("{:?}", Code::from_raw(code))),
    }
}
