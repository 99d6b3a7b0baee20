//! How many files the agent may have open: two for each device with programs, and those that strangers' connections are.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// Raises the limit as far as this process may: the usual one, 1024, is for programs that use select(2), and a node of
/// 500 pods passes it.
///
/// # Errors
/// What the kernel says.
pub fn raise_limit() -> nix::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
}
