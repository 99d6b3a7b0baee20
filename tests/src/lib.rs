//! The harness: nodes, pods and an outside client made of network namespaces and cgroups on this host, a real agent
//! on each node, and programs that dial and answer. See `docs/testing.md` for the picture.
//!
//! A test begins with [`lab::Lab::new`], which skips it (loudly) where this host cannot run it, and ends by dropping
//! the lab, which removes everything it made, also when the test panics.

pub mod agent;
pub mod api_server;
pub mod attached;
pub mod background;
pub mod bench;
pub mod client;
pub mod echo;
pub mod fake_api;
pub mod flow_table;
pub mod foreign;
pub mod http;
pub mod kube_proxy;
pub mod lab;
pub mod leftovers;
pub mod monitor;
pub mod node;
pub mod objects;
pub mod other_build;
pub mod packet;
pub mod packet_model;
pub mod pair;
pub mod place;
pub mod tap;
pub mod told;
pub mod transfer;
pub mod tunnel;
pub mod wait;

use std::io::Write;

/// Says that the running test is skipped, and why. The caller then returns. `cargo xtask test` counts these lines.
pub fn skip(reason: &str) {
    let thread = std::thread::current();
    say(&format!("SKIPPED {}: {reason}", thread.name().unwrap_or("a test")));
}

/// Prints a line also when the test passes: what `println!` says, libtest swallows then.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
