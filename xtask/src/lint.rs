//! What is checked before a test runs: formatting, lints of both sides, documentation, layering.

use std::process::Command;

use anyhow::Result;

use crate::{root, setup::Toolchain, tidy};

/// A named check.
pub struct Check {
    /// Shown in the table of results.
    pub name: &'static str,
    /// Does it; its complaints go to the terminal.
    pub run: fn(&Toolchain) -> Result<()>,
}

/// All of them, cheapest first.
pub const CHECKS: [Check; 5] = [
    Check { name: "rustfmt", run: |_| root::run(&mut root::command("cargo", &["fmt", "--all", "--check"])) },
    Check { name: "tidy", run: |_| tidy::run() },
    Check { name: "clippy, user side", run: |toolchain| root::run(&mut user_clippy(toolchain)) },
    Check { name: "clippy, kernel side", run: |toolchain| root::run(&mut kernel_clippy(toolchain)) },
    Check { name: "rustdoc", run: |toolchain| root::run(&mut rustdoc(toolchain)) },
];

/// Without the kernel side: an object is not needed, and clippy would build a second one.
fn user_clippy(toolchain: &Toolchain) -> Command {
    let mut cargo = toolchain.cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"]);
    cargo.env("AYA_BUILD_SKIP", "1");
    cargo
}

/// The programs as host code: the same lints, and no BPF target in clippy's way. A binary without `std` cannot unwind.
fn kernel_clippy(toolchain: &Toolchain) -> Command {
    let mut cargo = toolchain.cargo(&["clippy", "--quiet", "--config", "profile.dev.panic=\"abort\""]);
    cargo.args(["--package", "sheave-ebpf", "--features", "programs", "--bin", "sheave", "--", "--deny", "warnings"]);
    cargo
}

/// Broken links in comments, missing words on public items.
fn rustdoc(toolchain: &Toolchain) -> Command {
    let mut cargo = toolchain.cargo(&["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"]);
    cargo.env("RUSTDOCFLAGS", "--deny warnings");
    cargo
}
