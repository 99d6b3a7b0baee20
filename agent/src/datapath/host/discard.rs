//! The device that swallows connections that must be dropped silently: a socket program can redirect a connection or
//! fail it at once, but not drop it, so it redirects to an address that is routed nowhere.
//!
//! A dummy device drops everything; where the kernel has none, a bridge without ports does, given a neighbour that
//! never answers. Pods reach it through their default route, like any address beyond the node.

use std::net::IpAddr;

use futures::TryStreamExt as _;
use rtnetlink::{
    Handle, LinkBridge, LinkDummy, LinkUnspec, RouteMessageBuilder, new_connection,
    packet_route::neighbour::NeighbourState,
};
use sheave_ebpf::discard::{V4, V6};

/// Name of the device.
pub const DEVICE: &str = "sheave-drop";

/// A link-layer address that nobody has (locally administered).
const NOBODY: [u8; 6] = [0x02, 0x53, 0x48, 0x45, 0x41, 0x56];

/// Makes the device and both routes where they are missing, in the calling thread's network namespace. Says whether the
/// device was missing.
///
/// # Errors
/// What the kernel said to the first step that failed; connections that should be dropped silently then fail with
/// ETIMEDOUT.
pub async fn ensure() -> anyhow::Result<bool> {
    let (connection, handle, _) = new_connection()?;
    let task = tokio::spawn(connection);
    let result = make(&handle).await;
    task.abort();
    Ok(result?)
}

/// Makes them anew if the device is gone; says whether it was.
///
/// # Errors
/// As [`ensure`].
pub async fn mend() -> anyhow::Result<bool> {
    let (connection, handle, _) = new_connection()?;
    let task = tokio::spawn(connection);
    let result = match index(&handle, DEVICE).await {
        Some(_) => Ok(false),
        None => make(&handle).await,
    };
    task.abort();
    Ok(result?)
}

async fn make(handle: &Handle) -> Result<bool, rtnetlink::Error> {
    let present = index(handle, DEVICE).await;
    let index = match present {
        Some(index) => index,
        None => {
            let dummy = handle.link().add(LinkDummy::new(DEVICE).build()).execute().await;
            if dummy.is_err() {
                handle.link().add(LinkBridge::new(DEVICE).build()).execute().await?;
            }
            index(handle, DEVICE).await.ok_or(rtnetlink::Error::RequestFailed)?
        }
    };
    handle.link().set(LinkUnspec::new_with_index(index).up().build()).execute().await?;
    let v4 = RouteMessageBuilder::<std::net::Ipv4Addr>::new().destination_prefix(V4, 32).output_interface(index);
    handle.route().add(v4.build()).replace().execute().await?;
    neighbour(handle, index, V4.into()).await?;
    // A host without IPv6 has nobody to be silent to.
    let v6 = RouteMessageBuilder::<std::net::Ipv6Addr>::new().destination_prefix(V6, 128).output_interface(index);
    if handle.route().add(v6.build()).replace().execute().await.is_ok() {
        neighbour(handle, index, V6.into()).await?;
    }
    Ok(present.is_none())
}

async fn neighbour(handle: &Handle, index: u32, ip: IpAddr) -> Result<(), rtnetlink::Error> {
    let request = handle.neighbours().add(index, ip).link_layer_address(&NOBODY).state(NeighbourState::Permanent);
    request.replace().execute().await
}

async fn index(handle: &Handle, device: &str) -> Option<u32> {
    let mut links = handle.link().get().match_name(device.to_owned()).execute();
    links.try_next().await.ok().flatten().map(|link| link.header.index)
}

/// Removes a device, and with it its routes; says whether it was there. `dry_run` only says.
///
/// # Errors
/// When the kernel refuses.
pub async fn remove(device: &str, dry_run: bool) -> anyhow::Result<bool> {
    let (connection, handle, _) = new_connection()?;
    let task = tokio::spawn(connection);
    let result = match index(&handle, device).await {
        Some(_) if dry_run => Ok(true),
        Some(index) => handle.link().del(index).execute().await.map(|()| true),
        None => Ok(false),
    };
    task.abort();
    Ok(result?)
}
