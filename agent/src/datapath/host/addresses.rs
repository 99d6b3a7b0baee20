//! The addresses of this host's devices, live.

use std::net::IpAddr;

use futures::{StreamExt as _, TryStreamExt as _};
use rtnetlink::{
    Handle, MulticastGroup, new_connection, new_multicast_connection, packet_route::address::AddressAttribute,
};
use tokio::sync::watch;

use crate::datapath::host::{discard, ipvs};

/// Devices that lead nowhere. The addresses on them are not this node's, though the kernel says that they are local: all
/// ClusterIPs of a cluster whose kube-proxy ran in ipvs mode.
pub const LEAD_NOWHERE: [&str; 2] = [ipvs::DEVICE, discard::DEVICE];

/// Follows the addresses of this node in the calling thread's network namespace: those of all devices but the ones that
/// [lead nowhere](LEAD_NOWHERE). The receiver holds the first answer
/// when this returns.
///
/// # Errors
/// When netlink cannot be used.
pub async fn follow() -> anyhow::Result<watch::Receiver<Vec<IpAddr>>> {
    let groups = [MulticastGroup::Ipv4Ifaddr, MulticastGroup::Ipv6Ifaddr];
    let (changes, _handle, mut messages) = new_multicast_connection(&groups)?;
    tokio::spawn(changes);
    let (requests, handle, _) = new_connection()?;
    tokio::spawn(requests);
    let (tell, told) = watch::channel(list(&handle).await?);
    tokio::spawn(async move {
        let _keeps_the_subscription = _handle;
        while messages.next().await.is_some() {
            // What changed does not matter, and several changes come at once: ask for all.
            while futures::FutureExt::now_or_never(messages.next()).flatten().is_some() {}
            match list(&handle).await {
                Ok(addresses) => drop(tell_if_new(&tell, addresses)),
                Err(error) => tracing::warn!(%error, "cannot list this host's addresses"),
            }
        }
    });
    Ok(told)
}

/// Tells what differs from what was told last; says whether it did.
pub(in crate::datapath) fn tell_if_new<T: PartialEq>(tell: &watch::Sender<T>, value: T) -> bool {
    tell.send_if_modified(|old| {
        let is_new = *old != value;
        *old = value;
        is_new
    })
}

async fn list(handle: &Handle) -> Result<Vec<IpAddr>, rtnetlink::Error> {
    let mut nowhere = Vec::new();
    for name in LEAD_NOWHERE {
        nowhere.extend(discard::find(handle, name).await.map(|link| link.header.index));
    }
    let mut answers = handle.address().get().execute();
    let mut found = Vec::new();
    while let Some(message) = answers.try_next().await? {
        if nowhere.contains(&message.header.index) {
            continue;
        }
        // On point-to-point links IFA_ADDRESS is the other end; IFA_LOCAL is ours where it is given.
        let local = message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Local(ip) => Some(*ip),
            _ => None,
        });
        let any = message.attributes.iter().find_map(|a| match a {
            AddressAttribute::Address(ip) => Some(*ip),
            _ => None,
        });
        found.extend(local.or(any));
    }
    Ok(found)
}
