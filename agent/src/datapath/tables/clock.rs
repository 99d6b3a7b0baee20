//! The clock of the programs.

use std::time::Duration;

/// What `bpf_ktime_get_ns` would say: the time since the host was booted, without that in suspension.
#[must_use]
pub fn monotonic() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in a struct of ours.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// The same in whole seconds, as tables hold it.
#[must_use]
pub fn seconds() -> u32 {
    u32::try_from(monotonic().as_secs()).unwrap_or(u32::MAX)
}
