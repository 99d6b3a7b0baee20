//! What can only be found out by trying, tried in a network namespace that nobody else sees and that ends with the trial.

use std::{future::Future, io, thread};

use futures::StreamExt as _;
use nix::sched::{CloneFlags, unshare};
use rtnetlink::{
    Handle, new_connection,
    packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
    packet_route::{
        RouteNetlinkMessage,
        tc::{TcAttribute, TcHandle, TcMessage},
    },
};

use crate::datapath::host::discard;

/// The loopback device of a new namespace.
const LO: i32 = 1;

/// Whether a device could be given programs as filters of clsact. Who may not try is told that it could.
pub fn classifiers() -> bool {
    within(async {
        let (connection, mut handle, _) = new_connection()?;
        tokio::spawn(connection);
        // Of the same module as clsact.
        Ok(handle.qdisc().add(LO).ingress().execute().await.is_ok() && has_filters(&mut handle).await)
    })
    .unwrap_or(true)
}

/// Whether the discard device could be made. Who may not try is told that it could.
pub fn discard() -> bool {
    within(async { Ok(discard::ensure().await.is_ok()) }).unwrap_or(true)
}

/// A filter without a program is refused: with ENOENT by a kernel that has no such filters, else as incomplete.
async fn has_filters(handle: &mut Handle) -> bool {
    let mut filter = TcMessage::default();
    filter.header.index = LO;
    filter.header.parent = TcHandle { major: u16::MAX, minor: TcHandle::MIN_INGRESS };
    filter.header.info = 1 << 16 | u32::from((libc::ETH_P_ALL as u16).to_be());
    filter.attributes.push(TcAttribute::Kind("bpf".to_owned()));
    let mut request = NetlinkMessage::from(RouteNetlinkMessage::NewTrafficFilter(filter));
    request.header.flags = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK;
    let Ok(mut answers) = handle.request(request) else { return true };
    let answer = answers.next().await.map(|answer| answer.payload);
    !matches!(answer, Some(NetlinkPayload::Error(refusal)) if refusal.raw_code() == -libc::ENOENT)
}

/// Runs `work` in a thread that lives in a network namespace of its own.
fn within<T: Send>(work: impl Future<Output = io::Result<T>> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let inside = thread::Builder::new().spawn_scoped(scope, move || {
            unshare(CloneFlags::CLONE_NEWNET)?; // of this thread only, which ends with this closure
            tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
        })?;
        inside.join().unwrap_or_else(|_| Err(io::Error::other("the trial ended with a defect")))
    })
}
