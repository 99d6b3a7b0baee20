//! Whether kube-proxy runs: whoever answers where it does is asked, since a pod without `hostPID` sees no process of the
//! host; where processes can be seen, they count too.

use std::{
    collections::BTreeSet,
    fmt,
    fs::{self, File},
    io::{self, Read as _, Write as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    path::Path,
    time::{Duration, Instant},
};

use crate::datapath::host::{netns, sockets};

/// Its ports for metrics and health. Each can be moved; hardly anybody moves both.
const PORTS: [u16; 2] = [10249, 10256];
/// What it says to `/proxyMode`; an agent of ours says something else.
const MODES: [&str; 3] = ["iptables", "ipvs", "nftables"];
/// Its name as a process.
const PROCESS: &str = "kube-proxy";
/// For a connection, and for an answer, on a busy host.
const PATIENCE: Duration = Duration::from_secs(2);

/// A sign that kube-proxy runs. Reads as what follows "kube-proxy".
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Running {
    /// It answers, and says in which mode it is.
    Mode(String, SocketAddr),
    /// It answers for load balancers; the mode is said elsewhere.
    Healthy(SocketAddr),
    /// It is a process of this host.
    Process(u32),
    /// Something answers in its place that does not say what it is.
    Unclear(SocketAddr),
}

impl fmt::Display for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mode(mode, address) => write!(f, "runs, in {mode} mode: it answers at {address}"),
            Self::Healthy(address) => write!(f, "runs: it answers at {address}"),
            Self::Process(pid) => write!(f, "runs: process {pid}"),
            Self::Unclear(address) => write!(f, "may be running: what answers at {address} does not say what it is"),
        }
    }
}

impl Running {
    /// What has to happen before its rules may be removed.
    #[must_use]
    pub const fn advice(&self) -> &'static str {
        match self {
            Self::Mode(..) | Self::Healthy(_) | Self::Process(_) => "stop it first, or it would put everything back",
            Self::Unclear(_) => {
                "stop that first; if it must go on, and kube-proxy is stopped, remove its rules with `kube-proxy --cleanup`"
            }
        }
    }
}

/// The clearest sign that there is; `None` = it does not run, as far as can be seen from here.
#[must_use]
pub fn find() -> Option<Running> {
    let mut signs: Vec<_> = addresses().into_iter().filter_map(|at| judge(at, |path| ask(at, path))).collect();
    signs.extend(process().map(Running::Process));
    signs.into_iter().min_by_key(|sign| match sign {
        Running::Mode(..) => 0,
        Running::Healthy(_) => 1,
        Running::Process(_) => 2,
        Running::Unclear(_) => 3,
    })
}

/// Whether one could run that [`find`] misses: somebody else, sheave after taking over, has both of its ports, where it
/// would answer, and its process cannot be seen.
#[must_use]
pub fn may_hide() -> bool {
    let taken: BTreeSet<_> = sockets::listening().unwrap_or_default().iter().map(SocketAddr::port).collect();
    is_alone() && PORTS.iter().all(|port| taken.contains(port))
}

/// Whether the first process to be seen is one of ours: so it is in a pod without `hostPID`, as the chart's are.
fn is_alone() -> bool {
    let name = |process: &str| fs::read_to_string(format!("/proc/{process}/comm")).ok();
    name("1").is_some_and(|first| name("self") == Some(first))
}

/// Loopback, and wherever else its ports are listened on in this network namespace.
fn addresses() -> BTreeSet<SocketAddr> {
    let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    let usual = loopback.into_iter().flat_map(|ip| PORTS.map(|port| SocketAddr::new(ip, port)));
    // A kernel that cannot list sockets leaves the usual addresses.
    let others = sockets::listening().unwrap_or_default().into_iter();
    usual.chain(others.filter(|at| PORTS.contains(&at.port()) && !at.ip().is_unspecified())).collect()
}

/// What came back.
enum Answer {
    /// Nobody listens.
    Nobody,
    /// Silence, or something that is not HTTP.
    Unclear,
    Http(u16, String),
}

fn judge(at: SocketAddr, ask: impl Fn(&str) -> Answer) -> Option<Running> {
    match ask("/proxyMode") {
        Answer::Nobody => return None,
        Answer::Unclear => return Some(Running::Unclear(at)),
        Answer::Http(200, mode) if MODES.contains(&mode.trim()) => {
            return Some(Running::Mode(mode.trim().to_owned(), at));
        }
        Answer::Http(..) => {}
    }
    // An agent of ours says the same of its health, but of its readiness too, which kube-proxy does not know.
    match (ask("/readyz"), ask("/healthz")) {
        (Answer::Http(404, _), Answer::Http(_, body)) if body.contains("\"lastUpdated\"") => Some(Running::Healthy(at)),
        (Answer::Http(..), Answer::Http(..)) => None,
        _ => Some(Running::Unclear(at)),
    }
}

fn ask(address: SocketAddr, path: &str) -> Answer {
    let mut stream = match TcpStream::connect_timeout(&address, PATIENCE) {
        Ok(stream) => stream,
        Err(error) if error.kind() == io::ErrorKind::TimedOut => return Answer::Unclear, // it accepts no more
        Err(_) => return Answer::Nobody,
    };
    let end = Instant::now() + PATIENCE;
    if write!(stream, "GET {path} HTTP/1.0\r\n\r\n").is_err() {
        return Answer::Unclear;
    }
    let (mut answer, mut buffer) = (Vec::new(), [0; 4096]);
    let mut more = || -> io::Result<bool> {
        let left = end.saturating_duration_since(Instant::now());
        stream.set_read_timeout(Some(left))?; // none left is an error
        let length = stream.read(&mut buffer)?;
        answer.extend_from_slice(&buffer[..length]);
        Ok(length > 0 && answer.len() < buffer.len())
    };
    // However it ends: what has come by then is the answer.
    while more().unwrap_or(false) {}
    parse(&String::from_utf8_lossy(&answer)).unwrap_or(Answer::Unclear)
}

fn parse(answer: &str) -> Option<Answer> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let code = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    Some(Answer::Http(code, body.to_owned()))
}

/// A process of that name in this network namespace: other nodes may share the host.
fn process() -> Option<u32> {
    let namespace = |process: &Path| netns::id(&File::open(process.join("ns/net")).ok()?);
    let ours = netns::own()?;
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let (path, pid) = (entry.path(), entry.file_name().to_str()?.parse().ok()?);
        let name = fs::read_to_string(path.join("comm")).ok()?;
        (name.trim_end() == PROCESS && namespace(&path) == Some(ours)).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::{Answer, Running, judge, parse};

    #[test]
    fn kube_proxy_is_told_from_an_agent_of_ours_and_from_others() {
        const KUBE_PROXYS: &str = r#"{"lastUpdated":"2026-01-01 00:00:00 UTC","nodeEligible":true}"#;
        const GONE: &str = "HTTP/1.1 404 Not Found\r\n\r\n404 page not found";
        let ok = |body: &str| format!("HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\n{body}");
        let at = "[::1]:10249".parse().unwrap();
        let (mode, healthy) = (|mode: &str| Some(Running::Mode(mode.to_owned(), at)), Some(Running::Healthy(at)));
        let unclear = || Some(Running::Unclear(at));
        let not_yet = "HTTP/1.1 503 Service Unavailable\r\n\r\nnot ready";
        // What is answered to /proxyMode, /readyz and /healthz; nothing = nobody listens.
        for (case, answers, expected) in [
            ("nobody listens", ["", "", ""].map(str::to_owned), None),
            ("its metrics", [ok("ipvs"), GONE.to_owned(), ok("ok")], mode("ipvs")),
            ("its health", [GONE.to_owned(), GONE.to_owned(), ok(KUBE_PROXYS)], healthy.clone()),
            (
                "its health on a node that leaves",
                [GONE.to_owned(), GONE.to_owned(), format!("HTTP/1.0 503 No\r\n\r\n{KUBE_PROXYS}")],
                healthy,
            ),
            ("our metrics", [ok("sheave"), GONE.to_owned(), ok("ok")], None),
            ("our health", [GONE.to_owned(), ok("ok"), ok(KUBE_PROXYS)], None),
            ("our health, not ready", [GONE.to_owned(), not_yet.to_owned(), ok(KUBE_PROXYS)], None),
            ("another server", [GONE.to_owned(), GONE.to_owned(), GONE.to_owned()], None),
            ("silence, or not HTTP", ["SSH-2.0-x\r\n", "", ""].map(str::to_owned), unclear()),
            ("it ends meanwhile", [GONE.to_owned(), String::new(), String::new()], unclear()),
        ] {
            let ask = |path: &str| {
                let index = ["/proxyMode", "/readyz", "/healthz"].iter().position(|known| *known == path).unwrap();
                let answer = &answers[index];
                if answer.is_empty() { Answer::Nobody } else { parse(answer).unwrap_or(Answer::Unclear) }
            };
            assert_eq!(judge(at, ask), expected, "{case}");
        }
    }
}
