//! Attaching the packet programs to a device: by tcx where the kernel has it (Linux 6.6), else as filters of clsact.
//!
//! A tcx link is pinned and replaced inside its pin. A filter cannot be pinned; it stays with the device until somebody
//! removes it, and constants for priority and handle let us find it again.
//!
//! Ours go before everybody else's on the device ([ADR 9](../../../../../docs/adr/0009-first-on-every-device.md)).

use std::{ffi::CStr, fs, io, mem, os::fd::AsFd as _};

use aya::{
    Ebpf,
    programs::{
        ProgramError, SchedClassifier, TcAttachType,
        links::Link as _,
        tc::{self, NlOptions, SchedClassifierLink, TcAttachOptions, TcError},
    },
};
use futures::TryStreamExt as _;
use rtnetlink::{
    Handle,
    packet_route::tc::{TcAttribute, TcHandle},
};

use crate::datapath::{
    Error, Result,
    host::devices::{Device, Role},
    programs::{
        attach::remove_link,
        link::{Pinned, Place},
        verifier,
    },
    tables::{pinned::flatten, pins::Pins},
};
use crate::options::TcAttach;

/// Of our filters: the first one, where several programs can be, the newest in front. The second, should there be a
/// filter of another kind in the first.
const PRIORITIES: [u16; 2] = [1, 2];
const OUR_HANDLE: (u16, u16) = (0, 0x5348);
const HANDLE: tc::TcHandle = tc::TcHandle::new(OUR_HANDLE.0, OUR_HANDLE.1);

/// Of `enum bpf_attach_type`.
const BPF_TCX_INGRESS: u32 = 46;
const BPF_TCX_EGRESS: u32 = 47;

/// How a device has its programs.
#[derive(Debug)]
pub enum Hold {
    /// By pinned links.
    Tcx(Vec<Pinned>),
    /// By filters, which need no holding.
    Clsact,
}

impl Hold {
    /// For people.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Tcx(_) => "tcx",
            Self::Clsact => "clsact",
        }
    }
}

const DIRECTIONS: [TcAttachType; 2] = [TcAttachType::Egress, TcAttachType::Ingress];

const fn program(role: Role, direction: TcAttachType) -> &'static str {
    match (role, direction) {
        (Role::Clients, TcAttachType::Egress) => "tc_egress",
        (Role::Clients, _) => "tc_ingress",
        (Role::Workloads, TcAttachType::Egress) => "tc_pod_egress",
        (Role::Workloads, _) => "tc_pod_ingress",
    }
}

const fn suffix(direction: TcAttachType) -> &'static str {
    match direction {
        TcAttachType::Egress => "out",
        TcAttachType::Ingress | TcAttachType::Custom(_) => "in",
    }
}

/// Loads the packet programs.
///
/// # Errors
/// When the verifier refuses one.
pub fn load(ebpf: &mut Ebpf) -> Result<()> {
    for role in [Role::Clients, Role::Workloads] {
        for direction in DIRECTIONS {
            let name = program(role, direction);
            classifier(ebpf, name)?.load().map_err(|e| verifier::refused(name, &e))?;
        }
    }
    Ok(())
}

fn classifier<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let missing = || Error::Incompatible(format!("the object holds no packet program {name}"));
    ebpf.program_mut(name).ok_or_else(missing)?.try_into().map_err(|_| missing())
}

/// Gives a device its programs, egress first: nothing is rewritten on its way in that could not be on its way out.
///
/// # Errors
/// When the kernel refuses; the device may have gone meanwhile.
pub fn attach(ebpf: &mut Ebpf, pins: &Pins, device: &Device, role: Role, how: TcAttach) -> Result<Hold> {
    let mut links = Vec::new();
    for direction in DIRECTIONS {
        links.extend(attach_one(ebpf, pins, device, (program(role, direction), direction), how)?);
    }
    Ok(if links.len() == DIRECTIONS.len() { Hold::Tcx(links) } else { Hold::Clsact })
}

/// `None` = as a filter.
fn attach_one(
    ebpf: &mut Ebpf,
    pins: &Pins,
    device: &Device,
    (name, direction): (&str, TcAttachType),
    how: TcAttach,
) -> Result<Option<Pinned>> {
    let on = |e: &dyn std::error::Error| {
        Error::Incompatible(format!("clients may not be served: cannot attach {name}: {}", flatten(e)))
    };
    let program = classifier(ebpf, name)?;
    let pin = pins.device_link(device.index, suffix(direction));
    if how == TcAttach::Clsact {
        filter(program, device, direction).map_err(|e| on(&e))?;
        remove_link(&pin)?; // of a former life with tcx
        return Ok(None);
    }
    let fd = program.fd().map_err(|e| on(&e))?.as_fd();
    match Pinned::open(pin.clone()) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(on(&e)),
        Ok(link) => match link.replace(fd) {
            Ok(()) => return Ok(Some(link)),
            // The device of that number is gone and took the link's effect with it: make a new one.
            Err(e) if e.raw_os_error() == Some(libc::ENOLINK) => {}
            Err(e) => return Err(on(&e)),
        },
    }
    let attach_type = match direction {
        TcAttachType::Egress => BPF_TCX_EGRESS,
        TcAttachType::Ingress | TcAttachType::Custom(_) => BPF_TCX_INGRESS,
    };
    match Pinned::link(fd, device.index, attach_type, Place::First, pin) {
        Ok(link) => {
            let _ = link.pin(); // held, it works without; whoever looks after pins tells what is wrong
            remove_filter(&device.name, direction); // of a former life without
            Ok(Some(link))
        }
        Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
            filter(program, device, direction).map_err(|e| on(&e))?;
            Ok(None)
        }
        Err(e) => Err(on(&e)),
    }
}

/// Whether both filters are on a device; `false` too when it is gone.
pub async fn has_filters(handle: &Handle, device: u32) -> bool {
    let filters = || handle.traffic_filter(device.cast_signed()).get();
    for request in [filters().egress(), filters().ingress()] {
        let found = request.execute().try_any(|filter| async move {
            let TcHandle { major, minor } = filter.header.handle;
            PRIORITIES.map(u32::from).contains(&(filter.header.info >> 16)) && (major, minor) == OUR_HANDLE
        });
        if !found.await.unwrap_or(false) {
            return false;
        }
    }
    true
}

/// Whether the kernel has tcx: since Linux 6.6, some distributions' earlier; it can be left out.
#[must_use]
pub fn is_tcx_there() -> bool {
    SchedClassifier::query_tcx("lo", TcAttachType::Ingress).is_ok()
}

/// Whether filters can be at both hooks of a device. A qdisc `ingress`, as the CNI plugin "bandwidth" makes one, takes
/// the place of clsact, and what is meant for egress would land at ingress.
///
/// # Errors
/// When they cannot.
pub async fn check_qdisc(handle: &Handle, device: u32) -> Result<()> {
    let device = device.cast_signed();
    let found = handle.qdisc().get().index(device).ingress().execute().try_any(|qdisc| async move {
        let is_another = |kind: &TcAttribute| matches!(kind, TcAttribute::Kind(kind) if kind == "ingress");
        qdisc.header.index == device && qdisc.attributes.iter().any(is_another)
    });
    if found.await.unwrap_or(false) {
        return Err(Error::Incompatible(
            "clients may not be served: a qdisc `ingress` of somebody else is in the place of clsact".to_owned(),
        ));
    }
    Ok(())
}

fn filter(
    program: &mut SchedClassifier,
    device: &Device,
    direction: TcAttachType,
) -> std::result::Result<(), ProgramError> {
    // Somebody else may have made it: then it is theirs too, and never removed by us.
    if let Err(e) = tc::qdisc_add_clsact(&device.name)
        && !matches!(&e, TcError::AlreadyAttached)
        && !is_file_exists(&e)
    {
        return Err(e.into());
    }
    let mut outcome = Ok(());
    for priority in PRIORITIES {
        outcome = filter_at(program, device, direction, priority);
        if outcome.is_ok() {
            // A former life may have had to make do with another one.
            for other in PRIORITIES.into_iter().filter(|other| *other != priority) {
                remove_filter_at(&device.name, direction, other);
            }
            break;
        }
    }
    outcome
}

fn filter_at(
    program: &mut SchedClassifier,
    device: &Device,
    direction: TcAttachType,
    priority: u16,
) -> std::result::Result<(), ProgramError> {
    let options = NlOptions { priority, handle: HANDLE, classid: None };
    let id = match program.attach_with_options(&device.name, direction, TcAttachOptions::Netlink(options)) {
        Ok(id) => id,
        Err(first) => {
            // Ours of a former life is there: replace it.
            let old = SchedClassifierLink::attached(&device.name, direction, priority, HANDLE, None);
            match old.map_err(TcError::IoError).map(|old| program.attach_to_link(old)) {
                Ok(Ok(id)) => id,
                Ok(Err(_)) | Err(_) => return Err(first),
            }
        }
    };
    // Dropping it would remove the filter, which shall outlive us.
    mem::forget(program.take_link(id)?);
    Ok(())
}

fn is_file_exists(error: &TcError) -> bool {
    flatten(error).contains("File exists")
}

/// Removes the links of devices that are no more, or that `keep` does not want.
///
/// # Errors
/// When a pin cannot be removed.
pub fn prune(pins: &Pins, keep: &dyn Fn(u32) -> bool) -> Result<()> {
    let directory = pins.links();
    let failed = |e| Error::kernel(format!("listing {}", directory.display()), e);
    for entry in fs::read_dir(&directory).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let device = path.file_name().and_then(|name| Pins::device_of(&name.to_string_lossy()));
        if device.is_some_and(|index| !keep(index)) {
            remove_link(&path)?;
        }
    }
    Ok(())
}

/// Removes our filters from all devices of this network namespace; says from which. Links go with their pins.
pub fn remove_filters(dry_run: bool) -> Vec<String> {
    let mut removed = Vec::new();
    // Whether there is one is known only by removing it.
    for name in interfaces().iter().filter(|_| !dry_run) {
        let of_device = remove_filters_of(name);
        removed.extend(of_device.iter().map(|direction| format!("filter {direction} of device {name}")));
    }
    removed
}

/// Removes our filters from a device; says which there were.
pub fn remove_filters_of(device: &str) -> Vec<&'static str> {
    DIRECTIONS.into_iter().filter(|direction| remove_filter(device, *direction)).map(suffix).collect()
}

/// Whether there was one.
fn remove_filter(device: &str, direction: TcAttachType) -> bool {
    PRIORITIES.map(|priority| remove_filter_at(device, direction, priority)).contains(&true)
}

fn remove_filter_at(device: &str, direction: TcAttachType, priority: u16) -> bool {
    SchedClassifierLink::attached(device, direction, priority, HANDLE, None).is_ok_and(|link| link.detach().is_ok())
}

/// Names of all devices here.
fn interfaces() -> Vec<String> {
    // SAFETY: the list is ours until it is freed, ends with a null name, and its names are C strings.
    unsafe {
        let list = libc::if_nameindex();
        let mut found = Vec::new();
        let mut at = list;
        while !at.is_null() && !(*at).if_name.is_null() {
            found.push(CStr::from_ptr((*at).if_name).to_string_lossy().into_owned());
            at = at.add(1);
        }
        libc::if_freenameindex(list);
        found
    }
}
