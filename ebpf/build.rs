//! Tells the linker of the programs how to copy and fill memory.
use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // What it passes to LLVM otherwise turns the filling of even a few bytes into a loop, byte by byte.
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "bpf") {
        println!("cargo::rustc-link-arg-bins=--disable-expand-memcpy-in-order");
    }
}
