//! Attaching the cgroup programs: each in one pinned link, replaced inside it, so that never two copies run at once.

use std::{
    fs, io,
    os::{
        fd::{AsFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use aya::{Ebpf, programs};

use crate::datapath::{
    Error, Result,
    programs::{
        link::{Pinned, Place, raw},
        verifier,
    },
    tables::pins::Pins,
};
use crate::lifecycle::upkeep::{Part, Upkeep};

/// Programs and their attach types (`enum bpf_attach_type`), in the order of attaching: first what restores, then what
/// redirects, so that nothing is shown a backend's address that could not be turned back.
const PROGRAMS: [(&str, u32); 9] = [
    ("sock_release", 34),
    ("getpeername4", 29),
    ("getpeername6", 30),
    ("recvmsg4", 19),
    ("recvmsg6", 20),
    ("sendmsg4", 14),
    ("sendmsg6", 15),
    ("connect4", 10),
    ("connect6", 11),
];

/// Attached with bind protection only.
const BIND_PROGRAMS: [(&str, u32); 2] = [("post_bind4", 12), ("post_bind6", 13)];

/// The cgroup programs at work, and what it takes to put one back.
#[derive(Debug)]
pub struct Attached {
    cgroup: fs::File,
    hooks: Vec<Hook>,
}

#[derive(Debug)]
struct Hook {
    program: Program,
    link: Pinned,
}

/// A program that the kernel has accepted.
#[derive(Debug)]
pub struct Program {
    name: &'static str,
    attach_type: u32,
    fd: OwnedFd,
}

/// Loads the programs of sockets.
///
/// # Errors
/// When the verifier refuses one.
pub fn load(ebpf: &mut Ebpf, bind_protection: bool) -> Result<Vec<Program>> {
    let bind: &[_] = if bind_protection { &BIND_PROGRAMS } else { &[] };
    let load = |(name, attach_type): &(&'static str, u32)| {
        Ok(Program { name, attach_type: *attach_type, fd: load_one(ebpf, name)? })
    };
    PROGRAMS.iter().chain(bind).map(load).collect()
}

fn load_one(ebpf: &mut Ebpf, name: &str) -> Result<OwnedFd> {
    let missing = || Error::Incompatible(format!("the object holds no cgroup program {name}"));
    let program = ebpf.program_mut(name).ok_or_else(missing)?;
    let loaded = match program {
        programs::Program::CgroupSockAddr(p) => p.load(),
        programs::Program::CgroupSock(p) => p.load(),
        _ => return Err(missing()),
    };
    let fd = loaded.and_then(|()| program.fd().map(|fd| fd.as_fd().try_clone_to_owned()));
    fd.map_err(|e| verifier::refused(name, &e))?.map_err(|e| Error::kernel(format!("keeping the program {name}"), e))
}

/// Attaches all programs to `cgroup`, the root of the cgroup v2 tree of this node's processes.
///
/// # Errors
/// When the cgroup refuses a link. Programs attached before stay.
pub fn attach(programs: Vec<Program>, cgroup: &Path, pins: &Pins, bind_protection: bool) -> Result<Attached> {
    let cgroup =
        fs::File::open(cgroup).map_err(|e| Error::kernel(format!("opening the cgroup {}", cgroup.display()), e))?;
    let mut hooks = Vec::new();
    for program in programs {
        let link = attach_one(&program, &cgroup, &pins.link(program.name))?;
        hooks.push(Hook { program, link });
    }
    if !bind_protection {
        for (name, _) in BIND_PROGRAMS {
            remove_link(&pins.link(name))?;
        }
    }
    Ok(Attached { cgroup, hooks })
}

/// Puts the program into the pinned link, else into a new one.
fn attach_one(program: &Program, cgroup: &fs::File, pin: &Path) -> Result<Pinned> {
    let failed = |e| Error::kernel(format!("replacing the program of {}", pin.display()), e);
    let refused = |e| {
        Error::Incompatible(format!(
            "cannot attach the program {} to the cgroup: {e}; is another program attached there exclusively? `bpftool \
             cgroup tree` shows it",
            program.name
        ))
    };
    match Pinned::open(pin.to_owned()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(failed(e)),
        Ok(link) => match link.cgroup().map_err(failed)? {
            // The cgroup of a former life is gone and took the link's effect with it: make a new one.
            0 => {}
            id if id == cgroup.metadata().map_err(failed)?.ino() => match link.replace(program.fd.as_fd()) {
                Ok(()) => return Ok(link),
                Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => {} // it went between the two questions
                Err(e) => return Err(failed(e)),
            },
            // --cgroup-root is another one now. First off there: one may be below the other, and two copies never run.
            _ => remove_link(pin)?,
        },
    }
    let link = program.link(cgroup, pin.to_owned()).map_err(refused)?;
    link.pin().map_err(|e| Error::kernel(format!("pinning the link {}", pin.display()), e))?;
    Ok(link)
}

impl Attached {
    /// Puts back what somebody has detached or unpinned.
    pub fn mend(&mut self, upkeep: &Upkeep) {
        for hook in &mut self.hooks {
            upkeep.note(Part::CgroupLink, hook.program.name, hook.mend(&self.cgroup));
            upkeep.note(Part::Pin, hook.link.path().display(), hook.link.mend());
        }
    }
}

impl Hook {
    fn mend(&mut self, cgroup: &fs::File) -> io::Result<bool> {
        if self.link.is_attached()? {
            return Ok(false);
        }
        self.link = self.program.link(cgroup, self.link.path().to_owned())?;
        Ok(true)
    }
}

impl Program {
    fn link(&self, cgroup: &fs::File, pin: PathBuf) -> io::Result<Pinned> {
        Pinned::link(self.fd.as_fd(), raw(cgroup.as_fd()), self.attach_type, Place::Last, pin)
    }
}

/// Removes a link and its pin; a missing one is already removed. Its effect ends here, not when the kernel gets round to
/// freeing what the pin held.
pub(in crate::datapath) fn remove_link(pin: &Path) -> Result<()> {
    end(pin);
    match fs::remove_file(pin) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::kernel(format!("removing the pin {}", pin.display()), e))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Ends a pinned link's effect. What cannot be detached (Linux before 5.9) goes with its pin.
fn end(pin: &Path) {
    if let Ok(link) = Pinned::open(pin.to_owned()) {
        let _goes_with_its_pin = link.detach();
    }
}

/// Detaches everything and removes every pin below `pins.base`, all versions; says what was removed. `dry_run` only
/// says.
///
/// # Errors
/// When a pin cannot be removed.
pub fn cleanup(pins: &Pins, dry_run: bool) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    // Links before maps: a program never runs without its tables.
    for version in directories(&pins.base)? {
        let links = version.join("links");
        let pinned = if dry_run { Vec::new() } else { entries(&links)? };
        pinned.iter().for_each(|pin| end(pin));
        for directory in [links, version.join("maps"), version] {
            remove_directory(&directory, dry_run, &mut removed)?;
        }
    }
    remove_directory(&pins.base, dry_run, &mut removed)?;
    Ok(removed)
}

fn directories(path: &Path) -> Result<Vec<PathBuf>> {
    Ok(entries(path)?.into_iter().filter(|path| path.is_dir()).collect())
}

/// What is in a directory; nothing is in one that is not there.
fn entries(path: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e| Error::kernel(format!("listing {}", path.display()), e);
    match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(failed(e)),
        Ok(entries) => entries.map(|entry| entry.map(|e| e.path())).collect::<io::Result<_>>().map_err(failed),
    }
}

/// What is not there is not missed; directories in it stay.
pub(in crate::datapath) fn remove_directory(path: &Path, dry_run: bool, removed: &mut Vec<String>) -> Result<()> {
    let failed = |e| Error::kernel(format!("removing {}", path.display()), e);
    let entries = match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other.map_err(failed)?,
    };
    for entry in entries {
        let entry = entry.map_err(failed)?.path();
        if entry.is_dir() {
            continue;
        }
        if !dry_run {
            fs::remove_file(&entry).map_err(failed)?;
        }
        removed.push(entry.display().to_string());
    }
    if !dry_run {
        fs::remove_dir(path).map_err(failed)?;
    }
    removed.push(path.display().to_string());
    Ok(())
}
