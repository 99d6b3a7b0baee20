//! `cargo xtask vm`: boots the kernels of `tests/kernels.toml`, runs tests in each, and says in one table what works
//! where.
//!
//! The programs are those that run on this host, too: their shared libraries go into the initramfs with them, so that
//! nothing has to be built a second time.

mod apt;
mod initramfs;
mod kernel;
mod machine;
mod pair;
mod report;
mod vmlinux;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

use anyhow::{Context, Result, bail};

use self::{
    initramfs::Archive,
    kernel::{Kernel, Wanted},
    machine::{Boot, Emulator},
    report::Report,
};
use crate::{
    root,
    setup::{self, Toolchain},
    suites::{self, Binary},
    tally::{SKIPPED, Tally},
};

/// Programs of the workspace that tests start.
const PROGRAMS: [&str; 4] = ["sheave", "sheave-client", "sheave-echo", "sheave-enter"];

/// Files of tests/tests that every kernel runs.
const TESTS: [&str; 2] = ["load", "kernels"];

/// What to boot and run.
#[derive(clap::Args)]
pub struct Args {
    /// Kernels, such as 6.1 or newest [default: all in tests/kernels.toml]
    kernels: Vec<String>,
    /// Files of tests/tests to run, besides `sheave check`
    #[arg(long, value_delimiter = ',', default_values = TESTS)]
    tests: Vec<String>,
    /// Run only tests whose names contain this; a file of --tests that has none fails
    #[arg(long, requires = "tests")]
    filter: Option<String>,
    /// Machines that run at the same time
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Boot a machine in which something failed once more: if all holds then it has passed, and is named as unsteady
    #[arg(long)]
    retry: bool,
    /// Also boot two machines with the newest kernel as two nodes; done anyway if no kernels are named
    #[arg(long)]
    pair: bool,
    /// Look for newer point releases than those in the cache
    #[arg(long)]
    update: bool,
}

/// Runs what is asked for and prints the table.
pub fn tally(args: &Args) -> Result<Tally> {
    let chosen = chosen(args)?;
    let emulator = match Emulator::find() {
        Ok(emulator) => emulator,
        Err(error) => {
            println!("{SKIPPED}vm: no QEMU: {error:#}");
            return Ok(Tally::skipped(chosen.len()));
        }
    };
    let toolchain = setup::toolchain()?;
    toolchain.build_workspace()?;
    let work = root::target().join("vm");
    fs::create_dir_all(&work).with_context(|| work.display().to_string())?;
    let filter = args.filter.as_ref().map(|filter| format!(" {filter}")).unwrap_or_default();
    let tests: Vec<String> = args.tests.iter().map(|file| format!("{file}{filter}")).collect();
    // What only some of the kernels run is a part of the whole, not of what was asked for.
    let is_usual = args.tests == TESTS && args.filter.is_none();
    let more = chosen.iter().filter(|wanted| is_usual && !wanted.tests.is_empty());
    let more: Vec<(&Wanted, Vec<String>)> = more.map(|wanted| (wanted, [&*tests, &wanted.tests].concat())).collect();
    let payload = Payload::new(&toolchain, more.iter().flat_map(|(_, tests)| tests).chain(&tests))?;
    let usual = payload.archive(&tests)?;
    let more = more.iter().map(|(wanted, tests)| Ok((wanted.name.as_str(), payload.archive(tests)?)));
    let more = more.collect::<Result<BTreeMap<_, _>>>()?;

    let (queue, reports) = (Mutex::new(chosen.iter()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let Some(wanted) = queue.lock().ok().and_then(|mut queue| queue.next()) else { return };
                    let archive = more.get(wanted.name.as_str()).unwrap_or(&usual);
                    let boot = || boot(wanted, args.update, &emulator, archive, &work);
                    let report = Report::of(args.retry, boot);
                    if let Ok(mut reports) = reports.lock() {
                        reports.push(report);
                    }
                }
            });
        }
    });
    let mut reports = reports.into_inner().unwrap_or_default();
    reports.sort_by_key(|report| chosen.iter().position(|wanted| wanted.name == report.kernel));
    if let (Some(wanted), true) = (chosen.last(), args.pair || args.kernels.is_empty()) {
        reports.push(Report::of(args.retry, || pair::run(wanted, &emulator, &payload, &work)));
    }
    Ok(report::print(&reports))
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

/// Everything but the kernel's modules and what is to be run.
struct Payload {
    programs: Archive,
    tests: Vec<Binary>,
}

impl Payload {
    /// init, the programs, and the wanted files of tests, built.
    fn new<'a>(toolchain: &Toolchain, tests: impl Iterator<Item = &'a String>) -> Result<Self> {
        let built = root::target().join("debug");
        let mut programs = Archive::default();
        programs.program("init", &built.join("sheave-init"))?;
        for name in ["ip", "tc"] {
            programs.program(&format!("bin/{name}"), &program_of_host(name)?)?;
        }
        for name in PROGRAMS {
            programs.program(&format!("bin/{name}"), &built.join(name))?;
        }
        let names: BTreeSet<&str> = tests.map(|test| file_and_filter(test).0).chain([pair::TESTS]).collect();
        let kinds: Vec<&str> = names.into_iter().flat_map(|name| ["--test", name]).collect();
        Ok(Self { programs, tests: suites::binaries(toolchain, &kinds)? })
    }

    /// With files of tests, and the commands that run them: each all of it, or, behind a space, what the names of its
    /// tests contain.
    fn archive(&self, tests: &[String]) -> Result<Archive> {
        let mut archive = self.programs.clone();
        let mut commands = "check /bin/sheave check\n".to_owned();
        for test in tests {
            let (name, filter) = file_and_filter(test);
            let binary = self.tests.iter().find(|binary| binary.name == *name);
            let binary = binary.with_context(|| format!("there is no tests/tests/{name}.rs"))?;
            archive.program(&format!("tests/{name}"), &binary.path)?;
            commands += format!("{name} /tests/{name} --nocapture --test-threads 2 {filter}").trim_end();
            commands.push('\n');
        }
        archive.file("commands", commands.as_bytes());
        Ok(archive)
    }
}

fn file_and_filter(test: &str) -> (&str, &str) {
    test.split_once(' ').unwrap_or((test, ""))
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
        let initramfs = initramfs(&kernel, payload, &work.join(format!("{}.cpio", wanted.name)))?;
        let run = emulator.run(&Boot { kernel: &kernel, initramfs: &initramfs, log: &log, wire: None });
        fs::remove_file(&initramfs)?;
        run
    };
    Report::new(&wanted.name, run(), &log)
}

/// Writes what a machine starts with: the payload and the kernel's modules.
fn initramfs(kernel: &Kernel, payload: &Archive, to: &Path) -> Result<PathBuf> {
    let mut archive = payload.clone();
    kernel.modules(&mut archive)?;
    fs::write(to, archive.finish()).with_context(|| to.display().to_string())?;
    Ok(to.to_owned())
}
