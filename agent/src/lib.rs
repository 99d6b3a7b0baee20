//! The node agent and its command line. `main.rs` only parses arguments; the tests use this library.
//!
//! Data flows one way: source → model → plan → reconcile → datapath. See `docs/architecture.md`.

pub mod model;
pub mod plan;
pub mod source;
pub mod view;

/// The kernel side, as built by build.rs.
pub static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/sheave"));
