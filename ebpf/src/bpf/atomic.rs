//! Read-modify-write on a shared map value: core's atomics do not exist for this target.

/// `*p += v`, atomically and without a result; `v` may be negative.
///
/// # Safety
/// `p` points into a live map value and is 8-byte aligned.
#[inline(always)]
pub unsafe fn add(p: *mut u64, v: i64) {
    // SAFETY: the caller's promise.
    #[cfg(target_arch = "bpf")]
    unsafe {
        core::arch::asm!("lock *(u64 *)({p} + 0) += {v}", p = in(reg) p, v = in(reg) v);
    }
    // SAFETY: the caller's promise; this arm only type-checks the crate on the host.
    #[cfg(not(target_arch = "bpf"))]
    unsafe {
        *p = (*p).wrapping_add_signed(v);
    }
}
