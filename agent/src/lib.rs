//! The node agent and its command line. `main.rs` only parses arguments; the tests use this library.
//!
//! Data flows one way: source → model → plan → reconcile → datapath. See `docs/architecture.md`.

pub mod api;
pub mod cli;
pub mod config;
pub mod conntrack;
pub mod datapath;
pub mod engine;
pub mod event_loop;
pub mod exit;
pub mod lb;
pub mod lifecycle;
pub mod logging;
pub mod model;
pub mod monitor;
pub mod observe;
#[cfg(test)]
mod operations;
pub mod options;
pub mod plan;
pub mod reconcile;
pub mod render;
pub mod run;
pub mod source;
mod timers;
pub mod view;

/// The kernel side, as built by build.rs.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sheave"));
