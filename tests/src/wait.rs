//! Waiting for conditions. Nothing in the tests sleeps for a time and hopes.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// For what should take milliseconds, on a machine that is busy with other things.
pub const SOON: Duration = Duration::from_secs(10);

/// What limits are multiplied by: more than 1 in an emulated machine, whose init sets `SHEAVE_SLOWNESS`.
#[must_use]
pub fn slowness() -> u32 {
    std::env::var("SHEAVE_SLOWNESS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// Tries until it succeeds; after `limit`, longer on a slow machine, its last error is the answer.
///
/// # Errors
/// The last error of `attempt`, with `what` and the limit in front.
pub fn eventually<T>(what: &str, limit: Duration, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let limit = limit * slowness();
    let end = Instant::now() + limit;
    loop {
        match attempt() {
            Err(_) if Instant::now() < end => thread::sleep(Duration::from_millis(10)),
            result => return result.with_context(|| format!("{what}, within {limit:?}")),
        }
    }
}

/// Makes sure that something stays true for a while, for what must *not* happen.
///
/// # Errors
/// The first error of `check`.
pub fn throughout(period: Duration, mut check: impl FnMut() -> Result<()>) -> Result<()> {
    let end = Instant::now() + period;
    while Instant::now() < end {
        check()?;
        thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
