//! Two machines as two nodes, with a cable between them. The second runs the tests; when its console asks for it, the
//! first is turned off as if its power were cut, and booted again.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::{
    Payload, initramfs,
    kernel::{Kernel, Wanted},
    machine::{Boot, Emulator, Machine, Run, Wire},
    report::Report,
};

/// The file of tests that the machines run.
pub const TESTS: &str = "machines";
/// Tests of that file, one for each machine.
const FIRST: &str = "the_first_machine";
const SECOND: &str = "the_second_machine";
/// What the second machine says when the first is to be turned off, and booted again; `tests/tests/machines.rs` says it.
const LOSE: &str = "== lose the first machine";
const RETURN: &str = "== return the first machine";

/// Boots both and waits for the second one's end.
pub fn run(wanted: &Wanted, emulator: &Emulator, payload: &Payload, work: &Path) -> Report {
    let log = work.join("second.log");
    Report::new(&format!("{}×2", wanted.name), boot(wanted, emulator, payload, work, &log), &log)
}

fn boot(wanted: &Wanted, emulator: &Emulator, payload: &Payload, work: &Path, log: &Path) -> Result<Run> {
    let kernel = Kernel::get(wanted, false)?;
    println!("vm: booting {} twice, as two nodes", kernel.release);
    let sockets = ["first.sock", "second.sock"].map(|name| work.join(name));
    let archives = [FIRST, SECOND].map(|test| -> Result<PathBuf> {
        initramfs(&kernel, &payload.archive(&[format!("{TESTS} {test}")])?, &work.join(format!("{test}.cpio")))
    });
    let [first, second] = archives;
    let (first, second) = (first?, second?);
    let start_first = || -> Result<Machine> {
        let wire = wire(&sockets[0], &sockets[1], "52:54:00:00:00:01");
        let log = work.join("first.log");
        let mut machine = emulator.start(&Boot { kernel: &kernel, initramfs: &first, log: &log, wire })?;
        machine.log_to(&log)?;
        Ok(machine)
    };
    for socket in &sockets {
        let _ = fs::remove_file(socket); // of machines that were killed
    }
    let mut running = Some(start_first()?);
    let wire = wire(&sockets[1], &sockets[0], "52:54:00:00:00:02");
    let machine = emulator.start(&Boot { kernel: &kernel, initramfs: &second, log, wire })?;
    let run = machine.finish(log, |line| {
        if line.contains(LOSE) {
            running = None;
            let _ = fs::remove_file(&sockets[0]);
        } else if line.contains(RETURN) {
            running = Some(start_first()?);
        }
        Ok(())
    });
    drop(running);
    for file in [first, second].iter().chain(&sockets) {
        let _ = fs::remove_file(file);
    }
    run
}

fn wire(own: &Path, other: &Path, address: &'static str) -> Option<Wire> {
    Some(Wire { own: own.to_owned(), other: other.to_owned(), address })
}
