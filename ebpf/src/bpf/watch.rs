//! Counting what happens, and telling whoever watches (`sheave monitor`). While nobody does, that costs one load where
//! something is opened, refused or dropped, and nothing for all that follows.
use crate::{conntrack, count, maps, select, skb::Packet};
use aya_ebpf::{
    bindings::BPF_RB_NO_WAKEUP,
    helpers::{bpf_get_current_comm, bpf_get_current_pid_tgid, bpf_ktime_get_ns},
};
use sheave_ebpf::{
    addr::Addr,
    backend::Backend,
    conntrack::Flow,
    counter::Counter,
    event::{AT_PACKET, AT_SOCKET, Event},
    frontend::FrontendKey,
    meta,
    socket::NO_SERVICE,
};

/// The socket path sends what was dialled to a backend.
#[inline(always)]
pub fn sent(key: &FrontendKey, reason: Counter, backend: &Backend) {
    count::bump(reason);
    if is_watched() {
        record_sent(key, reason as u32, backend);
    }
}

/// The socket path does not send it anywhere.
#[inline(always)]
pub fn not_sent(key: &FrontendKey, reason: Counter, service: u32) {
    count::bump(reason);
    if is_watched() {
        record_not_sent(key, reason as u32, service);
    }
}

/// A packet opens a flow.
#[inline(always)]
pub fn opened(packet: &Packet, flow: &Flow) {
    count::bump(Counter::PacketForward);
    if is_watched() {
        record_opened(packet, flow);
    }
}

/// A packet goes no further as what it is.
#[inline(always)]
pub fn stopped(packet: &Packet, reason: Counter, service: u32) {
    count::bump(reason);
    if is_watched() {
        record_stopped(packet, reason as u32, service);
    }
}

/// A packet that ingress has sent to a backend does not leave.
#[inline(always)]
pub fn kept_back(packet: &Packet, reason: Counter) {
    count::bump(reason);
    if is_watched() {
        record_kept_back(packet, reason as u32);
    }
}

/// A reader's wish ends by itself: it may have been killed.
#[inline(always)]
fn is_watched() -> bool {
    let until = maps::meta_word(meta::WATCHED_UNTIL);
    until != 0 && until >= u64::from(select::now())
}

#[inline(never)]
fn record_sent(key: &FrontendKey, reason: u32, backend: &Backend) {
    record(AT_SOCKET, reason, backend.service, &Way { to: Some((&backend.addr, backend.port)), ..Way::of_key(key) });
}

#[inline(never)]
fn record_not_sent(key: &FrontendKey, reason: u32, service: u32) {
    record(AT_SOCKET, reason, service, &Way::of_key(key));
}

#[inline(never)]
fn record_opened(packet: &Packet, flow: &Flow) {
    let way = Way { to: Some((&flow.to, flow.to_port)), ..Way::of_packet(packet) };
    record(AT_PACKET, Counter::PacketForward as u32, flow.service, &way);
}

#[inline(never)]
fn record_stopped(packet: &Packet, reason: u32, service: u32) {
    record(AT_PACKET, reason, service, &Way::of_packet(packet));
}

#[inline(never)]
fn record_kept_back(packet: &Packet, reason: u32) {
    let way = Way { to: Some((&packet.tuple.dst, packet.tuple.dst_port)), ..Way::of_packet(packet) };
    match conntrack::find(&packet.tuple.reversed()) {
        Some(reply) => {
            let client = Some((&packet.tuple.src, reply.flow.other_port));
            let dialled = (&reply.flow.to, reply.flow.to_port);
            record(AT_PACKET, reason, reply.flow.service, &Way { client, dialled, ..way });
        }
        None => record(AT_PACKET, reason, NO_SERVICE, &way),
    }
}

/// From whom, to what, to whom; ports in network order.
struct Way<'a> {
    client: Option<(&'a Addr, u16)>,
    dialled: (&'a Addr, u16),
    to: Option<(&'a Addr, u16)>,
    proto: u8,
}

impl<'a> Way<'a> {
    #[inline(always)]
    fn of_key(key: &'a FrontendKey) -> Self {
        Self { client: None, dialled: (&key.addr, key.port), to: None, proto: key.proto }
    }

    #[inline(always)]
    fn of_packet(packet: &'a Packet) -> Self {
        let tuple = &packet.tuple;
        Self {
            client: Some((&tuple.src, tuple.src_port)),
            dialled: (&tuple.dst, tuple.dst_port),
            to: None,
            proto: tuple.proto,
        }
    }
}

#[inline(always)]
fn record(place: u8, reason: u32, service: u32, way: &Way<'_>) {
    let Some(mut entry) = maps::event() else {
        count::bump(Counter::EventLost);
        return;
    };
    const NOBODY: (&Addr, u16) = (&Addr { words: [0; 4] }, 0);
    let (client, dialled, to) = (way.client.unwrap_or(NOBODY), way.dialled, way.to.unwrap_or(NOBODY));
    let asks = place == AT_SOCKET && maps::has_current_task();
    // SAFETY: room for one record, written field by field: a whole one would not fit on the stack.
    unsafe {
        let event: *mut Event = entry.as_mut_ptr();
        (*event).time = bpf_ktime_get_ns();
        (*event).client = *client.0;
        (*event).frontend = *dialled.0;
        (*event).backend = *to.0;
        (*event).client_port = client.1;
        (*event).frontend_port = dialled.1;
        (*event).backend_port = to.1;
        (*event).proto = way.proto;
        (*event).place = place;
        (*event).reason = reason;
        (*event).service = service;
        (*event).pid = if asks { (bpf_get_current_pid_tgid() >> 32) as u32 } else { 0 };
        (*event).zero = 0;
        (*event).command = if asks { bpf_get_current_comm().unwrap_or([0; 16]) } else { [0; 16] };
    }
    entry.submit(BPF_RB_NO_WAKEUP.into()); // waking the reader costs ten times as much; it looks by itself
}
