//! A program that is not ours on the same hooks, as a mesh or a security tool would have it; and who is attached.

use std::{
    collections::BTreeMap,
    ffi::CString,
    fs::{self, File},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
    process::Command,
};

use anyhow::{Context, Result, bail};
use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType,
    tc::{self, NlOptions, TcAttachOptions, TcHandle},
};
use serde_json::Value;
use sheave_agent::options::TcAttach;

/// Commands of bpf(2).
const LOAD: libc::c_long = 5;
const OBJ_PIN: libc::c_long = 6;
const OBJ_GET: libc::c_long = 7;
const ATTACH: libc::c_long = 8;
const LINK_DETACH: libc::c_long = 34;
/// `BPF_PROG_TYPE_SCHED_CLS`
const CLASSIFIER: u32 = 3;
/// `BPF_PROG_TYPE_CGROUP_SOCK_ADDR`
const SOCK_ADDR: u32 = 18;
/// `BPF_CGROUP_INET4_CONNECT`
const CONNECT4: u32 = 10;
/// `BPF_F_ALLOW_MULTI`: beside others, as a well-behaved program attaches.
const ALLOW_MULTI: u32 = 2;

/// The start of `union bpf_attr` for loading; what follows may stay zero.
#[repr(C)]
#[derive(Default)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log: [u32; 4],
    kern_version: u32,
    prog_flags: u32,
    name: [u8; 16],
    ifindex: u32,
    expected_attach_type: u32,
}

/// The start of `union bpf_attr` for attaching.
#[repr(C)]
struct AttachAttr {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

/// The start of `union bpf_attr` for pinning.
#[repr(C)]
struct PinAttr {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// Attaches a connect4 program called "foreign" that lets everything pass; it stays as long as the cgroup.
///
/// # Errors
/// When the kernel refuses.
pub fn attach(cgroup: &Path) -> Result<()> {
    attach_with(cgroup, ALLOW_MULTI)
}

/// The same, but nobody else may attach to the hook.
///
/// # Errors
/// When the kernel refuses.
pub fn attach_alone(cgroup: &Path) -> Result<()> {
    attach_with(cgroup, 0)
}

/// A program called "foreign" that returns a constant.
fn load(prog_type: u32, expected_attach_type: u32, returns: u64) -> Result<OwnedFd> {
    let instructions: [u64; 2] = [returns << 32 | 0xb7, 0x95]; // r0 = …; exit
    let mut name = [0; 16];
    name[..7].copy_from_slice(b"foreign");
    let load = LoadAttr {
        prog_type,
        insn_cnt: 2,
        insns: instructions.as_ptr() as u64,
        license: c"GPL".as_ptr() as u64,
        name,
        expected_attach_type,
        ..LoadAttr::default()
    };
    let program = bpf(LOAD, &load).context("cannot load the foreign program")?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(program) })
}

/// Attaches programs to both hooks of a device of the calling thread's network namespace that pass every packet, and let
/// nobody after them see it (`TC_ACT_OK`), as network policies in eBPF do. They stay as long as the device.
///
/// # Errors
/// When the kernel refuses.
pub fn classify(device: &str, by: TcAttach, pin: &Path) -> Result<()> {
    const OK: u64 = 0;
    let program = load(CLASSIFIER, 0, OK)?;
    let path = CString::new(pin.as_os_str().as_bytes())?;
    bpf(OBJ_PIN, &PinAttr { pathname: path.as_ptr() as u64, bpf_fd: program.as_raw_fd().try_into()?, file_flags: 0 })
        .with_context(|| pin.display().to_string())?;
    let mut program = SchedClassifier::from_pin(pin)?;
    for direction in [TcAttachType::Ingress, TcAttachType::Egress] {
        let options = match by {
            TcAttach::Auto => TcAttachOptions::TcxOrder(LinkOrder::last()),
            TcAttach::Clsact => {
                let _ = tc::qdisc_add_clsact(device); // it may be there
                TcAttachOptions::Netlink(NlOptions { priority: 1, handle: TcHandle::new(0, 7), classid: None })
            }
        };
        let id = program.attach_with_options(device, direction, options)?;
        std::mem::forget(program.take_link(id)?); // it outlives this function
    }
    Ok(fs::remove_file(pin)?)
}

fn attach_with(cgroup: &Path, attach_flags: u32) -> Result<()> {
    let program = load(SOCK_ADDR, CONNECT4, 1)?;
    let cgroup = File::open(cgroup)?;
    let attach = AttachAttr {
        target_fd: cgroup.as_raw_fd().try_into()?,
        attach_bpf_fd: program.as_raw_fd().try_into()?,
        attach_type: CONNECT4,
        attach_flags,
    };
    bpf(ATTACH, &attach).context("cannot attach the foreign program")?;
    Ok(())
}

/// Detaches a pinned link, as `bpftool link detach` does; its pin stays.
///
/// # Errors
/// When the kernel refuses.
pub fn detach(pin: &Path) -> Result<()> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let link = bpf(OBJ_GET, &[path.as_ptr() as u64, 0]).with_context(|| pin.display().to_string())?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
    let link = unsafe { OwnedFd::from_raw_fd(link) };
    bpf(LINK_DETACH, &link.as_raw_fd()).with_context(|| format!("cannot detach {}", pin.display()))?;
    Ok(())
}

fn bpf<T>(command: libc::c_long, attr: &T) -> Result<i32> {
    // SAFETY: `attr` is the beginning of the kernel's union for this command and its length is given; the kernel only
    // reads it and what it points to, which lives until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attr), size_of::<T>()) };
    if result < 0 {
        bail!("bpf(2), command {command}: {}", std::io::Error::last_os_error());
    }
    Ok(result.try_into()?)
}

/// What is attached to a cgroup: "attach type program name" → ids of programs; `None` without bpftool.
///
/// # Errors
/// When bpftool fails or is not understood.
pub fn attached(cgroup: &Path) -> Result<Option<BTreeMap<String, Vec<u64>>>> {
    let Ok(output) = Command::new("bpftool").args(["--json", "cgroup", "show"]).arg(cgroup).output() else {
        return Ok(None);
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let list: Vec<Value> = match said.trim() {
        "" => Vec::new(), // nothing attached
        text => serde_json::from_str(text).with_context(|| format!("bpftool said {text}"))?,
    };
    let mut programs = BTreeMap::<String, Vec<u64>>::new();
    for entry in &list {
        let [kind, name] = ["attach_type", "name"].map(|key| entry[key].as_str().unwrap_or_default());
        programs.entry(format!("{kind} {name}")).or_default().push(entry["id"].as_u64().unwrap_or_default());
    }
    Ok(Some(programs))
}
