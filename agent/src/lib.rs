//! The node agent and its command line. `main.rs` only parses arguments; the tests use this library.
//!
//! Data flows one way: source → model → plan → reconcile → datapath. See `docs/architecture.md`.

pub mod api;
pub mod check;
pub mod cli;
pub mod config;
pub mod conntrack;
pub mod datapath;
pub mod engine;
pub mod events;
pub mod exit;
pub mod health;
pub mod health_check;
pub mod hooks;
pub mod lb;
pub mod lock;
pub mod logging;
pub mod metrics;
pub mod model;
pub mod monitor;
#[cfg(test)]
mod operations;
pub mod options;
pub mod plan;
pub mod preflight;
pub mod privileges;
pub mod reconcile;
pub mod render;
pub mod run;
pub mod server;
pub mod source;
pub mod takeover;
mod timers;
pub mod traces;
pub mod upkeep;
pub mod view;

/// The kernel side, as built by build.rs.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sheave"));
