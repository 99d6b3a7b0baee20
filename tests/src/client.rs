//! The client of the tests: a process in a place that opens, connects, asks and closes as it is told. One process
//! serves a whole test, so a dial costs no fork.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    fmt,
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    echo::Answer,
    place::{Place, program},
};

/// How a client talks to an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    /// A TCP connection.
    Tcp,
    /// A TCP connection of an MPTCP socket, as the libraries of some languages make them.
    Mptcp,
    /// UDP, `connect` and `send`.
    Udp,
    /// UDP, `sendto` on a socket that is not connected.
    UdpSendto,
    /// An ICMP echo request on a connected ping socket; the port means nothing.
    Ping,
}

impl Way {
    /// All ways to talk to a Service.
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::UdpSendto];
}

/// What the client does for a test, one line of JSON each.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Request {
    /// Opens a socket of the family of `like`, maybe bound. Answers its number.
    Open {
        /// TCP or UDP.
        way: Way,
        /// An address of the family that is wanted; a v4-mapped one asks for an IPv6 socket.
        like: SocketAddr,
        /// Own address and port, when they matter.
        bind: Option<SocketAddr>,
    },
    /// Connects; waits as long for TCP's answer.
    Connect(usize, SocketAddr, Duration),
    /// Takes the peer away: `connect` to AF_UNSPEC.
    Disconnect(usize),
    /// Sends a question, on an unconnected socket to that address. Answers nothing.
    Send(usize, Option<SocketAddr>),
    /// Waits for the answer to a question. Answers a [`Received`].
    Receive(usize, Duration),
    /// `getpeername`
    Peer(usize),
    /// `getsockname`
    Local(usize),
    /// Closes.
    Close(usize),
    /// Starts a load. Answers its number.
    Start(Load),
    /// What a load has seen so far. Answers a [`Report`].
    Report(usize),
    /// Ends a load. Answers a [`Report`].
    Stop(usize),
}

/// What came back on a socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Received {
    /// Who answered, and whom it saw.
    pub answer: Answer,
    /// UDP: the source address that `recvfrom` gave. TCP: `getpeername`.
    pub source: SocketAddr,
}

/// What a whole dial gave: open, connect, ask, look at the peer, close.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialled {
    /// Name of the server.
    pub name: String,
    /// The client as the server saw it.
    pub client: SocketAddr,
    /// What the client saw as the other side: `getpeername`, on an unconnected socket the datagram's source.
    pub peer: SocketAddr,
    /// The source that `recvfrom` gave; for TCP the peer again.
    pub source: SocketAddr,
}

/// A system call that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Errno {
    /// "ECONNREFUSED"; "TIMEOUT" when nothing came in time.
    pub name: String,
    /// How long it took.
    pub after: Duration,
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} after {:?}", self.name, self.after)
    }
}

impl std::error::Error for Errno {}

/// Traffic that goes on until it is stopped.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Load {
    /// Protocol.
    pub way: Way,
    /// Where to.
    pub to: SocketAddr,
    /// What is repeated.
    pub kind: LoadKind,
    /// Pause between two.
    pub pause: Duration,
}

/// What a load repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LoadKind {
    /// Open, connect, ask, close.
    Dial,
    /// Ask again on one socket; after a failure a new one is opened, as a resolver would.
    Ask,
    /// Send and never read.
    Send,
}

/// What a load has seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Questions that were answered (or sent, for [`LoadKind::Send`]).
    pub answered: u64,
    /// Who answered how often.
    pub names: BTreeMap<String, u64>,
    /// How many failed.
    pub failed: u64,
    /// The first failures, in words.
    pub failures: Vec<String>,
    /// The longest time without an answer.
    pub longest_gap: Duration,
}

/// A running client; ends when dropped.
#[derive(Debug)]
pub struct Client {
    child: Child,
    pipes: RefCell<(ChildStdin, BufReader<ChildStdout>)>,
    /// How long an answer may take before it is a "TIMEOUT".
    pub patience: Duration,
}

/// A socket of a client; closed when dropped.
#[derive(Debug)]
pub struct Socket<'a> {
    client: &'a Client,
    number: usize,
}

/// A running load; stopped when dropped.
#[derive(Debug)]
pub struct Running<'a> {
    client: &'a Client,
    number: usize,
}

impl Place {
    /// Starts a client here.
    ///
    /// # Errors
    /// When the place is gone.
    pub fn client(&self) -> Result<Client> {
        let mut command = self.command(program("sheave-client")?)?;
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take().context("the client has no stdin")?;
        let replies = BufReader::new(child.stdout.take().context("the client has no stdout")?);
        Ok(Client { child, pipes: RefCell::new((orders, replies)), patience: Duration::from_secs(2) })
    }
}

impl Client {
    /// Of its process.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// One whole dial to an address such as "10.96.0.20:80" or "[::ffff:10.96.0.20]:80".
    ///
    /// # Errors
    /// An [`Errno`], when a system call failed or nothing came.
    pub fn dial(&self, way: Way, to: &str) -> Result<Dialled> {
        self.dial_from(way, to, None)
    }

    /// The same, from a given own address and port.
    ///
    /// # Errors
    /// An [`Errno`], when a system call failed or nothing came.
    pub fn dial_from(&self, way: Way, to: &str, bind: Option<SocketAddr>) -> Result<Dialled> {
        let to: SocketAddr = to.parse().with_context(|| format!("{to} is not an address and a port"))?;
        let socket = self.open(way, to, bind)?;
        let received = match way {
            Way::UdpSendto => socket.ask_at(to)?,
            Way::Tcp | Way::Mptcp | Way::Udp | Way::Ping => {
                socket.connect(to)?;
                socket.ask()?
            }
        };
        let Received { answer, source } = received;
        let peer = if way == Way::UdpSendto { source } else { socket.peer()? };
        Ok(Dialled { name: answer.name, client: answer.client, peer, source })
    }

    /// Many dials; who answered how often.
    ///
    /// # Errors
    /// The first failure.
    pub fn dial_many(&self, way: Way, to: &str, times: usize) -> Result<BTreeMap<String, usize>> {
        let mut names = BTreeMap::new();
        for turn in 1..=times {
            let dialled = self.dial(way, to).with_context(|| format!("dial {turn} of {times}"))?;
            *names.entry(dialled.name).or_default() += 1;
        }
        Ok(names)
    }

    /// A dial in one word or two, for tables: the server's name, or the name of the error.
    ///
    /// # Errors
    /// When the client has ended.
    pub fn outcome(&self, way: Way, to: &str) -> Result<String> {
        match self.dial(way, to) {
            Ok(dialled) => Ok(dialled.name),
            Err(error) => Ok(error.downcast::<Errno>()?.name),
        }
    }

    /// The same where a refusal is expected. The kernel says "port unreachable" only so often, to each and to all
    /// (`icmp_ratelimit`, `icmp_msgs_per_sec`), so a datagram that is met by silence is sent again some times.
    ///
    /// # Errors
    /// When the client has ended.
    pub fn refusal(&self, way: Way, to: &str) -> Result<String> {
        let mut said = self.outcome(way, to)?;
        for _ in 0..4 {
            if way == Way::Tcp || said != "TIMEOUT" {
                break;
            }
            said = self.outcome(way, to)?;
        }
        Ok(said)
    }

    /// A socket, not connected.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn open(&self, way: Way, like: SocketAddr, bind: Option<SocketAddr>) -> Result<Socket<'_>> {
        Ok(Socket { client: self, number: self.ask(&Request::Open { way, like, bind })? })
    }

    /// A connected socket.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn connect(&self, way: Way, to: &str) -> Result<Socket<'_>> {
        let to = to.parse().with_context(|| format!("{to} is not an address and a port"))?;
        let socket = self.open(way, to, None)?;
        socket.connect(to)?;
        Ok(socket)
    }

    /// Starts a load that goes on until it is stopped.
    ///
    /// # Errors
    /// When the client has ended.
    pub fn load(&self, way: Way, kind: LoadKind, to: &str, pause: Duration) -> Result<Running<'_>> {
        let to = to.parse().with_context(|| format!("{to} is not an address and a port"))?;
        Ok(Running { client: self, number: self.ask(&Request::Start(Load { way, to, kind, pause }))? })
    }

    fn ask<T: DeserializeOwned>(&self, request: &Request) -> Result<T> {
        let (orders, replies) = &mut *self.pipes.borrow_mut();
        writeln!(orders, "{}", serde_json::to_string(request)?)?;
        let mut line = String::new();
        if replies.read_line(&mut line)? == 0 {
            bail!("the client has ended");
        }
        let reply: std::result::Result<T, Errno> =
            serde_json::from_str(&line).with_context(|| format!("the client said {line}"))?;
        Ok(reply?)
    }
}

impl Socket<'_> {
    /// Connects.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn connect(&self, to: SocketAddr) -> Result<()> {
        self.client.ask(&Request::Connect(self.number, to, self.client.patience))
    }

    /// Takes the peer away, as resolvers do.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn disconnect(&self) -> Result<()> {
        self.client.ask(&Request::Disconnect(self.number))
    }

    /// A question on a connected socket, and its answer.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn ask(&self) -> Result<Received> {
        self.send(None)?;
        self.receive()
    }

    /// A question in a datagram to an address, and its answer.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn ask_at(&self, to: SocketAddr) -> Result<Received> {
        self.send(Some(to))?;
        self.receive()
    }

    /// A question.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn send(&self, to: Option<SocketAddr>) -> Result<()> {
        self.client.ask(&Request::Send(self.number, to))
    }

    /// An answer.
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn receive(&self) -> Result<Received> {
        self.client.ask(&Request::Receive(self.number, self.client.patience))
    }

    /// `getpeername`
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn peer(&self) -> Result<SocketAddr> {
        self.client.ask(&Request::Peer(self.number))
    }

    /// `getsockname`
    ///
    /// # Errors
    /// An [`Errno`].
    pub fn local(&self) -> Result<SocketAddr> {
        self.client.ask(&Request::Local(self.number))
    }
}

impl Drop for Socket<'_> {
    fn drop(&mut self) {
        let _ = self.client.ask::<()>(&Request::Close(self.number));
    }
}

impl Running<'_> {
    /// What it has seen so far.
    ///
    /// # Errors
    /// When the client has ended.
    pub fn report(&self) -> Result<Report> {
        self.client.ask(&Request::Report(self.number))
    }

    /// Ends it.
    ///
    /// # Errors
    /// When the client has ended.
    pub fn stop(self) -> Result<Report> {
        let report = self.client.ask(&Request::Stop(self.number));
        std::mem::forget(self); // it is stopped
        report
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let _ = self.client.ask::<Report>(&Request::Stop(self.number));
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
