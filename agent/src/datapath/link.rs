//! Replacing the program of a pinned link in one step: BPF_LINK_UPDATE, which aya 0.14 offers for tc and XDP only.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

const BPF_OBJ_GET: i64 = 7;
const BPF_LINK_UPDATE: i64 = 29;

/// The leading words of `union bpf_attr`; the kernel reads the rest as zero.
fn bpf(command: i64, attributes: &mut [u32; 4]) -> io::Result<i32> {
    // SAFETY: the array lives across the call and is as long as we say.
    let r = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size_of_val(attributes)) };
    i32::try_from(r).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)
}

/// Puts `program` into the link pinned at `pin`.
///
/// # Errors
/// `NotFound` when there is no such pin; else what the kernel says.
pub fn replace(pin: &Path, program: BorrowedFd<'_>) -> io::Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let address = (path.as_ptr() as u64).to_ne_bytes();
    let [a, b] = [0, 4].map(|i| u32::from_ne_bytes([address[i], address[i + 1], address[i + 2], address[i + 3]]));
    let link = bpf(BPF_OBJ_GET, &mut [a, b, 0, 0])?;
    // SAFETY: a descriptor the kernel has just given us.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    bpf(BPF_LINK_UPDATE, &mut [link.as_raw_fd().cast_unsigned(), program.as_raw_fd().cast_unsigned(), 0, 0]).map(drop)
}
