//! QEMU: finding it, and running one machine to its end.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use super::{
    apt::{self, Suites},
    kernel::Kernel,
};
use crate::root;

/// The suite whose QEMU boots every kernel of the matrix: Debian 12's own (7.2) stops half of the 6.12 boots under
/// software emulation with a double fault.
const SUITE: &str = "bookworm-backports";
const PROGRAM: &str = "qemu-system-x86_64";
const OLDEST: u32 = 8;
/// A machine that is not done then is ended: it has failed.
const LIMIT: Duration = Duration::from_secs(600);
const MEMORY: &str = "1024"; // MiB
/// All that QEMU can, but what is dear to emulate: instructions that copy and clear byte by byte (erms, fsrm), which
/// kernels prefer where a processor calls them fast, and page tables of five levels.
const PROCESSOR: &str = "max,erms=off,fsrm=off,la57=off";
/// `panic=-1` reboots at once, which ends QEMU. The timer check fails where the host lets a machine wait; the rest is
/// protection that a machine with nothing to protect need not pay for.
const KERNEL_LINE: &str = "console=ttyS0 loglevel=4 panic=-1 no_timer_check mitigations=off init_on_alloc=0 nokaslr";
/// `tests/src/bin/init.rs` says it last.
const CLOSING: &str = "== all commands have run";
/// What isa-debug-exit makes of init's 16.
const GOOD: i32 = 33;

/// A QEMU that can be run.
pub struct Emulator {
    program: PathBuf,
    /// Where it was unpacked; none when it is this host's own.
    unpacked: Option<PathBuf>,
}

/// What a machine said and how it ended.
pub struct Run {
    /// The console's lines.
    pub lines: Vec<String>,
    /// Why it does not count as one that has done its work.
    pub failure: Option<String>,
    /// From QEMU's start to its end.
    pub time: Duration,
}

impl Emulator {
    /// This host's, if it is recent; else from the cache, downloaded if need be.
    pub fn find() -> Result<Self> {
        let version = root::output(PROGRAM, &["--version"]).unwrap_or_default();
        if major(&version).is_some_and(|major| major >= OLDEST) {
            return Ok(Self { program: PROGRAM.into(), unpacked: None });
        }
        let cache = root::cache()?.join("vm/qemu");
        let folder = cache.join(SUITE);
        if !folder.exists() {
            println!("vm: downloading QEMU of {SUITE} (40 MB)");
            let suites = Suites::open(&["bookworm", "bookworm-security", SUITE], &cache.join("apt"))?;
            let partial = cache.join("partial");
            fs::create_dir_all(&partial)?;
            suites.unpack_all("qemu-system-x86", SUITE, &partial)?;
            fs::rename(&partial, &folder)?; // so what is there is whole
        }
        Ok(Self { program: folder.join("usr/bin").join(PROGRAM), unpacked: Some(folder) })
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", &LIMIT.as_secs().to_string()]).arg(&self.program);
        if let Some(folder) = &self.unpacked {
            command.env("LD_LIBRARY_PATH", apt::library_path(folder)?);
            for data in ["usr/share/qemu", "usr/share/seabios"] {
                command.arg("-L").arg(folder.join(data));
            }
        }
        Ok(command)
    }

    /// Boots a kernel and waits for its end; the console goes to a file, too.
    pub fn run(&self, boot: &Boot<'_>) -> Result<Run> {
        self.start(boot)?.finish(boot.log, |_| Ok(()))
    }

    /// Boots a kernel.
    pub fn start(&self, boot: &Boot<'_>) -> Result<Machine> {
        let mut command = self.command()?;
        command.args(["-accel", &accelerator(), "-cpu", PROCESSOR, "-smp", "1", "-m", MEMORY]);
        command.arg("-kernel").arg(boot.kernel.image()?).arg("-initrd").arg(boot.initramfs);
        command.args(["-append", KERNEL_LINE, "-no-reboot", "-nodefaults", "-display", "none", "-serial", "stdio"]);
        command.args(["-device", "isa-debug-exit,iobase=0x501,iosize=1"]);
        if let Some(wire) = &boot.wire {
            let Wire { own, other, address } = wire;
            let ends = [("local", own), ("remote", other)];
            let ends = ends.map(|(end, path)| format!("{end}.type=unix,{end}.path={}", path.display()));
            command.arg("-netdev").arg(format!("dgram,id=wire,{}", ends.join(",")));
            command.arg("-device").arg(format!("virtio-net-pci,netdev=wire,mac={address},romfile="));
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start QEMU")?;
        Ok(Machine { child, start: Instant::now() })
    }
}

/// What to boot, and how.
pub struct Boot<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// What it starts with.
    pub initramfs: &'a Path,
    /// Where the console goes.
    pub log: &'a Path,
    /// A network card.
    pub wire: Option<Wire>,
}

/// One end of a cable between two machines: datagrams between sockets of this host.
pub struct Wire {
    /// This end's socket.
    pub own: PathBuf,
    /// The other end's.
    pub other: PathBuf,
    /// Of the network card.
    pub address: &'static str,
}

/// A machine that runs; it is turned off when this is dropped.
pub struct Machine {
    /// `timeout`, which hands signals on to QEMU.
    child: Child,
    start: Instant,
}

impl Machine {
    /// Waits for its end; `hear` is told every line of the console when it comes.
    pub fn finish(mut self, log: &Path, mut hear: impl FnMut(&str) -> Result<()>) -> Result<Run> {
        let mut file = File::create(log).with_context(|| log.display().to_string())?;
        let mut lines = Vec::new();
        for line in BufReader::new(self.child.stdout.take().context("QEMU has no stdout")?).split(b'\n') {
            let line = String::from_utf8_lossy(&line?).trim_end_matches('\r').to_owned();
            writeln!(file, "{line}")?;
            hear(&line)?;
            lines.push(line);
        }
        let status = self.child.wait()?;
        let failure = match status.code() {
            Some(GOOD) if lines.iter().any(|line| line == CLOSING) => None,
            Some(GOOD) => Some("it ended well without its closing line".to_owned()),
            Some(124 | 137) => Some(format!("it was not done after {LIMIT:?}")),
            _ => Some(format!("it died ({status})")),
        };
        Ok(Run { lines, failure, time: self.start.elapsed() })
    }

    /// What it says goes to a file, and to nobody.
    pub fn log_to(&mut self, log: &Path) -> Result<()> {
        let mut output = self.child.stdout.take().context("QEMU has no stdout")?;
        let mut file = File::create(log).with_context(|| log.display().to_string())?;
        thread::spawn(move || io::copy(&mut output, &mut file));
        Ok(())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = Command::new("kill").arg(self.child.id().to_string()).status();
            let _ = self.child.wait();
        }
    }
}

/// KVM where the processor has it: a device file alone proves nothing, some hosts have one that hangs. `SHEAVE_VM_ACCEL`
/// overrides.
fn accelerator() -> String {
    if let Ok(chosen) = std::env::var("SHEAVE_VM_ACCEL") {
        return chosen;
    }
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let has_flag = flags.split_whitespace().any(|word| word == "svm" || word == "vmx");
    let writable = OpenOptions::new().write(true).open("/dev/kvm").is_ok();
    if has_flag && writable { "kvm".into() } else { "tcg".into() }
}

/// From "QEMU emulator version 10.0.2 (Debian …)".
fn major(said: &str) -> Option<u32> {
    said.split_once("version ")?.1.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::major;

    #[test]
    fn qemu_tells_its_version() {
        assert_eq!(major("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright"), Some(10));
        assert_eq!(major(""), None);
    }
}
