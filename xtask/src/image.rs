//! `cargo xtask image`: the container image, as an OCI archive, without a container engine or a registry.
//!
//! One static program and the licences, nothing else: no shell, no libraries, nothing to patch but sheave. The same
//! sources and toolchain give the same bytes. The Dockerfile makes the same image where there is an engine.

pub mod oci;

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use self::oci::{File, Image};
use crate::{root, setup};

/// The image's name without tag; the default of the Helm chart.
const REPOSITORY: &str = "ghcr.io/sheave-lb/sheave";
/// Version of the workspace, the image's tag.
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// Where the program is in the image.
const PROGRAM: &str = "usr/local/bin/sheave";
/// Texts beside it: the kernel side is licensed differently.
const LICENCES: [&str; 3] = ["LICENSE-APACHE", "LICENSE-MIT", "ebpf/LICENSE-GPL-2.0"];

/// What to make.
#[derive(clap::Args)]
pub struct Args {
    /// Name of the image [default: that of the Helm chart]
    #[arg(long, value_name = "NAME:TAG")]
    name: Option<String>,
    /// The archive [default: target/image/sheave-VERSION-ARCHITECTURE.tar]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Put the image's files into this folder instead of an archive; the Dockerfile takes them from there
    #[arg(long, value_name = "DIR", conflicts_with_all = ["name", "output"])]
    rootfs: Option<PathBuf>,
}

/// Builds the agent and packs it.
pub fn run(args: &Args) -> Result<()> {
    if let Some(folder) = &args.rootfs {
        return lay_out(&files()?, folder);
    }
    let path = archive(args.name.as_deref(), args.output.as_deref())?;
    println!("built {}; containerd, podman, kind and k3s import it as it is, such as:", path.display());
    println!("  ctr --namespace k8s.io images import {}", path.display());
    Ok(())
}

/// Name and tag that the Helm chart asks for.
pub fn default_name() -> String {
    format!("{REPOSITORY}:{VERSION}")
}

/// Builds the archive; says where it is.
///
/// # Errors
/// When the agent cannot be built, or a file cannot be read or written.
pub fn archive(name: Option<&str>, output: Option<&Path>) -> Result<PathBuf> {
    let name = name.map_or_else(default_name, str::to_owned);
    let path = output.map_or_else(
        || root::target().join(format!("image/sheave-{VERSION}-{}.tar", architecture())),
        Path::to_path_buf,
    );
    let image = Image { name, config: config(), layers: vec![oci::layer(&files()?)?] };
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let output = fs::File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    oci::archive(&[image], output).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Everything in the image.
fn files() -> Result<Vec<File>> {
    let program = setup::toolchain()?.build_static()?;
    let read = |from: &Path| fs::read(from).with_context(|| format!("cannot read {}", from.display()));
    let mut files = vec![File { path: PROGRAM.to_owned(), mode: 0o755, content: read(&program)? }];
    if !is_static(&files[0].content) {
        bail!("{} needs libraries that the image does not have", program.display());
    }
    for licence in LICENCES {
        let name = Path::new(licence).file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let content = read(&root::workspace().join(licence))?;
        files.push(File { path: format!("usr/share/doc/sheave/{name}"), mode: 0o644, content });
    }
    Ok(files)
}

/// Whether a 64-bit little-endian ELF file names no dynamic linker, which would have to be in the image.
fn is_static(elf: &[u8]) -> bool {
    const INTERPRETER: [u8; 4] = 3_u32.to_le_bytes(); // PT_INTERP
    let number = |at: usize, length: usize| {
        let bytes = elf.get(at..at + length)?;
        Some(bytes.iter().rev().fold(0_usize, |number, byte| number << 8 | usize::from(*byte)))
    };
    // e_phoff, e_phentsize, e_phnum; p_type comes first in each header.
    let (Some(start), Some(size), Some(count)) = (number(32, 8), number(54, 2), number(56, 2)) else { return false };
    (0..count).all(|index| elf.get(start + index * size..).is_some_and(|header| !header.starts_with(&INTERPRETER)))
}

fn lay_out(files: &[File], folder: &Path) -> Result<()> {
    for file in files {
        let path = folder.join(&file.path);
        fs::create_dir_all(path.parent().unwrap_or(folder))?;
        fs::write(&path, &file.content).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, fs::Permissions::from_mode(file.mode))?;
    }
    println!("the image's files are in {}", folder.display());
    Ok(())
}

/// How the image runs, and what it says of itself. The Dockerfile says the same.
fn config() -> Value {
    json!({
        "Env": ["PATH=/usr/local/bin"],
        "Entrypoint": [format!("/{PROGRAM}")],
        "Cmd": ["agent"],
        "Labels": {
            "org.opencontainers.image.title": "sheave",
            "org.opencontainers.image.description": "A kube-proxy replacement for any CNI",
            "org.opencontainers.image.licenses": "(Apache-2.0 OR MIT) AND (MIT OR GPL-2.0-only)",
            "org.opencontainers.image.source": env!("CARGO_PKG_REPOSITORY"),
            "org.opencontainers.image.version": VERSION,
        },
    })
}

/// The name that Go and OCI have for this machine's.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

#[cfg(test)]
mod tests;
