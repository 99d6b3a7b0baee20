//! Everything a developer runs, as `cargo xtask COMMAND`. Needs nothing but a stable Rust to build itself; whatever
//! the rest of the workspace needs, `setup` finds or installs.

mod bench;
mod ci;
mod cluster;
mod demo;
mod docs;
mod e2e;
mod image;
mod kubernetes;
mod lint;
mod root;
mod setup;
mod suites;
mod tally;
mod tidy;
mod vm;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Builds, shows, tests sheave")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Find or install what building and testing need; safe to repeat, resumes where it stopped
    Setup,
    /// Build the agent and the test programs
    Build {
        /// With optimisations, the agent alone
        #[arg(long)]
        release: bool,
    },
    /// Two nodes, some pods, an outside client: watch sheave at work
    Demo(demo::Args),
    /// Run the tests: by default all that one host can run; with --all what CI runs
    Test(suites::Args),
    /// Build Kubernetes programs into the cache, where tests find them
    Kubernetes {
        /// Such as etcd, kube-apiserver, kubectl
        #[arg(default_values_t = kubernetes::API.map(str::to_owned))]
        programs: Vec<String>,
    },
    /// Make the container image, as an OCI archive, without a container engine
    Image(image::Args),
    /// Measure what sheave costs against the targets it has to meet; takes some minutes
    #[command(disable_help_flag = true)] // the program's own help is the useful one
    Bench(bench::Args),
    /// Regenerate docs/operations.md from the code; a unit test says when that is due
    Docs,
    /// Run a real Kubernetes on this host, its Services served by sheave or by kube-proxy
    Cluster(cluster::Args),
    /// Run Kubernetes' own tests against that cluster
    E2e(e2e::Args),
    /// Boot other kernels and run tests in them
    Vm(vm::Args),
    /// Check what no compiler checks: layering, unsafe budget, links of the documentation
    Tidy,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Command::Setup => setup::toolchain().map(|toolchain| println!("{}", toolchain.told())),
        Command::Build { release: false } => setup::toolchain()?.build_workspace(),
        Command::Build { release: true } => setup::toolchain()?.build_release(),
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => suites::run(&args),
        Command::Kubernetes { programs } => {
            let names: Vec<&str> = programs.iter().map(String::as_str).collect();
            kubernetes::programs(&names).map(|folder| println!("{}", folder.display()))
        }
        Command::Image(args) => image::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Docs => docs::write(),
        Command::Cluster(args) => cluster::run(&args),
        Command::E2e(args) => e2e::tally(&args).map(|tally| tally.conclude()),
        Command::Vm(args) => vm::tally(&args).map(|tally| tally.conclude()),
        Command::Tidy => tidy::run(),
    }
}
