//! The device that swallows connections that must be dropped silently: a socket program can redirect a connection or
//! fail it at once, but not drop it, so it redirects to an address that is routed nowhere.
//!
//! A dummy device drops everything; where the kernel has none, a bridge without ports does, given a neighbour that
//! never answers. Pods reach it through their default route, like any address beyond the node.

use std::net::IpAddr;

use futures::TryStreamExt as _;
use rtnetlink::{
    Error, Handle, LinkBridge, LinkDummy, LinkUnspec, RouteMessageBuilder, new_connection,
    packet_route::{
        link::{LinkFlags, LinkMessage},
        neighbour::NeighbourState,
    },
};
use sheave_ebpf::discard::{V4, V6};

/// Name of the device.
pub const DEVICE: &str = "sheave-drop";

/// A link-layer address that nobody has (locally administered).
const NOBODY: [u8; 6] = [0x02, 0x53, 0x48, 0x45, 0x41, 0x56];

/// How the device and what leads to it were found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// All was there.
    Whole,
    /// The device was there, but down, or without a route to it: those go whenever it is set down.
    Damaged,
    /// There was no device.
    Missing,
}

/// Makes what is missing of the device and what leads to it, in the calling thread's network namespace.
///
/// # Errors
/// What the kernel said to the first step that failed; connections that should be dropped silently then fail with
/// ETIMEDOUT.
pub async fn ensure() -> anyhow::Result<Found> {
    let (connection, handle, _) = new_connection()?;
    let task = tokio::spawn(connection);
    let result = make(&handle).await;
    task.abort();
    Ok(result?)
}

/// Nothing that is there is written again: whoever follows the routes would be woken for nothing.
async fn make(handle: &Handle) -> Result<Found, Error> {
    let present = find(handle, DEVICE).await;
    let is_up = present.as_ref().is_some_and(|link| link.header.flags.contains(LinkFlags::Up));
    let was_there = present.is_some();
    let index = match present {
        Some(link) => link.header.index,
        None => {
            let dummy = handle.link().add(LinkDummy::new(DEVICE).build()).execute().await;
            if dummy.is_err() {
                handle.link().add(LinkBridge::new(DEVICE).build()).execute().await?;
            }
            find(handle, DEVICE).await.ok_or(Error::RequestFailed)?.header.index
        }
    };
    if !is_up {
        handle.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await?;
    }
    // The neighbour comes before the route: nobody has asked for it yet.
    let v4 = RouteMessageBuilder::<std::net::Ipv4Addr>::new().destination_prefix(V4, 32).output_interface(index);
    let mut was_damaged = !is_up | neighbour(handle, index, V4.into()).await?;
    was_damaged |= is_new(handle.route().add(v4.build()).execute().await)?;
    let v6 = RouteMessageBuilder::<std::net::Ipv6Addr>::new().destination_prefix(V6, 128).output_interface(index);
    let neighbour = neighbour(handle, index, V6.into()).await;
    // A host without IPv6 has nobody to be silent to.
    if let (Ok(neighbour), Ok(route)) = (neighbour, is_new(handle.route().add(v6.build()).execute().await)) {
        was_damaged |= neighbour | route;
    }
    Ok(match (was_there, was_damaged) {
        (false, _) => Found::Missing,
        (true, true) => Found::Damaged,
        (true, false) => Found::Whole,
    })
}

/// Says whether it was missing.
async fn neighbour(handle: &Handle, index: u32, ip: IpAddr) -> Result<bool, Error> {
    let request = handle.neighbours().add(index, ip).link_layer_address(&NOBODY).state(NeighbourState::Permanent);
    is_new(request.execute().await)
}

/// Whether a thing is there only since we asked for it.
fn is_new(added: Result<(), Error>) -> Result<bool, Error> {
    match added {
        Err(Error::NetlinkError(refusal)) if refusal.raw_code() == -libc::EEXIST => Ok(false),
        added => added.map(|()| true),
    }
}

/// The device of that name.
pub(in crate::datapath) async fn find(handle: &Handle, name: &str) -> Option<LinkMessage> {
    let mut links = handle.link().get().match_name(name.to_owned()).execute();
    links.try_next().await.ok().flatten()
}

/// Removes a device, and with it its routes; says whether it was there. `dry_run` only says.
///
/// # Errors
/// When the kernel refuses.
pub async fn remove(device: &str, dry_run: bool) -> anyhow::Result<bool> {
    let (connection, handle, _) = new_connection()?;
    let task = tokio::spawn(connection);
    let result = match find(&handle, device).await {
        Some(_) if dry_run => Ok(true),
        Some(link) => handle.link().del(link.header.index).execute().await.map(|()| true),
        None => Ok(false),
    };
    task.abort();
    Ok(result?)
}
