//! A cluster of any size: one Service that leads to the bench's pods, and many others that fill the tables.

use std::{
    fs::{self, File},
    io::{BufWriter, Write},
    net::Ipv4Addr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};

use super::worker::{ECHO_PORT, PORT};
use crate::{
    fake_api::FakeApi,
    objects::{Object, Slice, Svc},
};

/// Where the Service of the bench answers.
pub const VIP: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Objects in one file: a cluster's dump is neither one file nor one file an object.
const OBJECTS: usize = 500;

/// Name, number and protocol of a port; target and port are the same.
pub type Port = (&'static str, u16, &'static str);
/// What traffic dials.
pub const TRAFFIC: &[Port] = &[("name", PORT, "TCP"), ("datagrams", PORT, "UDP"), ("echo", ECHO_PORT, "TCP")];
/// What is dialled to see a change: one port, as most Services have.
pub const CHANGE: &[Port] = &[("name", PORT, "TCP")];

/// How large a cluster is.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Services, the bench's among them.
    pub services: usize,
    /// Endpoints of each of the others.
    pub endpoints: usize,
}

/// Writes the whole cluster into a new directory.
///
/// # Errors
/// When a file cannot be written.
pub fn write(directory: &Path, size: Size, ports: &[Port], backend: Ipv4Addr) -> Result<()> {
    let _ = fs::remove_dir_all(directory); // of an earlier, killed run
    fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    let service = service(ports);
    fs::write(directory.join(service.file()), service.text())?;
    fs::rename(next_slice(directory, ports, backend)?, slice_file(directory))?;
    let others: Vec<usize> = (1..size.services).collect();
    for (number, others) in others.chunks(OBJECTS).enumerate() {
        let mut file = BufWriter::new(File::create(directory.join(format!("others-{number}.yaml")))?);
        for other in others {
            let (service, slice) = filler(*other, size.endpoints);
            write!(file, "---\n{}\n---\n{}\n", service.text(), slice.text())?;
        }
        file.flush()?;
    }
    Ok(())
}

/// Puts the whole cluster into an API server.
pub fn publish(api: &FakeApi, size: Size, ports: &[Port], backend: Ipv4Addr) {
    api.put(&service(ports).text());
    api.put(&slice(ports, backend).text());
    for other in 1..size.services {
        let (service, slice) = filler(other, size.endpoints);
        api.put(&service.text());
        api.put(&slice.text());
    }
}

fn service(ports: &[Port]) -> Svc {
    let service = Svc::new("bench").ip(&VIP.to_string());
    ports.iter().fold(service, |service, (name, port, protocol)| service.port(name, *port, protocol))
}

/// A slice that makes `backend` the bench's only one.
#[must_use]
pub fn slice(ports: &[Port], backend: Ipv4Addr) -> Slice {
    let slice = Slice::new("bench-1", "bench").ready(&backend.to_string(), "n1");
    ports.iter().fold(slice, |slice, (name, port, protocol)| slice.port(name, *port, protocol))
}

/// That slice, ready to be renamed to [`slice_file`]. It lies outside the directory, so that an agent sees one event:
/// the rename.
///
/// # Errors
/// When it cannot be written.
pub fn next_slice(directory: &Path, ports: &[Port], backend: Ipv4Addr) -> Result<PathBuf> {
    let next = directory.with_extension("next");
    fs::write(&next, slice(ports, backend).text()).with_context(|| next.display().to_string())?;
    Ok(next)
}

/// Where the bench's slice is.
#[must_use]
pub fn slice_file(directory: &Path) -> PathBuf {
    directory.join("bench-slice.yaml")
}

/// Another Service with endpoints that nobody dials.
fn filler(number: usize, endpoints: usize) -> (Svc, Slice) {
    let name = format!("other-{number}");
    let service = Svc::new(&name).ip(&address(10, 97, number).to_string()).port("web", 80, "TCP");
    let slice = Slice::new(&format!("{name}-1"), &name).port("web", 8080, "TCP");
    let slice = (0..endpoints).fold(slice, |slice, endpoint| {
        let node = format!("n{}", 2 + endpoint % 8);
        slice.ready(&address(11, 0, number * endpoints + endpoint).to_string(), &node)
    });
    (service, slice)
}

/// That many addresses behind a.b.0.0.
fn address(a: u8, b: u8, number: usize) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(a, b, 0, 0)) + number as u32)
}
