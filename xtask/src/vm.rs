//! `cargo xtask vm`: boots the kernels of `tests/kernels.toml`, runs tests in each, and says in one table what works
//! where.
//!
//! The programs are those that run on this host, too: their shared libraries go into the initramfs with them, so that
//! nothing has to be built a second time.

mod apt;
mod initramfs;
mod kernel;
mod machine;
mod report;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

use anyhow::{Context, Result, bail};

use self::{
    initramfs::Archive,
    kernel::{Kernel, Wanted},
    machine::Emulator,
    report::Report,
};
use crate::{
    root,
    setup::{self, Toolchain},
    suites,
};

/// Programs of the workspace that tests start.
const PROGRAMS: [&str; 3] = ["sheave", "sheave-client", "sheave-echo"];

/// What to boot and run.
#[derive(clap::Args)]
pub struct Args {
    /// Such as 6.1 or newest; all of tests/kernels.toml when none is given
    kernels: Vec<String>,
    /// Files of tests/tests to run, beside `sheave check`
    #[arg(long, value_delimiter = ',', default_values = ["load", "kernels"])]
    tests: Vec<String>,
    /// Run only tests whose names contain this
    #[arg(long)]
    filter: Option<String>,
    /// Machines that run at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Look for newer point releases than those in the cache
    #[arg(long)]
    update: bool,
}

/// Runs what is asked for; an error when anything failed or nothing ran.
pub fn run(args: &Args) -> Result<()> {
    let chosen = chosen(args)?;
    let emulator = match Emulator::find() {
        Ok(emulator) => emulator,
        Err(error) => {
            println!("SKIPPED vm: no QEMU: {error:#}\n0 passed, 0 failed, {} skipped", chosen.len());
            return Ok(());
        }
    };
    let toolchain = setup::toolchain()?;
    toolchain.build_workspace()?;
    let work = root::target().join("vm");
    fs::create_dir_all(&work).with_context(|| work.display().to_string())?;
    let payload = payload(&toolchain, args)?;

    let (queue, reports) = (Mutex::new(chosen.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let Some(wanted) = queue.lock().ok().and_then(|mut queue| queue.next()) else { return };
                    let report = boot(wanted, args.update, &emulator, &payload, &work);
                    report.tell();
                    if let Ok(mut reports) = reports.lock() {
                        reports.push(report);
                    }
                }
            });
        }
    });
    let mut reports = reports.into_inner().unwrap_or_default();
    reports.sort_by_key(|report| chosen.iter().position(|wanted| wanted.name == report.kernel));
    report::conclude(&reports)
}

/// The rows of the matrix that are asked for, in its order.
fn chosen(args: &Args) -> Result<Vec<Wanted>> {
    let matrix = kernel::matrix()?;
    if let Some(unknown) = args.kernels.iter().find(|name| matrix.iter().all(|wanted| wanted.name != **name)) {
        let known: Vec<&str> = matrix.iter().map(|wanted| wanted.name.as_str()).collect();
        bail!("tests/kernels.toml has no kernel {unknown}; it has {}", known.join(", "));
    }
    let is_chosen = |wanted: &Wanted| args.kernels.is_empty() || args.kernels.contains(&wanted.name);
    Ok(matrix.into_iter().filter(is_chosen).collect())
}

/// Everything but the kernel's modules: init, the programs, and what init is to run.
fn payload(toolchain: &Toolchain, args: &Args) -> Result<Archive> {
    let built = root::target().join("debug");
    let mut archive = Archive::default();
    archive.program("init", &built.join("sheave-init"))?;
    archive.program("bin/ip", &program_of_host("ip")?)?;
    for name in PROGRAMS {
        archive.program(&format!("bin/{name}"), &built.join(name))?;
    }
    let mut commands = "check /bin/sheave check\n".to_owned();
    let kinds: Vec<&str> = args.tests.iter().flat_map(|name| ["--test", name]).collect();
    let binaries = suites::binaries(toolchain, &kinds)?;
    for name in &args.tests {
        let binary = binaries.iter().find(|binary| binary.name == *name);
        let binary = binary.with_context(|| format!("there is no tests/tests/{name}.rs"))?;
        archive.program(&format!("tests/{name}"), &binary.path)?;
        let filter = args.filter.as_ref().map(|filter| format!(" {filter}")).unwrap_or_default();
        commands += &format!("{name} /tests/{name} --nocapture --test-threads 2{filter}\n");
    }
    archive.file("commands", commands.as_bytes());
    Ok(archive)
}

fn program_of_host(name: &str) -> Result<PathBuf> {
    let folders = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let found = folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.exists());
    found.with_context(|| format!("the program {name} is missing"))
}

/// One machine, from its kernel to its report; whatever goes wrong is in the report.
fn boot(wanted: &Wanted, update: bool, emulator: &Emulator, payload: &Archive, work: &Path) -> Report {
    let log = work.join(format!("{}.log", wanted.name));
    let run = || {
        let kernel = Kernel::get(wanted, update)?;
        println!("vm: booting {}", kernel.release);
        let mut archive = payload.clone();
        kernel.modules(&mut archive)?;
        let initramfs = work.join(format!("{}.cpio", wanted.name));
        fs::write(&initramfs, archive.finish()).with_context(|| initramfs.display().to_string())?;
        let run = emulator.run(&kernel, &initramfs, &log);
        fs::remove_file(&initramfs)?;
        run
    };
    Report::new(&wanted.name, run(), &log)
}
