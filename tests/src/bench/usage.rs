//! What processes and maps cost.

use std::{
    fs,
    os::fd::{AsFd as _, AsRawFd as _},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};
use aya::maps::MapData;
use nix::{
    time::{clock_getcpuclockid, clock_gettime},
    unistd::Pid,
};
use sheave_agent::datapath::tables::pins::Pins;

const MEBIBYTE: f64 = 1024.0 * 1024.0;

/// CPU time of everything that ever ran in a cgroup, in microseconds; cgroup v2 keeps it without any controller.
///
/// # Errors
/// When the cgroup is gone.
pub fn cgroup_micros(cgroup: &Path) -> Result<u64> {
    let file = cgroup.join("cpu.stat");
    let text = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
    usage.context("cpu.stat has no usage_usec")?.parse().context("usage_usec is no number")
}

/// CPU time of a process, all its threads, to the nanosecond: `/proc/PID/stat` counts in ticks of 10 ms.
///
/// # Errors
/// When it is gone.
pub fn process_time(pid: Pid) -> Result<Duration> {
    let time =
        clock_getcpuclockid(pid).and_then(clock_gettime).with_context(|| format!("CPU time of process {pid}"))?;
    Ok(time.into())
}

/// CPU time of a process's threads of that name.
///
/// # Errors
/// When it is gone, or has none.
pub fn thread_time(pid: Pid, name: &str) -> Result<Duration> {
    let mut time = None;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let task = task?.path();
        // Others end while we look.
        if fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            let schedstat = fs::read_to_string(task.join("schedstat"))?;
            let nanos = schedstat.split(' ').next().and_then(|nanos| nanos.parse().ok()).context("no schedstat")?;
            *time.get_or_insert(Duration::ZERO) += Duration::from_nanos(nanos);
        }
    }
    time.with_context(|| format!("process {pid} has no thread {name}"))
}

/// Memory of a process in MiB: all that is resident, and of that what only it has.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// `VmRSS`, with windows into kernel maps.
    pub resident: f64,
    /// `RssAnon`: heap and stacks.
    pub own: f64,
}

/// Of a process, now.
///
/// # Errors
/// When it is gone.
pub fn memory(pid: Pid) -> Result<Memory> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mebibytes = |field: &str| -> Result<f64> {
        let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        let kibibytes = line.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
        Ok(kibibytes.with_context(|| format!("/proc/{pid}/status has no {field}"))? / 1024.0)
    };
    Ok(Memory { resident: mebibytes("VmRSS")?, own: mebibytes("RssAnon")? })
}

/// Memory of all pinned maps of an agent in MiB, as the kernel accounts it.
///
/// # Errors
/// When a map cannot be opened.
pub fn maps(bpffs: &Path) -> Result<f64> {
    let bytes = fs::read_dir(Pins::below(bpffs).maps())?.map(|pin| {
        let pin = pin?.path();
        let map = MapData::from_pin(&pin).with_context(|| pin.display().to_string())?;
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd()))?;
        let bytes = info.lines().find_map(|line| line.strip_prefix("memlock:"));
        bytes.context("no memlock in fdinfo")?.trim().parse::<f64>().context("memlock is no number")
    });
    Ok(bytes.sum::<Result<f64>>()? / MEBIBYTE)
}
