//! PID 1 of the virtual machines of `cargo xtask vm`: mounts what the tests need, loads modules, runs what it is told,
//! and ends the machine.
//!
//! What it finds in the initramfs: `/modules`, a path a line, dependencies first; `/commands`, a name and a command a
//! line. What it says on the console: `== begin NAME`, the command's own output, `== end NAME CODE MILLISECONDS`, and
//! after the last one [`CLOSING`]. Then it writes to the port of QEMU's isa-debug-exit device, so that a machine which
//! died of something else cannot be taken for one that has done its work. `xtask/src/vm/machine.rs` is the other side.

use std::{
    fs::{self, File},
    process::{Command, exit},
    time::Instant,
};

use anyhow::{Context, Result};
use nix::{
    kmod::{ModuleInitFlags, finit_module},
    mount::{MsFlags, mount},
};

/// The last line of a machine that has run every command, whatever they found.
const CLOSING: &str = "== all commands have run";

/// Where a mount goes, and its type.
const MOUNTS: [(&str, &str); 8] = [
    ("/proc", "proc"),
    ("/sys", "sysfs"),
    ("/dev", "devtmpfs"),
    ("/run", "tmpfs"),
    ("/tmp", "tmpfs"),
    ("/sys/fs/cgroup", "cgroup2"),
    ("/sys/fs/bpf", "bpf"),
    ("/sys/kernel/debug", "debugfs"),
];

/// What every command finds.
const ENVIRONMENT: [(&str, &str); 4] =
    [("PATH", "/bin"), ("TMPDIR", "/tmp"), ("SHEAVE_BIN_DIR", "/bin"), ("SHEAVE_SLOWNESS", "10")];

fn main() {
    let done = run();
    match &done {
        Ok(()) => println!("{CLOSING}"),
        Err(error) => println!("init: {error:#}"),
    }
    end_machine(u8::from(done.is_err()));
}

fn run() -> Result<()> {
    for (path, kind) in MOUNTS {
        fs::create_dir_all(path).with_context(|| format!("cannot make {path}"))?;
        mount(Some(kind), path, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot mount {kind} on {path}"))?;
    }
    for path in fs::read_to_string("/modules").context("/modules")?.lines() {
        let module = File::open(path).with_context(|| path.to_owned())?;
        finit_module(&module, c"", ModuleInitFlags::empty()).with_context(|| format!("cannot load {path}"))?;
    }
    Command::new("/bin/ip").args(["link", "set", "lo", "up"]).status().context("cannot start ip")?;
    for line in fs::read_to_string("/commands").context("/commands")?.lines() {
        let mut words = line.split(' ');
        let (name, program) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        println!("== begin {name}");
        let start = Instant::now();
        let mut command = Command::new(program);
        command.args(words).env_clear().envs(ENVIRONMENT);
        let code = match command.status() {
            Ok(status) => status.code().unwrap_or(-1), // ended by a signal
            Err(error) => {
                println!("cannot start {program}: {error}");
                -1
            }
        };
        println!("== end {name} {code} {}", start.elapsed().as_millis());
    }
    Ok(())
}

/// QEMU ends with `2 × code + 1`; 16 is added since 1 is also its own "could not start".
#[cfg(target_arch = "x86_64")]
fn end_machine(code: u8) -> ! {
    const PORT: u16 = 0x501;
    // SAFETY: permits one port to this process; PID 1 has CAP_SYS_RAWIO.
    let permitted = unsafe { libc::ioperm(PORT.into(), 1, 1) } == 0;
    if permitted {
        // SAFETY: a byte to a port that belongs to nothing but QEMU's isa-debug-exit device; no memory is touched.
        unsafe { std::arch::asm!("out dx, al", in("dx") PORT, in("al") 16 + code, options(nomem, nostack)) };
    }
    exit(1) // reached outside QEMU only; of PID 1 it is a kernel panic, which ends the machine, too
}

#[cfg(not(target_arch = "x86_64"))]
fn end_machine(_code: u8) -> ! {
    exit(1) // no such device there: the end of PID 1 is a kernel panic, which ends the machine
}
