//! Keeping the verifier's work small. Every agent's start waits for it.

/// The same value, of which the verifier knows nothing. It walks the rest of a program once for each constant that a
/// branch further on asks for; where ways meet again, one that it has forgotten lets it walk on once. `noise` is any
/// number that it does not know: a time, or a word of a map.
#[inline(always)]
pub fn forget(value: u32, noise: u32) -> u32 {
    let mut value = u64::from(value);
    // VERIFIER: in LLVM's hands nothing would be left of these two.
    // SAFETY: arithmetic on a register.
    #[cfg(target_arch = "bpf")]
    unsafe {
        let noise = u64::from(noise);
        core::arch::asm!("{0} ^= {1}", "{0} ^= {1}", inout(reg) value, in(reg) noise, options(pure, nomem, nostack));
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        value ^= u64::from(noise) ^ u64::from(noise);
    }
    value as u32
}

/// As [`forget`], of a yes or no.
#[inline(always)]
pub fn forget_whether(value: bool, noise: u32) -> bool {
    forget(value.into(), noise) != 0
}
