//! Array maps written through memory: one store is one commit, seen whole by every program, without a system call.
//! The map wants BPF_F_MMAPABLE (Linux 5.5).

use std::{
    cell::OnceCell,
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use aya::maps::MapData;

use crate::datapath::{Error, Result};

/// Bytes that are mapped at once. The kernel maps every page of a window right away and counts it as memory of this
/// process, so large maps with few entries are seen through few windows. A multiple of every page size there is.
const WINDOW: usize = 64 << 10;
const WORD: usize = size_of::<u64>();

/// An array map as 8-byte words. Elements are as many words long as their size, rounded up.
pub struct Words {
    name: &'static str,
    map: OwnedFd,
    /// Each is mapped when it is first looked through.
    windows: Vec<OnceCell<Window>>,
    words: usize,
    stride: usize,
}

impl Words {
    /// Over `map`, which must be an array with BPF_F_MMAPABLE.
    ///
    /// # Errors
    /// When the map's size cannot be read, or the kernel refuses to map it.
    pub fn new(name: &'static str, map: &MapData) -> Result<Self> {
        let info = map.info().map_err(|e| Error::Incompatible(format!("map {name}: cannot read its size: {e}")))?;
        // The kernel rounds every element up to 8 bytes (array_map_alloc).
        let stride = (info.value_size() as usize).div_ceil(WORD);
        let words = info.max_entries() as usize * stride;
        let windows = (0..(words * WORD).div_ceil(WINDOW)).map(|_| OnceCell::new()).collect();
        let map = map.fd().as_fd().try_clone_to_owned();
        let map = map.map_err(|e| Error::kernel(format!("keeping {name} open"), e))?;
        let words = Self { name, map, windows, words, stride };
        words.get(0, 0)?; // a map that cannot be mapped is found out now
        Ok(words)
    }

    /// A word of an element.
    ///
    /// # Errors
    /// Beyond the end, or when the kernel has no memory for another window.
    pub fn get(&self, element: u32, word: usize) -> Result<&AtomicU64> {
        let index = element as usize * self.stride + word;
        if word >= self.stride || index >= self.words {
            return Err(Error::Incompatible(format!("map {} has no element {element}", self.name)));
        }
        let (number, place) = (index * WORD / WINDOW, index * WORD % WINDOW / WORD);
        let window = match self.windows[number].get() {
            Some(window) => window,
            None => {
                let window = self.open(number)?;
                self.windows[number].get_or_init(|| window)
            }
        };
        // SAFETY: in bounds, page-aligned base, and both sides only ever use aligned 8-byte accesses; the reference
        // lives no longer than `self`, which keeps the mapping.
        Ok(unsafe { &*window.base.add(place) })
    }

    /// Reads the first word of an element; 0 where there is none.
    #[must_use]
    pub fn load(&self, element: u32) -> u64 {
        self.get(element, 0).map_or(0, |word| word.load(Ordering::Acquire))
    }

    /// Everything stored or written to maps before is visible to whoever sees this word.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn store(&self, element: u32, value: u64) -> Result<()> {
        self.get(element, 0).map(|word| word.store(value, Ordering::Release))
    }

    fn open(&self, number: usize) -> Result<Window> {
        let begin = number * WINDOW;
        let length = WINDOW.min(self.words * WORD - begin);
        let refused = |e| Error::kernel(format!("mapping {} into memory", self.name), e);
        let offset = libc::off_t::try_from(begin).map_err(|_| refused(io::ErrorKind::InvalidInput.into()))?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh shared mapping; the kernel checks offset and length against the map.
        let base =
            unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, self.map.as_raw_fd(), offset) };
        if base == libc::MAP_FAILED {
            return Err(refused(io::Error::last_os_error()));
        }
        Ok(Window { base: base.cast(), length })
    }
}

/// A mapping of a part of a map.
struct Window {
    base: *const AtomicU64,
    length: usize,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is only touched through atomics.
unsafe impl Send for Window {}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `open`; no reference outlives the `Words` that owns it.
        unsafe { libc::munmap(self.base.cast_mut().cast(), self.length) };
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
