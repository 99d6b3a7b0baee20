//! Counting reasons.
use crate::maps;
use sheave_ebpf::counter::Counter;

/// One more of `reason`, on this CPU.
#[inline(always)]
pub fn bump(reason: Counter) {
    if let Some(count) = maps::counter(reason as u32) {
        // SAFETY: this CPU's slot; cgroup programs run with migration off, and a lost count would be no harm.
        unsafe { *count += 1 }
    }
}
