//! Attaching the cgroup programs: each in one pinned link, replaced inside it, so that never two copies run at once.

use std::{fs, io, os::fd::AsFd as _, path::Path};

use aya::{
    Ebpf,
    programs::{CgroupAttachMode, Program, links::FdLink},
};

use super::{Error, Result, kernel::flatten, link, pins::Pins, verifier};

/// In the order of attaching: first what restores, then what redirects, so that nothing is shown a backend's address
/// that could not be turned back.
const PROGRAMS: [&str; 9] = [
    "sock_release",
    "getpeername4",
    "getpeername6",
    "recvmsg4",
    "recvmsg6",
    "sendmsg4",
    "sendmsg6",
    "connect4",
    "connect6",
];

/// Attached with bind protection only.
const BIND_PROGRAMS: [&str; 2] = ["post_bind4", "post_bind6"];

fn programs(bind_protection: bool) -> impl Iterator<Item = &'static str> {
    let bind: &[&str] = if bind_protection { &BIND_PROGRAMS } else { &[] };
    PROGRAMS.iter().chain(bind).copied()
}

/// Takes all programs through the verifier; none is attached yet.
///
/// # Errors
/// When it refuses one.
pub fn load(ebpf: &mut Ebpf, bind_protection: bool) -> Result<()> {
    for name in programs(bind_protection) {
        let loaded = match ebpf.program_mut(name) {
            Some(Program::CgroupSockAddr(p)) => p.load(),
            Some(Program::CgroupSock(p)) => p.load(),
            Some(_) | None => return Err(missing(name)),
        };
        loaded.map_err(|e| verifier::refused(name, &e))?;
    }
    Ok(())
}

/// Attaches all programs, loaded before, to `cgroup`, the root of the cgroup v2 tree of this node's processes.
///
/// # Errors
/// When the cgroup refuses a link. Programs attached before stay.
pub fn attach(ebpf: &mut Ebpf, cgroup: &Path, pins: &Pins, bind_protection: bool) -> Result<()> {
    let directory =
        fs::File::open(cgroup).map_err(|e| Error::kernel(format!("opening the cgroup {}", cgroup.display()), e))?;
    for name in programs(bind_protection) {
        attach_one(ebpf, name, &directory, &pins.link(name))?;
    }
    if !bind_protection {
        for name in BIND_PROGRAMS {
            remove_pin(&pins.link(name))?;
        }
    }
    Ok(())
}

fn attach_one(ebpf: &mut Ebpf, name: &str, cgroup: &fs::File, pin: &Path) -> Result<()> {
    let refused = |e: &dyn std::error::Error| {
        Error::Incompatible(format!(
            "the kernel does not attach the program {name} to the cgroup: {}; does another program hold it alone? \
             `bpftool cgroup tree` shows",
            flatten(e)
        ))
    };
    let program = ebpf.program_mut(name).ok_or_else(|| missing(name))?;
    match link::replace(pin, program.fd().map_err(|e| refused(&e))?.as_fd()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Ok(()) => return Ok(()),
        // The cgroup of a former life is gone and took the link's effect with it: make a new one.
        Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => remove_pin(pin)?,
        Err(e) => return Err(Error::kernel(format!("replacing the program of {}", pin.display()), e)),
    }
    let link = match program {
        Program::CgroupSockAddr(p) => {
            let id = p.attach(cgroup, CgroupAttachMode::Single).map_err(|e| refused(&e))?;
            p.take_link(id).map_err(|e| refused(&e))?.try_into()
        }
        Program::CgroupSock(p) => {
            let id = p.attach(cgroup, CgroupAttachMode::Single).map_err(|e| refused(&e))?;
            p.take_link(id).map_err(|e| refused(&e))?.try_into()
        }
        _ => return Err(missing(name)),
    };
    let link: FdLink = link.map_err(|e| refused(&e))?;
    link.pin(pin).map(drop).map_err(|e| Error::Incompatible(format!("cannot pin the link of {name}: {}", flatten(&e))))
}

fn missing(name: &str) -> Error {
    Error::Incompatible(format!("the object holds no cgroup program {name}"))
}

/// A missing pin is already removed.
pub(super) fn remove_pin(pin: &Path) -> Result<()> {
    match fs::remove_file(pin) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::kernel(format!("removing the pin {}", pin.display()), e))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Detaches everything and removes every pin below `pins.base`, all versions; says what was removed. `dry_run` only says.
///
/// # Errors
/// When a pin cannot be removed.
pub fn cleanup(pins: &Pins, dry_run: bool) -> Result<Vec<String>> {
    let mut removed = Vec::new();
    // Links before maps: a program never runs without its tables.
    for version in directories(&pins.base)? {
        let links = version.join("links");
        for directory in [links, version.join("maps"), version] {
            remove_directory(&directory, dry_run, &mut removed)?;
        }
    }
    remove_directory(&pins.base, dry_run, &mut removed)?;
    Ok(removed)
}

fn directories(path: &Path) -> Result<Vec<std::path::PathBuf>> {
    let failed = |e| Error::kernel(format!("listing {}", path.display()), e);
    match fs::read_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(failed(e)),
        Ok(entries) => {
            let paths: io::Result<Vec<_>> = entries.map(|entry| entry.map(|e| e.path())).collect();
            Ok(paths.map_err(failed)?.into_iter().filter(|p| p.is_dir()).collect())
        }
    }
}

fn remove_directory(path: &Path, dry_run: bool, removed: &mut Vec<String>) -> Result<()> {
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
