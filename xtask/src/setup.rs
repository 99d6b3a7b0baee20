//! Finds or installs the toolchain of the kernel side. Every step looks first, so a second run does nothing and a
//! stopped one goes on where it was.
//!
//! The kernel side needs a Rust that has the sources of `core` (`-Z build-std`) and a bpf-linker made for the same
//! LLVM. One release for everybody, since what the verifiers accept is what that compiler makes: rustup's, and where
//! rustup has no `rust-src`, Debian 12's packages of the same one. A nightly would bring the next LLVM some day.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

use crate::root;

/// Exact, like the versions of aya in `Cargo.toml`: the linker reads what that compiler writes.
const LINKER: &str = "0.13.0";
/// The compiler of the kernel side; its LLVM is 22, which bpf-linker knows and Debian 12 has.
const RELEASE: &str = "1.96.0";
/// Its name in rustup, wherever it came from; `agent/build.rs` knows it as well.
const LINKED: &str = "sheave-bpf";
/// What Debian calls a recent Rust with its sources, and what bpf-linker needs to be built against its LLVM 22.
const DEBIAN: [&str; 6] = ["rustc-web", "cargo-web", "rust-web-src", "llvm-22-dev", "libzstd-dev", "zlib1g-dev"];

/// A toolchain that builds both sides.
pub struct Toolchain {
    /// Value of `SHEAVE_BPF_TOOLCHAIN`: what rustup calls the compiler.
    compiler: String,
    /// Folder of bpf-linker.
    linker: PathBuf,
}

impl Toolchain {
    /// cargo, in the workspace, with what the kernel side needs in its environment.
    pub fn cargo(&self, args: &[&str]) -> Command {
        let mut command = root::command("cargo", args);
        let path = env::var_os("PATH").unwrap_or_default();
        let path = [self.linker.clone()].into_iter().chain(env::split_paths(&path));
        command.env("PATH", env::join_paths(path).expect("parts of a PATH make a PATH"));
        command.env("SHEAVE_BPF_TOOLCHAIN", &self.compiler);
        // Of `cargo run`, which has started this program: to build scripts that look at it (ring's), a plain cargo and
        // this one would be two, and so would two clones; each would build anew what the other has built.
        for (name, _) in env::vars_os() {
            let of_this_package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
            if name.to_str().is_some_and(of_this_package) {
                command.env_remove(name);
            }
        }
        command
    }

    /// That all is there, and what a cargo that is not started from here needs.
    pub fn told(&self) -> String {
        format!("setup: all is there; for a plain cargo build: export PATH={}:$PATH", self.linker.display())
    }

    /// Everything, in the one set of features that tests use too: the kernel side is built once.
    pub fn build_workspace(&self) -> Result<()> {
        // Cargo shows the crate it is at, but not what that crate's build script compiles.
        println!("── building everything (at first some minutes; one of them is the kernel side, inside sheave-agent)");
        root::run(&mut self.cargo(&["build", "--workspace", "--bins"]))
    }

    /// The agent as it is shipped.
    pub fn build_release(&self) -> Result<()> {
        root::run(&mut self.cargo(&["build", "--release", "-p", "sheave-agent"]))?;
        println!("built {}", root::target().join("release/sheave").display());
        Ok(())
    }

    /// The agent as it is shipped in an image: without a library of this host, glibc included. Says where it is.
    pub fn build_static(&self) -> Result<PathBuf> {
        let target = format!("{}-unknown-linux-gnu", env::consts::ARCH);
        // For the target alone, which has to be named therefore: build scripts and macros are made for this host.
        let flags = format!("target.{target}.rustflags=[\"-Ctarget-feature=+crt-static\"]");
        let mut cargo = self.cargo(&["build", "--release", "--package", "sheave-agent", "--target", &target]);
        root::run(cargo.args(["--config", &flags]))?;
        Ok(root::target().join(target).join("release/sheave"))
    }
}

/// The toolchain, installed if need be.
pub fn toolchain() -> Result<Toolchain> {
    components()?;
    let compiler = compiler()?;
    let linker = linker(llvm_version(&compiler)?)?;
    programs();
    Ok(Toolchain { compiler, linker })
}

/// rustfmt and clippy, which minimal rustup profiles lack.
fn components() -> Result<()> {
    for (probe, component) in [("fmt", "rustfmt"), ("clippy", "clippy")] {
        if root::output("cargo", &[probe, "--version"]).is_none() {
            println!("setup: adding {component}");
            root::run(&mut root::command("rustup", &["component", "add", component]))?;
        }
    }
    Ok(())
}

/// Which compiler builds the kernel side: the name of a rustup toolchain.
fn compiler() -> Result<String> {
    if let Ok(name) = env::var("SHEAVE_BPF_TOOLCHAIN") {
        if with_sources(&name).is_none() {
            bail!(
                "SHEAVE_BPF_TOOLCHAIN={name} is no rustup toolchain with the sources of core; unset it, or link one: \
                 rustup toolchain link {name} PREFIX"
            );
        }
        return Ok(name);
    }
    let version = root::output("rustup", &["run", LINKED, "rustc", "--version"]).unwrap_or_default();
    if version.contains(RELEASE) && with_sources(LINKED).is_some() {
        return Ok(LINKED.into());
    }
    let installed = || {
        println!("setup: asking rustup for Rust {RELEASE} with rust-src (up to a minute)");
        let install = ["toolchain", "install", RELEASE, "--profile", "minimal", "--component", "rust-src"];
        root::run(&mut root::command("rustup", &install)).ok()?;
        with_sources(RELEASE)
    };
    match with_sources(RELEASE).or_else(installed) {
        Some(sysroot) => link(&sysroot)?,
        None => {
            println!("setup: rustup has none; taking the distribution's compiler");
            debian()?;
        }
    }
    Ok(LINKED.into())
}

/// Debian's Rust under a rustup name.
fn debian() -> Result<()> {
    if !Path::new("/usr/bin/rustc").exists() || !Path::new("/usr/lib/rustlib/src/rust/library/core").exists() {
        let by_hand = format!("apt-get install --no-install-recommends {}", DEBIAN.join(" "));
        install(&DEBIAN).with_context(|| {
            format!("install Rust {RELEASE} with rust-src by rustup, or on Debian 12 as root: {by_hand}")
        })?;
    }
    link("/usr")?;
    if with_sources(LINKED).is_none() {
        bail!("/usr/bin/rustc has no sources beside it (/usr/lib/rustlib/src): install the package rust-web-src");
    }
    let version = root::output("/usr/bin/rustc", &["--version"]).unwrap_or_default();
    if !version.contains(RELEASE) {
        println!("setup: this is {version}; verifiers are known to accept what Rust {RELEASE} makes");
    }
    Ok(())
}

fn link(sysroot: &str) -> Result<()> {
    root::run(&mut root::command("rustup", &["toolchain", "link", LINKED, sysroot]))
}

/// Where that rustup toolchain is, if it exists and can build `core`.
fn with_sources(toolchain: &str) -> Option<String> {
    let sysroot = root::output("rustup", &["run", toolchain, "rustc", "--print", "sysroot"])?;
    Path::new(&sysroot).join("lib/rustlib/src/rust/library/core/src/lib.rs").exists().then_some(sysroot)
}

/// Major version of the LLVM that this compiler is made of.
fn llvm_version(toolchain: &str) -> Result<u32> {
    let said = root::output("rustup", &["run", toolchain, "rustc", "-vV"]).unwrap_or_default();
    said.lines()
        .find_map(|line| line.strip_prefix("LLVM version: ")?.split('.').next()?.parse().ok())
        .with_context(|| format!("`rustup run {toolchain} rustc -vV` names no LLVM version"))
}

/// Folder of a bpf-linker of the right version for that LLVM; built once into the cache.
fn linker(llvm: u32) -> Result<PathBuf> {
    let kept = root::cache()?.join(format!("bpf-linker-{LINKER}-llvm{llvm}"));
    if is_linker(&kept.join("bin/bpf-linker")) {
        return Ok(kept.join("bin"));
    }
    let config = PathBuf::from(format!("/usr/lib/llvm-{llvm}/bin"));
    if !config.join("llvm-config").exists() {
        let package = format!("llvm-{llvm}-dev");
        install(&[&package, "libzstd-dev", "zlib1g-dev"])
            .with_context(|| format!("bpf-linker is built against LLVM {llvm}: install {package}"))?;
    }
    println!("setup: building bpf-linker {LINKER} for LLVM {llvm}, once (1–3 min)");
    let feature = format!("llvm-{llvm}");
    let mut cargo = root::command("cargo", &["install", "bpf-linker", "--version", LINKER, "--no-default-features"]);
    cargo.args(["--features", &feature, "--root"]).arg(&kept);
    let path = env::var_os("PATH").unwrap_or_default();
    let path = env::join_paths([config].into_iter().chain(env::split_paths(&path)))?;
    // Its build must not see this workspace's wrappers or target folder.
    root::run(cargo.env("PATH", path).env_remove("CARGO_TARGET_DIR"))?;
    Ok(kept.join("bin"))
}

fn is_linker(program: &Path) -> bool {
    root::output(&program.to_string_lossy(), &["--version"]).is_some_and(|said| said.ends_with(LINKER))
}

/// Programs that tests of the network run; without them those tests are skipped, so this only tries.
fn programs() {
    for (program, package) in [
        ("ip", "iproute2"),
        ("nsenter", "util-linux"),
        ("bpftool", "bpftool"),
        ("nft", "nftables"),
        ("iptables", "iptables"),
        ("conntrack", "conntrack"),
    ] {
        let known = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].iter().any(|dir| Path::new(dir).join(program).exists());
        if !known && install(&[package]).is_err() {
            println!("setup: {program} is missing (package {package}); tests that need it are skipped");
        }
    }
}

/// Debian packages; fails where there is no apt or no right to use it.
pub fn install(packages: &[&str]) -> Result<()> {
    if !root::is_root() || !Path::new("/usr/bin/apt-get").exists() {
        bail!("cannot install {}: not root, or no apt-get here", packages.join(" "));
    }
    println!("setup: installing {} (up to 2 min)", packages.join(" "));
    root::run(&mut root::command("apt-get", &["-qq", "update"]))?;
    let mut apt = root::command("apt-get", &["-qq", "install", "-y", "--no-install-recommends"]);
    root::run(apt.args(packages).env("DEBIAN_FRONTEND", "noninteractive"))
}
