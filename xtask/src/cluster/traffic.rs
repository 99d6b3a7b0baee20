//! Clients that go on asking while the cluster is changed, and say what went wrong.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use socket2::{Domain, Socket, Type};

use super::{cgroup, lab::Lab};
use crate::root;

/// Between two requests to one address.
const PAUSE: Duration = Duration::from_millis(20);
/// An answer that takes longer has failed, on the busiest host.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// So long each goes on after a change before it is judged.
const WATCH: Duration = Duration::from_secs(2);

/// Requests from one place to some addresses, each over a connection of its own, and over one that stays open.
pub struct Traffic {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Traffic {
    /// Begins asking; a node's own processes are in its cgroup, so that their sockets are seen.
    pub fn start(lab: &Lab, place: &str, addresses: &[String]) -> Result<Self> {
        let enter: String = match place {
            "out" | "lan" => String::new(),
            node => cgroup::make(node)?.iter().map(|file| format!("echo $$ > '{}' && ", file.display())).collect(),
        };
        let mut command = Command::new("sh");
        command.args(["-c", &format!("{enter}exec \"$@\""), "sh"]).args(lab.inside(place)?);
        command.arg(root::this_program()).args(["cluster", "ask"]).args(addresses);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot start a client")?;
        let input = child.stdin.take().context("no stdin")?;
        let output = BufReader::new(child.stdout.take().context("no stdout")?);
        Ok(Self { child, input, output })
    }

    /// Fails when a request since the last call did, or there was none to an address.
    pub fn check(&mut self) -> Result<()> {
        self.input.write_all(b"\n")?;
        let mut said = String::new();
        self.output.read_line(&mut said)?;
        ensure!(said.trim() == "well", "{}", said.trim());
        Ok(())
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Default)]
struct Count {
    good: usize,
    /// When, and why.
    bad: Vec<(Instant, String)>,
}

impl Count {
    fn complaint(&self, name: &str) -> Option<String> {
        let all = self.good + self.bad.len();
        let (Some((first, why)), Some((last, _))) = (self.bad.first(), self.bad.last()) else {
            return (all == 0).then(|| format!("{name}: nothing was answered"));
        };
        let (ago, period) = (first.elapsed().as_millis(), last.duration_since(*first).as_millis());
        Some(format!(
            "{name}: {} of {all} failed, the first {ago} ms ago, all within {period} ms: {why}",
            self.bad.len()
        ))
    }
}

/// The client's process: a line on standard input asks how it went since the last one.
pub fn ask(addresses: &[SocketAddr]) -> Result<()> {
    let counts: Arc<Mutex<BTreeMap<String, Count>>> = Arc::default();
    for address in addresses.iter().copied() {
        for stays in [false, true] {
            let counts = Arc::clone(&counts);
            let name = format!("{address}{}", if stays { " over a connection that stays" } else { "" });
            thread::spawn(move || go_on(address, stays, &name, &counts));
        }
    }
    for line in std::io::stdin().lines() {
        line?;
        thread::sleep(WATCH);
        let mut counts = counts.lock().map_err(|_| anyhow::anyhow!("a client has died"))?;
        let wrong: Vec<String> = counts.iter().filter_map(|(name, count)| count.complaint(name)).collect();
        for count in counts.values_mut() {
            *count = Count::default();
        }
        println!("{}", if wrong.is_empty() { "well".to_owned() } else { wrong.join("; ") });
    }
    Ok(())
}

fn go_on(address: SocketAddr, stays: bool, name: &str, counts: &Mutex<BTreeMap<String, Count>>) {
    let mut kept: Option<TcpStream> = None;
    loop {
        let result = kept.take().map_or_else(|| dial(address), Ok).and_then(|mut stream| {
            let port = stream.local_addr().map(|from| from.port()).unwrap_or_default();
            request(&mut stream).map(|()| stream).with_context(|| format!("from port {port}"))
        });
        if let Ok(mut counts) = counts.lock() {
            let count = counts.entry(name.to_owned()).or_default();
            match result {
                Ok(stream) => {
                    count.good += 1;
                    kept = stays.then_some(stream);
                }
                Err(error) => count.bad.push((Instant::now(), format!("{error:#}"))),
            }
        }
        thread::sleep(PAUSE);
    }
}

/// What cannot be reached is told with the port it was dialled from, by which captures and conntrack know it.
fn dial(address: SocketAddr) -> Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None).context("cannot make a socket")?;
    socket.connect_timeout(&address.into(), PATIENCE).with_context(|| {
        let from = socket.local_addr().ok().and_then(|from| from.as_socket());
        format!("from port {}", from.map_or(0, |from| from.port()))
    })?;
    Ok(socket.into())
}

fn request(stream: &mut TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: web\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut buffer = [0; 512];
    while !answer.windows(4).any(|end| end == b"\r\n\r\n") {
        let length = stream.read(&mut buffer)?;
        ensure!(length > 0, "the connection was closed");
        answer.extend_from_slice(&buffer[..length]);
    }
    ensure!(answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer[..answer.len().min(40)]));
    Ok(())
}
