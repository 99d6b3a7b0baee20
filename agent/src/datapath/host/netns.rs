//! Network namespaces: ours by its cookie, everyone's by their files.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    net::UdpSocket,
    os::{
        fd::{AsRawFd as _, RawFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
    thread,
};

/// Device and inode of a namespace: the same for everyone.
pub type Id = (u64, u64);

/// The cookie of the network namespace that this thread lives in. Needs Linux ≥ 5.14.
///
/// # Errors
/// `ENOPROTOOPT` on older kernels.
pub fn cookie() -> io::Result<u64> {
    const SO_NETNS_COOKIE: i32 = 71;
    let socket = UdpSocket::bind("127.0.0.1:0").or_else(|_| UdpSocket::bind("[::]:0"))?;
    let (mut cookie, mut length) = (0_u64, libc::socklen_t::try_from(size_of::<u64>()).unwrap_or(8));
    let into = (&raw mut cookie).cast();
    // SAFETY: both pointers live across the call, and the length is the cookie's.
    let r = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, into, &raw mut length) };
    if r == 0 { Ok(cookie) } else { Err(io::Error::last_os_error()) }
}

/// Every network namespace that a process lives in or that has a name below `/run/netns`, each once. In a container,
/// which sees no processes but its own, the names are what there is: container runtimes keep one for every pod. Opened
/// one at a time: there may be more than a process may have files. Processes that end while we look are left out.
pub fn all() -> impl Iterator<Item = io::Result<File>> {
    let mut seen = BTreeSet::new();
    let named = entries("/run/netns").chain(entries("/var/run/netns"));
    let lived_in = entries("/proc")
        .filter(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.parse::<u32>().is_ok()))
        .map(|path| path.join("ns/net"));
    named.chain(lived_in).filter_map(move |path| {
        // The link's target is cheap to tell apart; the file is opened only for a new one.
        let meta = fs::metadata(&path).ok()?;
        let id = (meta.dev(), meta.ino());
        if seen.contains(&id) {
            return None;
        }
        let opened = File::open(path);
        // Of a process that ended after we looked; others may live there.
        let is_gone = |e: &io::Error| matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied);
        if opened.as_ref().is_err_and(is_gone) {
            return None;
        }
        seen.insert(id);
        Some(opened)
    })
}

/// Which namespace an open file is.
#[must_use]
pub fn id(namespace: &File) -> Option<Id> {
    namespace.metadata().ok().map(|meta| (meta.dev(), meta.ino()))
}

/// The namespace of this thread; `None` where `/proc` is not mounted.
#[must_use]
pub fn own() -> Option<Id> {
    File::open("/proc/thread-self/ns/net").ok().and_then(|namespace| id(&namespace))
}

/// The namespaces that processes of a cgroup and those below it live in; `None` where some of these processes are hidden
/// from us. Processes that end while we look are left out.
#[must_use]
pub fn of_cgroup(root: &Path) -> Option<BTreeSet<Id>> {
    /// How the kernel lists a process of a PID namespace beside ours.
    const HIDDEN: &str = "0";
    let mut found = BTreeSet::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        for process in processes.lines() {
            match fs::metadata(format!("/proc/{process}/ns/net")) {
                _ if process == HIDDEN => return None,
                Ok(meta) => drop(found.insert((meta.dev(), meta.ino()))),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return None, // no CAP_SYS_PTRACE
                Err(_) => {}
            }
        }
        let below = fs::read_dir(&folder).into_iter().flatten().flatten();
        folders.extend(below.filter(|e| e.file_type().is_ok_and(|kind| kind.is_dir())).map(|e| e.path()));
    }
    Some(found)
}

fn entries(directory: &str) -> impl Iterator<Item = PathBuf> {
    fs::read_dir(directory).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path()))
}

/// Runs `work` in a thread that lives in another network namespace.
///
/// # Errors
/// When no thread can be started, or the namespace cannot be entered (CAP_SYS_ADMIN), or is none.
pub fn within<T: Send>(namespace: &File, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let descriptor: RawFd = namespace.as_raw_fd();
    thread::scope(|scope| {
        let inside = thread::Builder::new().spawn_scoped(scope, move || {
            // SAFETY: a plain system call that concerns this thread only, which ends with this closure.
            if unsafe { libc::setns(descriptor, libc::CLONE_NEWNET) } != 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(work())
        })?;
        inside.join().unwrap_or_else(|_| Err(io::Error::other("the thread in the namespace ended with a defect")))
    })
}
