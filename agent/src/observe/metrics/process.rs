//! The agent as a process, under the names that every exporter uses.

use std::{fmt, fs};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

use super::reading;

/// Read when asked. What cannot be read is left out.
#[derive(Debug)]
pub(super) struct Process;

impl Collector for Process {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let mut gauge = |name: &str, help: &str, value: Option<f64>| match value {
            Some(value) => reading(value).encode(encoder.encode_descriptor(name, help, None, MetricType::Gauge)?),
            None => Ok(()),
        };
        gauge("process_resident_memory_bytes", "Memory in use", resident())?;
        gauge("process_open_fds", "File descriptors in use", open_files())?;
        if let Some(seconds) = cpu_seconds() {
            let help = "CPU time used, in seconds";
            let metric = encoder.encode_descriptor("process_cpu_seconds", help, None, MetricType::Counter)?;
            ConstCounter::new(seconds).encode(metric)?;
        }
        Ok(())
    }
}

fn resident() -> Option<f64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    kilobytes.trim().strip_suffix(" kB")?.parse::<f64>().ok().map(|kilobytes| kilobytes * 1024.0)
}

fn open_files() -> Option<f64> {
    fs::read_dir("/proc/self/fd").ok().map(|files| files.count() as f64)
}

/// User and system time: fields 14 and 15, counted from behind the name, which may contain anything. A tick is 10 ms
/// on every architecture that Linux has (`USER_HZ`).
fn cpu_seconds() -> Option<f64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
    Some((ticks(11)? + ticks(12)?) as f64 / 100.0)
}
