//! A process in a pod that dials or answers, as fast as it can, on one CPU. Told what to do by lines of JSON on stdin;
//! the loops themselves do no more than the system calls that are measured.

use std::{
    fs,
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::{cluster::VIP, numbers::quantile};

/// Takes connections, says the last byte of the address that was reached, closes. Echoes datagrams.
pub const PORT: u16 = 7000;
/// Takes connections and echoes on them.
pub const ECHO_PORT: u16 = 7001;
/// Connections that wait to be accepted: a whole batch may.
const BACKLOG: i32 = 4096;
/// What an established connection asks and answers.
const QUESTION: [u8; 64] = [b'?'; 64];
/// Between two dials while waiting for a change: short against what is measured, long enough to let the agent run.
const GLANCE: Duration = Duration::from_micros(100);

/// What a worker can do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Answers on all ports until it is killed.
    Serve,
    /// Connects, reads a byte, closes, so often.
    Connect(SocketAddr, u32),
    /// Asks and waits for the answer, so often, on one connection.
    Ask(SocketAddr, u32),
    /// Sends a datagram on an unconnected socket and waits for its echo, so often.
    Datagrams(SocketAddr, u32),
    /// The same, on a new socket each time: every datagram begins a flow.
    Fresh(SocketAddr, u32),
    /// Renames a file into place, then dials the Service until that server answers.
    Follow {
        /// The new text.
        from: PathBuf,
        /// The manifest.
        to: PathBuf,
        /// Its new backend.
        server: Ipv4Addr,
    },
    /// Dials the Service until that server answers.
    Await(Ipv4Addr),
}

/// How long one operation took, in microseconds.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Took {
    /// Half of them were faster.
    pub p50: f64,
    /// 99 of 100 were faster.
    pub p99: f64,
}

/// Does what stdin says, bound to that CPU, until stdin ends.
///
/// # Errors
/// The first that goes wrong; the other end then sees the end of stdout.
pub fn run(cpu: usize) -> Result<()> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &cpus).with_context(|| format!("cannot run on CPU {cpu}"))?;
    for line in io::stdin().lines() {
        let took = obey(serde_json::from_str(&line?)?)?;
        println!("{}", serde_json::to_string(&took)?);
    }
    Ok(())
}

fn obey(order: Order) -> Result<Took> {
    match order {
        Order::Serve => serve().map(|()| Took { p50: 0.0, p99: 0.0 }),
        Order::Connect(to, times) => repeat(times, || dial(to).map(|(took, _)| took)),
        Order::Ask(to, times) => {
            let mut stream = TcpStream::connect(to)?;
            stream.set_nodelay(true)?;
            let mut answer = QUESTION;
            repeat(times, || {
                let begin = Instant::now();
                stream.write_all(&QUESTION)?;
                stream.read_exact(&mut answer)?;
                Ok(begin.elapsed())
            })
        }
        Order::Datagrams(to, times) => {
            let socket = datagrams()?;
            repeat(times, || exchange(&socket, to))
        }
        Order::Fresh(to, times) => repeat(times, || exchange(&datagrams()?, to)),
        Order::Follow { from, to, server } => follow(server, || Ok(fs::rename(from, to)?)),
        Order::Await(server) => follow(server, || Ok(())),
    }
}

fn datagrams() -> Result<UdpSocket> {
    let socket = UdpSocket::bind("0.0.0.0:0")?;
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    Ok(socket)
}

/// A datagram and its echo.
fn exchange(socket: &UdpSocket, to: SocketAddr) -> Result<Duration> {
    let mut answer = QUESTION;
    let begin = Instant::now();
    socket.send_to(&QUESTION, to)?;
    let (_, from) = socket.recv_from(&mut answer)?;
    let took = begin.elapsed();
    ensure!(from == to, "{to} was asked, {from} answered");
    Ok(took)
}

/// How long it takes from the beginning of `change` until the Service leads to that server.
fn follow(server: Ipv4Addr, change: impl FnOnce() -> Result<()>) -> Result<Took> {
    let to = SocketAddr::from((VIP, PORT));
    let begin = Instant::now();
    change()?;
    while dial(to)?.1 != server.octets()[3] {
        if begin.elapsed() > Duration::from_secs(10) {
            bail!("{to} does not lead to {server} within ten seconds");
        }
        thread::sleep(GLANCE);
    }
    let took = micros(begin.elapsed());
    Ok(Took { p50: took, p99: took })
}

fn repeat(times: u32, mut once: impl FnMut() -> Result<Duration>) -> Result<Took> {
    let mut took = (0..times).map(|_| once().map(micros)).collect::<Result<Vec<_>>>()?;
    took.sort_by(f64::total_cmp);
    Ok(Took { p50: quantile(&took, 0.5), p99: quantile(&took, 0.99) })
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// Connects, reads who answers, closes. How long connect() alone took, and the last part of the server's address.
fn dial(to: SocketAddr) -> Result<(Duration, u8)> {
    let mut socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_linger(Some(Duration::ZERO))?; // a reset leaves no TIME_WAIT: ports would run out within seconds
    let begin = Instant::now();
    socket.connect(&to.into()).with_context(|| format!("connect to {to}"))?;
    let took = begin.elapsed();
    let mut name = [0];
    socket.read_exact(&mut name)?;
    Ok((took, name[0]))
}

/// A server's thread each; they end with the process.
fn serve() -> Result<()> {
    accept(ECHO_PORT, |mut stream| {
        let mut question = QUESTION;
        let _ = stream.set_nodelay(true);
        while stream.read_exact(&mut question).is_ok() && stream.write_all(&question).is_ok() {}
    })?;
    accept(PORT, |mut stream| {
        if let Ok(SocketAddr::V4(own)) = stream.local_addr() {
            let _ = stream.write_all(&own.ip().octets()[3..]); // who closes first did not want to know
        }
    })?;
    let datagrams = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    thread::spawn(move || {
        let mut question = QUESTION;
        while let Ok((length, from)) = datagrams.recv_from(&mut question) {
            let _ = datagrams.send_to(&question[..length], from);
        }
    });
    Ok(())
}

/// Serves one connection after the other.
fn accept(port: u16, serve: impl FnMut(TcpStream) + Send + 'static) -> Result<()> {
    let listener = listen(port)?;
    thread::spawn(move || listener.incoming().flatten().for_each(serve));
    Ok(())
}

fn listen(port: u16) -> Result<TcpListener> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)).into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
