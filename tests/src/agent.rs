//! A running agent, and what `svc` and `lb` say about it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::IpAddr,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::de::DeserializeOwned;
use sheave_agent::{
    datapath::open_tables,
    options::HostPaths,
    view::{Items, LbView, ServiceView, StatusView},
};
use sheave_ebpf::{
    frontend::KIND_CLUSTER_IP,
    service::{Scope, Word, word_index},
};

use crate::{
    place::{Place, program},
    wait::{SOON, eventually},
};

/// Loading the programs takes a second or two on a busy machine.
const START: Duration = Duration::from_secs(30);

/// Where an agent reads and writes.
#[derive(Clone, Debug)]
pub struct Paths {
    /// Another build of `sheave` than the one at hand
    pub program: Option<PathBuf>,
    /// `--manifests`
    pub manifests: PathBuf,
    /// `--kubeconfig`, in place of the manifests
    pub kubeconfig: Option<PathBuf>,
    /// `--cgroup-root`
    pub cgroup: PathBuf,
    /// `--bpffs`
    pub bpffs: PathBuf,
    /// `--run-dir`
    pub run: PathBuf,
    /// Its stderr, of all its lives.
    pub log: PathBuf,
}

impl Paths {
    /// The command that runs an agent with these paths.
    ///
    /// # Errors
    /// When the place is gone, or the program is not built.
    pub fn agent(&self, name: &str, place: &Place) -> Result<Command> {
        let mut command = place.command(self.program.clone().map_or_else(|| program("sheave"), Ok)?)?;
        command.arg("agent").args(["--node-name", name]);
        match &self.kubeconfig {
            Some(kubeconfig) => command.arg("--kubeconfig").arg(kubeconfig),
            None => command.arg("--manifests").arg(&self.manifests),
        };
        command.arg("--cgroup-root").arg(&self.cgroup);
        command.arg("--bpffs").arg(&self.bpffs).arg("--run-dir").arg(&self.run);
        Ok(command)
    }
}

/// An agent; killed when dropped, as a crash would.
#[derive(Debug)]
pub struct Agent {
    name: String,
    place: Place,
    paths: Paths,
    flags: Vec<String>,
    child: Child,
}

impl Agent {
    pub(crate) fn start(name: &str, place: &Place, paths: &Paths, flags: &[&str]) -> Result<Self> {
        let mut agent = Self::begin(name, place, paths, flags)?;
        agent.ready()?;
        Ok(agent)
    }

    /// Starts it and does not wait.
    pub(crate) fn begin(name: &str, place: &Place, paths: &Paths, flags: &[&str]) -> Result<Self> {
        let flags: Vec<_> = flags.iter().map(ToString::to_string).collect();
        let child = spawn(name, place, paths, &flags)?;
        Ok(Self { name: name.into(), place: place.clone(), paths: paths.clone(), flags, child })
    }

    /// Waits until it has read everything and the kernel has it.
    ///
    /// # Errors
    /// When it ends or does not get ready; with its log.
    pub fn ready(&mut self) -> Result<()> {
        let ready = eventually("the agent is ready", START, || {
            if let Some(status) = self.child.try_wait()? {
                return Ok(Err(status));
            }
            let status = self.status()?;
            ensure!(status.synced && status.health == "ok", "it says {status:?}");
            Ok(Ok(()))
        });
        match ready {
            Ok(Ok(())) => Ok(()),
            Ok(Err(status)) => bail!("the agent ended ({status}):\n{}", self.log()),
            Err(error) => Err(error.context(self.log())),
        }
    }

    /// SIGKILL: nothing can be tidied up. The kernel goes on with what it has.
    ///
    /// # Errors
    /// When the process cannot be waited for.
    pub fn kill(&mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM; waits for its end.
    ///
    /// # Errors
    /// When it does not end in time, or with a failure.
    pub fn terminate(&mut self) -> Result<()> {
        kill(self.pid(), Signal::SIGTERM)?;
        let status = eventually("the agent ends", SOON, || self.child.try_wait()?.context("it runs"))?;
        ensure!(status.success(), "after SIGTERM the agent ended with {status}:\n{}", self.log());
        Ok(())
    }

    /// Starts it again with the same flags; waits until it is ready.
    ///
    /// # Errors
    /// When it ends or does not get ready.
    pub fn restart(&mut self) -> Result<()> {
        self.launch()?;
        self.ready()
    }

    /// Starts it again with the same flags, and does not wait.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn launch(&mut self) -> Result<()> {
        self.child = spawn(&self.name, &self.place, &self.paths, &self.flags)?;
        Ok(())
    }

    /// Whether the process is there.
    ///
    /// # Errors
    /// When it cannot be waited for.
    pub fn is_running(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_none())
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(i32::MAX))
    }

    /// Everything it has logged, of all its lives.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.paths.log).unwrap_or_default()
    }

    /// Runs a command of the command line against it, on its node.
    ///
    /// # Errors
    /// When the command fails.
    pub fn sheave(&self, args: &[&str]) -> Result<String> {
        let [run, bpffs] = [&self.paths.run, &self.paths.bpffs].map(|path| path.to_string_lossy().into_owned());
        self.place.run(program("sheave")?, &[args, &["--run-dir", &run, "--bpffs", &bpffs]].concat())
    }

    /// Where it runs.
    #[must_use]
    pub const fn place(&self) -> &Place {
        &self.place
    }

    /// The flags that lead a command of the command line to it.
    #[must_use]
    pub fn flags(&self) -> String {
        format!("--run-dir {} --bpffs {}", self.paths.run.display(), self.paths.bpffs.display())
    }

    /// `sheave status`, of an agent in order or not.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn status(&self) -> Result<StatusView> {
        self.json(&["status", "-o", "json"])
    }

    /// `sheave svc list -A`: what it wants.
    ///
    /// # Errors
    /// When the agent does not answer.
    pub fn services(&self) -> Result<Vec<ServiceView>> {
        Ok(self.json::<Items<ServiceView>>(&["svc", "list", "-A", "-o", "json"])?.items)
    }

    /// `sheave lb list`: what the kernel has.
    ///
    /// # Errors
    /// When the maps cannot be read.
    pub fn kernel(&self) -> Result<Vec<LbView>> {
        Ok(self.json::<Items<LbView>>(&["lb", "list", "-A", "-o", "json"])?.items)
    }

    /// Everything that must survive a restart: the number of each service and of each of its backends.
    ///
    /// # Errors
    /// When the maps cannot be read.
    pub fn ids(&self) -> Result<BTreeMap<String, u32>> {
        let paths = HostPaths { bpffs: self.paths.bpffs.clone(), run_dir: self.paths.run.clone() };
        let tables = open_tables(&paths)?;
        let mut ids = BTreeMap::new();
        for (key, frontend) in tables.frontends().iter().filter(|(_, frontend)| frontend.kind == KIND_CLUSTER_IP) {
            let at = endpoint(&IpAddr::from(key.addr).to_string(), u16::from_be(key.port));
            let word = Word(tables.word(word_index(frontend.service, Scope::Cluster)));
            for slot in word.offset()..word.offset() + word.length() {
                let id = tables.slot(slot);
                let backend = tables.backend(id);
                let to = endpoint(&IpAddr::from(backend.addr).to_string(), u16::from_be(backend.port));
                ids.insert(format!("{at}/{} → {to}", key.proto), id);
            }
            ids.insert(format!("{at}/{}", key.proto), frontend.service);
        }
        Ok(ids)
    }

    fn json<T: DeserializeOwned>(&self, args: &[&str]) -> Result<T> {
        let text = self.sheave(args)?;
        serde_json::from_str(&text).with_context(|| format!("sheave {} said {text}", args.join(" ")))
    }

    /// Waits until both lists show exactly these frontends of a service (namespace `t`), in any order.
    ///
    /// A line is `"10.96.0.20:80/TCP → 10.244.1.10:8080 10.244.1.11:8080"`, with the backends that new connections
    /// may go to in order of their texts; `"10.96.0.20:80/TCP → refused"` or `"… → dropped"` when there is none.
    ///
    /// # Errors
    /// The last difference, with both lists.
    pub fn expect(&self, service: &str, lines: &[&str]) -> Result<()> {
        let mut expected: Vec<_> = lines.iter().map(ToString::to_string).collect();
        expected.sort();
        eventually(&format!("{service} is programmed"), SOON, || {
            let wanted = self.wanted(service)?;
            ensure!(wanted == expected, "svc list has {wanted:#?}, not {expected:#?}");
            let kernel = self.programmed(service)?;
            ensure!(kernel == expected, "lb list has {kernel:#?}, not {expected:#?}");
            Ok(())
        })
    }

    /// Waits until `svc list` shows a service (namespace `t`) and says that the kernel has all of it.
    ///
    /// # Errors
    /// The list, when it does not.
    pub fn until_programmed(&self, service: &str) -> Result<()> {
        eventually(&format!("{service} is programmed"), SOON, || {
            let services = self.services()?;
            let view = services.iter().find(|view| view.name == service).context("svc list does not know it")?;
            ensure!(!view.frontends.is_empty() && view.frontends.iter().all(|f| f.programmed), "{view:#?}");
            Ok(())
        })
    }

    /// The lines of `svc list`; a verdict is read off the number of backends.
    fn wanted(&self, service: &str) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for view in self.services()?.iter().filter(|view| view.name == service) {
            for frontend in &view.frontends {
                let selected = frontend.backends.iter().filter(|b| b.selected);
                let backends = selected.map(|b| endpoint(&b.address, b.port)).collect();
                let any = frontend.backends.iter().any(|b| b.ready || (b.serving && b.terminating));
                let none = if any { "dropped" } else { "refused" };
                lines.push(line(&frontend.address, frontend.port, &frontend.protocol, backends, none));
                ensure!(frontend.programmed, "{service}: {frontend:?} is not programmed");
            }
        }
        lines.sort();
        Ok(lines)
    }

    /// The lines of `lb list`, as traffic from inside the cluster sees them.
    fn programmed(&self, service: &str) -> Result<Vec<String>> {
        let name = format!("t/{service}");
        let mut lines = Vec::new();
        let kernel = self.kernel()?;
        let inside = |row: &&LbView| row.scope != "external" && row.kind != "UnknownPort" && row.kind != "Loopback";
        for row in kernel.iter().filter(|row| row.service.as_ref() == Some(&name)).filter(inside) {
            let backends = row.backends.iter().map(|b| endpoint(&b.address, b.port)).collect();
            let none = match row.verdict.as_str() {
                "reject" => "refused",
                "drop" => "dropped",
                _ => "nowhere",
            };
            lines.push(line(&row.address, row.port, &row.protocol, backends, none));
        }
        lines.sort();
        Ok(lines)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if self.place.mortal {
            let _ = self.kill();
        }
    }
}

fn spawn(name: &str, place: &Place, paths: &Paths, flags: &[String]) -> Result<Child> {
    let log = File::options().create(true).append(true).open(&paths.log).context("cannot open the agent's log")?;
    let mut command = paths.agent(name, place)?;
    command.args(flags).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().context("cannot start the agent")
}

/// One line of [`Agent::expect`].
fn line(address: &str, port: u16, protocol: &str, mut backends: Vec<String>, none: &str) -> String {
    backends.sort();
    let to = if backends.is_empty() { none.to_owned() } else { backends.join(" ") };
    format!("{}/{protocol} → {to}", endpoint(address, port))
}

fn endpoint(address: &str, port: u16) -> String {
    if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") }
}
