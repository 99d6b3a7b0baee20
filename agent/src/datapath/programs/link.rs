//! Pinned objects by bpf(2): what aya 0.14 does not offer.
//!
//! Every map and link of ours is *held* besides being pinned: the descriptor keeps it alive when somebody removes the
//! pin, and the pin keeps it alive when the agent dies. So traffic notices neither loss, and a lost pin can be made
//! again.

use std::{
    ffi::CString,
    fs::{self, DirBuilder},
    io,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::DirBuilderExt as _},
    },
    path::{Path, PathBuf},
};

const BPF_OBJ_PIN: i64 = 6;
const BPF_OBJ_GET: i64 = 7;
const BPF_OBJ_GET_INFO_BY_FD: i64 = 15;
const BPF_LINK_CREATE: i64 = 28;
const BPF_LINK_UPDATE: i64 = 29;
const BPF_LINK_DETACH: i64 = 34;

/// Of BPF_LINK_CREATE on a device, Linux 6.6.
const BPF_F_BEFORE: u32 = 8;

/// Where among those of others a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Place {
    /// After all that are there.
    Last = 0,
    /// Before all that are there; on devices only.
    First = BPF_F_BEFORE,
}

/// The leading words of `union bpf_attr`; the kernel reads the rest as zero.
fn bpf(command: i64, attributes: &mut [u32; 4]) -> io::Result<i32> {
    // SAFETY: the array lives across the call and is as long as we say; what it points to is the caller's.
    let r = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_mut_ptr(), size_of_val(attributes)) };
    i32::try_from(r).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)
}

/// For the commands that return a descriptor.
fn bpf_fd(command: i64, attributes: &mut [u32; 4]) -> io::Result<OwnedFd> {
    // SAFETY: a descriptor the kernel has just given us.
    bpf(command, attributes).map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A descriptor as it stands in `union bpf_attr`.
#[must_use]
pub fn raw(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd().cast_unsigned()
}

/// An address as two words of `union bpf_attr`.
fn halves<T>(pointer: *const T) -> [u32; 2] {
    let address = (pointer as u64).to_ne_bytes();
    [0, 4].map(|i| u32::from_ne_bytes([address[i], address[i + 1], address[i + 2], address[i + 3]]))
}

/// The leading words of `struct bpf_link_info` and `struct bpf_map_info`, which agree on the second one.
fn info(object: BorrowedFd<'_>) -> io::Result<[u32; 8]> {
    let mut info = [0; 8];
    let [a, b] = halves(info.as_mut_ptr());
    bpf(BPF_OBJ_GET_INFO_BY_FD, &mut [raw(object), size_of_val(&info) as u32, a, b])?;
    Ok(info)
}

fn open(pin: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let [a, b] = halves(path.as_ptr());
    bpf_fd(BPF_OBJ_GET, &mut [a, b, 0, 0])
}

/// A pinned map or link of ours, held.
#[derive(Debug)]
pub struct Pinned {
    object: OwnedFd,
    pin: PathBuf,
}

impl Pinned {
    /// What is pinned there.
    ///
    /// # Errors
    /// `NotFound` when there is no such pin; else what the kernel says.
    pub fn open(pin: PathBuf) -> io::Result<Self> {
        Ok(Self { object: open(&pin)?, pin })
    }

    /// A new link on a cgroup's descriptor or a device's index, of the attach type that `linux/bpf.h` numbers so. Not
    /// pinned yet.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn link(
        program: BorrowedFd<'_>,
        target: u32,
        attach_type: u32,
        place: Place,
        pin: PathBuf,
    ) -> io::Result<Self> {
        let object = bpf_fd(BPF_LINK_CREATE, &mut [raw(program), target, attach_type, place as u32])?;
        Ok(Self { object, pin })
    }

    /// Puts a program into a link, in one step.
    ///
    /// # Errors
    /// `ENOLINK` when the link is detached; else what the kernel says.
    pub fn replace(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        bpf(BPF_LINK_UPDATE, &mut [raw(self.object.as_fd()), raw(program), 0, 0]).map(drop)
    }

    /// Ends a link's effect at once. Without it, that is when the kernel gets round to freeing a link whose pin and
    /// descriptors are gone; until then the same program cannot be attached there again (`EEXIST`).
    ///
    /// # Errors
    /// What the kernel says.
    pub fn detach(&self) -> io::Result<()> {
        bpf(BPF_LINK_DETACH, &mut [raw(self.object.as_fd()), 0, 0, 0]).map(drop)
    }

    /// Whether a link leads somewhere: not after BPF_LINK_DETACH, nor when its cgroup or device is gone.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn is_attached(&self) -> io::Result<bool> {
        // Its place follows type, id, program and padding: a cgroup's id, a device's index.
        Ok(info(self.object.as_fd())?[4] != 0)
    }

    /// The id of the cgroup that a link leads to, which is the inode of its directory; 0 = none any more.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn cgroup(&self) -> io::Result<u64> {
        let [.., a, b, _, _] = info(self.object.as_fd())?;
        let ([a, b, c, d], [e, f, g, h]) = (a.to_ne_bytes(), b.to_ne_bytes());
        Ok(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
    }

    /// Whether the pin is there and names this very object.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.is_at(&self.pin)
    }

    /// Whether that pin names this very object.
    #[must_use]
    pub fn is_at(&self, pin: &Path) -> bool {
        let id = |object: BorrowedFd<'_>| info(object).map(|info| info[1]).ok();
        open(pin).is_ok_and(|found| id(found.as_fd()) == id(self.object.as_fd()))
    }

    /// The same object, to be pinned elsewhere.
    #[must_use]
    pub fn moved(self, pin: PathBuf) -> Self {
        Self { pin, ..self }
    }

    /// Pins it, with the directories on the way, for root only; what the pin named before is replaced.
    ///
    /// # Errors
    /// What the kernel says: the file system may be read-only, or no bpffs any more.
    pub fn pin(&self) -> io::Result<()> {
        if let Some(directory) = self.pin.parent() {
            make_directory(directory)?;
        }
        match fs::remove_file(&self.pin) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            Ok(()) | Err(_) => {}
        }
        let path = CString::new(self.pin.as_os_str().as_bytes())?;
        let [a, b] = halves(path.as_ptr());
        bpf(BPF_OBJ_PIN, &mut [a, b, raw(self.object.as_fd()), 0]).map(drop)
    }

    /// Makes the pin anew if it is not there; says whether that was so.
    ///
    /// # Errors
    /// As [`pin`](Self::pin).
    pub fn mend(&self) -> io::Result<bool> {
        if self.is_pinned() {
            return Ok(false);
        }
        self.pin().map(|()| true)
    }

    /// Where.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.pin
    }
}

/// A directory of pins and those above it, for root only.
///
/// # Errors
/// What the kernel says.
pub fn make_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}
