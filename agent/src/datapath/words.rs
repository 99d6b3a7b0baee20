//! Array maps written through memory: one store is one commit, seen whole by every program, without a system call.
//! The map wants BPF_F_MMAPABLE (Linux 5.5).

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::maps::MapData;

use super::{Error, Result};

/// A mapping of a whole array map as 8-byte words. Elements are as many words long as their size, rounded up.
pub struct Words {
    base: *const AtomicU64,
    words: usize,
    stride: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only touched through atomics.
unsafe impl Send for Words {}

impl Words {
    /// Maps `map`, which must be an array with BPF_F_MMAPABLE.
    ///
    /// # Errors
    /// When the map's size cannot be read, or the kernel refuses the mapping.
    pub fn new(name: &str, map: &MapData) -> Result<Self> {
        let info = map.info().map_err(|e| Error::Incompatible(format!("map {name}: cannot read its size: {e}")))?;
        // The kernel rounds every element up to 8 bytes (array_map_alloc).
        let stride = (info.value_size() as usize).div_ceil(8);
        let words = info.max_entries() as usize * stride;
        let (access, fd) = (libc::PROT_READ | libc::PROT_WRITE, map.fd().as_fd().as_raw_fd());
        // SAFETY: a fresh shared mapping; the kernel checks the length against the map.
        let base = unsafe { libc::mmap(ptr::null_mut(), words * 8, access, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(Error::kernel(format!("mapping {name} into memory"), io::Error::last_os_error()));
        }
        Ok(Self { base: base.cast(), words, stride })
    }

    /// A word of an element; `None` beyond the end.
    #[must_use]
    pub fn get(&self, element: u32, word: usize) -> Option<&AtomicU64> {
        let index = element as usize * self.stride + word;
        // SAFETY: in bounds, page-aligned base, and both sides only ever use aligned 8-byte accesses.
        (word < self.stride && index < self.words).then(|| unsafe { &*self.base.add(index) })
    }

    /// Reads the first word of an element; 0 beyond the end.
    #[must_use]
    pub fn load(&self, element: u32) -> u64 {
        self.get(element, 0).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Everything stored or written to maps before is visible to whoever sees this word. Nothing beyond the end.
    pub fn store(&self, element: u32, value: u64) {
        if let Some(word) = self.get(element, 0) {
            word.store(value, Ordering::Release);
        }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no reference outlives `self`.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.words * 8) };
    }
}

/// Waits until no program that runs now can still hold a pointer into a map (membarrier global: one RCU grace period,
/// some 10 ms). Where the kernel has nohz_full CPUs it cannot do that; a long sleep stands in.
pub fn grace_period() {
    const MEMBARRIER_CMD_GLOBAL: i32 = 1;
    // SAFETY: a plain system call.
    if unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) } != 0 {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}
