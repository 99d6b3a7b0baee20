//! `cargo xtask e2e`: Kubernetes' own tests against the cluster, from a client outside the nodes, several at a time;
//! then one table and one last line.

mod report;

use std::{
    fs::{self, File},
    io::{Read as _, Write as _},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use self::report::Report;
use crate::{
    cluster::{self, Lab, LoadBalancer, Proxy, Up},
    kubernetes, root,
    tally::{SKIPPED, Tally},
};

/// Tests that no proxy passes here; docs/testing.md says of each kind why.
const NEVER: &str = r"\[Disruptive\]|\[Serial\]|SCTP|Internet|GCE";
/// Tests of what not every cluster has; LoadBalancers and dual stack are asked for by `--focus` and `--skip ''`.
const FEATURES: &str = r"\[Feature:";

/// What to test.
#[derive(clap::Args)]
pub struct Args {
    /// Run tests whose full names match this regular expression
    #[arg(long, default_value = r"\[sig-network\] Services")]
    pub focus: String,
    /// Leave out tests whose full names match this regular expression, besides those that cannot run here
    #[arg(long, default_value = FEATURES)]
    pub skip: String,
    /// The cluster to have; one that runs is taken and changed if need be
    #[command(flatten)]
    pub cluster: Up,
    /// How many tests run at the same time; most of them mostly wait
    #[arg(long, default_value_t = 5)]
    pub procs: u8,
    /// Stop after this time; what has not run by then has failed
    #[arg(long, default_value_t = 120, value_name = "MINUTES")]
    pub limit: u64,
    /// Run a test that has failed once more: one that passes then has passed, and is named as unsteady
    #[arg(long)]
    pub retry: bool,
    /// Give addresses to Services of type LoadBalancer while the tests run
    #[arg(long)]
    pub load_balancer: bool,
    /// Remove the cluster at the end
    #[arg(long)]
    pub down: bool,
}

/// Runs the tests and prints the table.
///
/// # Errors
/// When there is no cluster to be had, or the tests could not be run at all.
pub fn tally(args: &Args) -> Result<Tally> {
    if let Err(error) = cluster::prepare().and_then(|()| kubernetes::programs(&kubernetes::E2E)) {
        println!("{SKIPPED}e2e: {error:#}");
        return Ok(Tally::skipped(1));
    }
    let report = with_cluster(args);
    if args.down {
        cluster::down()?; // whatever happened
    }
    Ok(report?.print())
}

fn with_cluster(args: &Args) -> Result<Report> {
    let lab = cluster::up(&args.cluster)?;
    let _balancer = args.load_balancer.then(|| LoadBalancer::start(&lab)).transpose()?;
    suite(&lab, args, args.cluster.proxy)
}

fn suite(lab: &Lab, args: &Args, proxy: Proxy) -> Result<Report> {
    let folder = root::target().join("e2e");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let (file, log) = (folder.join("report.json"), folder.join("output.log"));
    let _ = fs::remove_file(&file); // of an earlier run
    let skip = if args.skip.is_empty() { NEVER.to_owned() } else { format!("{NEVER}|{}", args.skip) };
    println!("e2e: `{}` with {proxy}; all that the tests say goes to {}", args.focus, log.display());
    let start = Instant::now();
    let mut command = ginkgo(lab)?;
    command.arg(format!("--procs={}", args.procs)).args(["--no-color", "--output-interceptor-mode=none"]);
    if args.retry {
        command.arg("--flake-attempts=2");
    }
    command.arg(format!("--timeout={}m", args.limit)).arg(format!("--focus={}", args.focus));
    command.arg(format!("--skip={skip}")).arg("--json-report=report.json").arg("--output-dir").arg(&folder);
    command.arg(lab.program("e2e.test")).arg("--").args(["--provider=skeleton", "--minStartupPods=0"]);
    command.arg(format!("--num-nodes={}", lab.nodes)).args(["--disable-log-dump", "--dump-logs-on-failure=false"]);
    command.arg("--kubeconfig").arg(lab.kubeconfig()).arg("--kubectl-path").arg(lab.program("kubectl"));
    let mut child = command.current_dir(&folder).stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
    let mut said = child.stdout.take().context("ginkgo has no stdout")?;
    let mut log = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
    let (mut buffer, mut done, mut shown) = ([0; 8192], 0, Instant::now());
    loop {
        let length = said.read(&mut buffer)?;
        if length == 0 {
            break;
        }
        log.write_all(&buffer[..length])?;
        done += dots(&buffer[..length]);
        if shown.elapsed() > Duration::from_secs(30) {
            println!("e2e: {done} tests have ended, after {} s", start.elapsed().as_secs());
            shown = Instant::now();
        }
    }
    let status = child.wait()?;
    ensure!(file.exists(), "ginkgo ended without a report ({status}); see {}", folder.join("output.log").display());
    Report::read(&file, start.elapsed())
}

/// The tests' own driver, where the client outside is.
fn ginkgo(lab: &Lab) -> Result<Command> {
    let mut command = lab.enter("out")?;
    command.arg(lab.program("ginkgo"));
    Ok(command)
}

/// Ginkgo prints a dot for every test that has run.
fn dots(bytes: &[u8]) -> usize {
    String::from_utf8_lossy(bytes).matches('•').count()
}
