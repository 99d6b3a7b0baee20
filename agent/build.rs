//! Builds the kernel side: package `sheave-ebpf`, feature `programs`, bin `sheave` -> `OUT_DIR/sheave`.
use std::{env, fs, path::Path};

use aya_build::{Package, Toolchain};

fn main() -> anyhow::Result<()> {
    println!("cargo:rerun-if-env-changed=SHEAVE_BPF_TOOLCHAIN");
    // The name under which `cargo xtask setup` links the one release that builds the kernel side.
    let toolchain = env::var("SHEAVE_BPF_TOOLCHAIN").unwrap_or_else(|_| "sheave-bpf".into());
    // A release calls itself stable; this allows `-Z build-std` in it, for the kernel side only.
    // SAFETY: a build script's main has started no other thread yet.
    unsafe { env::set_var("RUSTC_BOOTSTRAP", "1") };
    let package =
        Package { name: "sheave-ebpf", root_dir: "../ebpf", no_default_features: true, features: &["programs"] };
    aya_build::build_ebpf([package], Toolchain::Custom(&toolchain))?;
    // AYA_BUILD_SKIP=1 (lints, docs) builds nothing; the agent's include_bytes still wants a file.
    let object = Path::new(&env::var("OUT_DIR")?).join("sheave");
    if !object.exists() {
        fs::write(object, [])?;
    }
    Ok(())
}
