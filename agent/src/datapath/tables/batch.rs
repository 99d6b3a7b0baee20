//! Reading and deleting many entries of a hash map by one system call (Linux 5.6), which aya 0.14 does not offer.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd as _, AsRawFd as _},
};

use aya::{Pod, maps::MapData};

const BPF_MAP_LOOKUP_BATCH: i64 = 24;
const BPF_MAP_DELETE_BATCH: i64 = 27;

/// Entries of one call. The kernel hands out whole buckets, so this must hold the fullest.
const ENTRIES: u32 = 4096;

/// The part of `union bpf_attr` that batches use.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    elem_flags: u64,
    flags: u64,
}

fn call(command: i64, attributes: &mut Attributes) -> io::Result<()> {
    let size = size_of::<Attributes>();
    // SAFETY: the attributes live across the call and are as long as we say; the callers see to what they point to.
    let r = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attributes, size) };
    if r == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Visits the entries of a hash map, in batches and in no order. Entries that come and go meanwhile may be missed, or
/// seen twice.
///
/// # Errors
/// What the kernel said.
pub fn walk<K: Pod, V: Pod>(map: &MapData, mut visit: impl FnMut(&[(K, V)])) -> io::Result<()> {
    let mut keys: Vec<MaybeUninit<K>> = vec![MaybeUninit::uninit(); ENTRIES as usize];
    let mut values: Vec<MaybeUninit<V>> = vec![MaybeUninit::uninit(); ENTRIES as usize];
    let mut batch = Vec::with_capacity(ENTRIES as usize);
    let (mut from, mut to) = (0_u32, 0_u32);
    let mut is_first = true;
    loop {
        let mut attributes = Attributes {
            in_batch: if is_first { 0 } else { &raw const from as u64 },
            out_batch: &raw mut to as u64,
            keys: keys.as_mut_ptr() as u64,
            values: values.as_mut_ptr() as u64,
            count: ENTRIES,
            map: map.fd().as_fd().as_raw_fd().cast_unsigned(),
            ..Attributes::default()
        };
        let result = call(BPF_MAP_LOOKUP_BATCH, &mut attributes);
        let is_last = match result {
            Ok(()) => false,
            Err(e) if e.kind() == io::ErrorKind::NotFound => true,
            Err(e) => return Err(e),
        };
        batch.clear();
        for i in 0..attributes.count.min(ENTRIES) as usize {
            // SAFETY: the kernel has filled `count` keys and values; both are plain old data.
            batch.push(unsafe { (keys[i].assume_init(), values[i].assume_init()) });
        }
        visit(&batch);
        if is_last {
            return Ok(());
        }
        (from, is_first) = (to, false);
    }
}

/// Deletes entries; those that are gone already are no error.
///
/// # Errors
/// What the kernel said.
pub fn delete<K: Pod>(map: &MapData, keys: &[K]) -> io::Result<()> {
    let mut rest = keys;
    while !rest.is_empty() {
        let mut attributes = Attributes {
            keys: rest.as_ptr() as u64,
            count: u32::try_from(rest.len()).unwrap_or(u32::MAX),
            map: map.fd().as_fd().as_raw_fd().cast_unsigned(),
            ..Attributes::default()
        };
        match call(BPF_MAP_DELETE_BATCH, &mut attributes) {
            Ok(()) => return Ok(()),
            // The kernel stops at the first key that is not there, having deleted `count`.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                rest = rest.get(attributes.count as usize + 1..).unwrap_or_default();
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
