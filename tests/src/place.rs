//! Where a process runs: a network namespace and a cgroup.

use std::{
    ffi::OsStr,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};

/// A network namespace and a cgroup. Stands for a pod, a node's host side, or an outside client.
#[derive(Clone, Debug)]
pub struct Place {
    /// Name of the namespace, as `ip netns` knows it.
    pub netns: String,
    /// Folder in the cgroup v2 tree.
    pub cgroup: PathBuf,
    /// Processes started here die with the thread that started them.
    pub mortal: bool,
}

impl Place {
    /// Makes the namespace and the cgroup; loopback is up, IPv6 addresses are usable at once, packets are forwarded.
    ///
    /// # Errors
    /// When `ip`, the cgroup file system or a sysctl refuses.
    pub fn new(netns: String, cgroup: PathBuf, mortal: bool) -> Result<Self> {
        ip(&["netns", "add", &netns])?;
        fs::create_dir_all(&cgroup).with_context(|| format!("cannot make the cgroup {}", cgroup.display()))?;
        let place = Self { netns, cgroup, mortal };
        place.enter(|| {
            for (key, value) in [
                ("ipv4/ip_forward", "1"),
                ("ipv6/conf/all/forwarding", "1"),
                ("ipv6/conf/all/accept_dad", "0"),
                ("ipv6/conf/default/accept_dad", "0"),
                ("ipv4/conf/all/rp_filter", "1"), // strict: the datapath has to live with it
            ] {
                fs::write(format!("/proc/sys/net/{key}"), value).with_context(|| format!("sysctl net/{key}"))?;
            }
            anyhow::Ok(())
        })??;
        place.ip("link set lo up")?;
        Ok(place)
    }

    /// A command that will run here. What it runs is told by [`entered`].
    ///
    /// # Errors
    /// When the namespace or the cgroup is gone, or `sheave-enter` is not built.
    pub fn command(&self, program: impl AsRef<Path>) -> Result<Command> {
        let (netns, procs) = (self.netns(), self.cgroup.join("cgroup.procs"));
        for path in [&netns, &procs] {
            fs::metadata(path).with_context(|| format!("no {}", path.display()))?;
        }
        let mut command = Command::new(self::program("sheave-enter")?);
        command.arg(netns).arg(procs).arg(if self.mortal { DIES_WITH_ITS_PARENT } else { "stays" });
        command.arg(program.as_ref());
        Ok(command)
    }

    /// Runs a program of this workspace to its end and gives what it printed.
    ///
    /// # Errors
    /// When it fails; what it said on stderr is in the message.
    pub fn run(&self, program: impl AsRef<Path>, args: &[&str]) -> Result<String> {
        let output = self.command(program.as_ref())?.args(args).stdin(Stdio::null()).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!("{} {}: {}\n{said}", program.as_ref().display(), args.join(" "), output.status);
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a function in the namespace, on a thread of its own; the cgroup stays the caller's.
    ///
    /// # Errors
    /// When the namespace is gone.
    pub fn enter<T: Send>(&self, function: impl FnOnce() -> T + Send) -> Result<T> {
        let netns = self.netns();
        let netns = File::open(&netns).with_context(|| format!("no network namespace {}", netns.display()))?;
        let inside = move || -> Result<T> {
            setns(&netns, CloneFlags::CLONE_NEWNET).context("cannot enter a network namespace")?;
            Ok(function())
        };
        thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs lines of `ip` commands here, as one batch.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn ip(&self, lines: &str) -> Result<()> {
        let mut child = Command::new("ip")
            .args(["-n", &self.netns, "-batch", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        child.stdin.take().context("ip has no stdin")?.write_all(lines.as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("in {}: {}\n{lines}", self.netns, String::from_utf8_lossy(&output.stderr));
        }
        Ok(())
    }

    fn netns(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.netns)
    }
}

/// The word with which `sheave-enter` asks for a process that ends when the thread that started it does.
pub const DIES_WITH_ITS_PARENT: &str = "dies";

/// Program and arguments of a command that a place gave, without the way in: to be run by another one of that place.
pub fn entered(command: &Command) -> impl Iterator<Item = &OsStr> {
    command.get_args().skip(3) // namespace, cgroup, how it ends
}

/// Runs `ip` in the caller's namespace.
///
/// # Errors
/// When it fails.
pub fn ip(args: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(args).output().context("cannot start ip (package iproute2)")?;
    if !output.status.success() {
        bail!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

/// A program of this workspace: beside the running test, or in `$SHEAVE_BIN_DIR`.
///
/// # Errors
/// When it has not been built.
pub fn program(name: &str) -> Result<PathBuf> {
    let folder = match std::env::var_os("SHEAVE_BIN_DIR") {
        Some(folder) => folder.into(),
        None => {
            let exe = std::env::current_exe()?;
            let folder = exe.parent().context("the test has no folder")?;
            if folder.ends_with("deps") { folder.parent().unwrap_or(folder).into() } else { folder.to_owned() }
        }
    };
    let path: PathBuf = folder.join(name);
    if !path.exists() {
        bail!("{} is missing: run `cargo xtask build`", path.display());
    }
    Ok(path)
}
