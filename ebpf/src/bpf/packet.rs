//! The packet path. Ingress rewrites destinations: a frontend's into a backend's, a masqueraded client's back into the
//! client's. Egress rewrites sources: a client's into this node's, a backend's back into the frontend's. Between them
//! the kernel routes. What cannot be served is refused at ingress.
//!
//! The other end keeps its port, but for a client two of whose flows would be the same packets behind ingress: there one of
//! them has another source port, from ingress on and until its replies leave.
use crate::{
    conntrack::{self, Entry, Refused},
    icmp, maps, nat, own, ping, refuse, route, select,
    skb::{self, DROP, NEXT, Packet, Skb},
    verifier::{forget, forget_whether},
    watch,
};
use core::mem::MaybeUninit;
use sheave_ebpf::{
    addr::Addr,
    affinity::{AffinityKey, CLIENT_ADDRESS},
    backend::{Backend, FLAG_LOCAL},
    conntrack::{FLAG_MASQUERADE, Flow, HOOK_EGRESS, HOOK_INGRESS, ROLE_DIAL, ROLE_REPLY, ROLE_RETURN},
    counter::Counter,
    device::{DEVICE_OF_PODS, RANGE_OWN_PODS},
    frontend::{Frontend, FrontendKey, KIND_CLUSTER_IP, KIND_LOAD_BALANCER, KIND_LOOPBACK, KIND_NODE_PORT},
    meta, proto,
    service::{
        ALGORITHM_MAGLEV, Config, FLAG_EXTERNAL_LOCAL, FLAG_SOURCE_RANGES, Scope, VERDICT_DROP, VERDICT_FORWARD,
        VERDICT_REJECT, Word,
    },
    socket::NO_SERVICE,
    source_range::SourceRange,
    tcp,
};

/// What [`dial`] says of a packet that opens a flow.
const OPENS: i32 = i32::MAX;
/// What [`dial`] says of a packet to an unknown port that is refused to clients outside alone.
const STRAYS: i32 = i32::MAX - 1;
/// What [`dial`], [`open`] and [`stray`] say of a packet that is to be refused.
const REFUSES: i32 = i32::MIN;

/// A packet arrives on a device that clients may be behind.
#[inline(always)]
pub fn ingress(skb: Skb) -> i32 {
    // A switch floods, a card that somebody listens on takes everything: what is for others is theirs to refuse. The kernel
    // forwards nothing that came to several.
    if skb::is_tagged(skb) || !skb::is_for_this_host(skb) {
        return NEXT;
    }
    let mut room = MaybeUninit::uninit();
    let Some(packet) = skb::parse(skb, HOOK_INGRESS, &mut room) else {
        return if maps::answer_pings() { ping::answer(skb) } else { NEXT };
    };
    let opens =
        packet.is_ordinary() && (packet.tuple.proto != proto::TCP || packet.tcp & (tcp::SYN | tcp::ACK) == tcp::SYN);
    if packet.is_stopped() {
        return DROP;
    }
    skb::forget_fragments(packet);
    if !opens {
        return if conntrack::any() { follow(skb, packet).unwrap_or(NEXT) } else { NEXT };
    }
    if packet.tuple.proto != proto::TCP
        && let Some(verdict) = unmasquerade(skb, packet)
    {
        return verdict;
    }
    let mut frontend = Frontend { service: 0, kind: 0 };
    let verdict = match dial(skb, packet, &mut frontend) {
        OPENS => open(skb, packet, frontend),
        STRAYS => stray(skb, packet),
        verdict => verdict,
    };
    // VERIFIER: here, not in those two: 5.10 and 6.1 round every frame up to 32 bytes, "combined stack size of 4 calls is
    // 544".
    let verdict = if verdict == REFUSES { refuse::refuse(skb, packet) } else { verdict };
    if verdict != NEXT {
        skb::stop_fragments(packet);
    }
    verdict
}

/// A packet arrives from a workload whose sockets we see: it can only be a reply to a client that we masqueraded.
#[inline(always)]
pub fn ingress_from_workload(skb: Skb) -> i32 {
    if !conntrack::are_there(meta::MASQUERADED_FLOWS) {
        return NEXT;
    }
    let mut room = MaybeUninit::uninit();
    let Some(packet) = skb::parse(skb, HOOK_INGRESS, &mut room) else { return NEXT };
    if packet.quoted != 0 {
        return follow(skb, packet).unwrap_or(NEXT);
    }
    unmasquerade(skb, packet).unwrap_or(NEXT)
}

/// A packet leaves. One that ingress did not mark can only be ours where replies of clients that we did not masquerade
/// leave, or when this node complains.
#[inline(always)]
pub fn egress(skb: Skb, to_clients: bool) -> i32 {
    let mark = skb::mark(skb);
    let ours = mark & (maps::masquerade_mark() | maps::reply_mark());
    if ours != 0 {
        skb::set_mark(skb, mark & !ours);
    } else if skb::is_tagged(skb) || !may_be_ours(skb, to_clients) {
        return NEXT;
    }
    let mut room = MaybeUninit::uninit();
    let Some(packet) = skb::parse(skb, HOOK_EGRESS, &mut room) else { return NEXT };
    let mut flow = Flow::NONE;
    if let Some(entry) = conntrack::find(&packet.tuple) {
        flow = entry.flow;
        if flow.role() == ROLE_REPLY && packet.quoted == 0 {
            entry.touch(packet, select::now());
        }
    } else if ours & maps::masquerade_mark() == 0 || !packet.is_ordinary() {
        return NEXT;
    } else if let Err(why) = nat::masquerade(skb, packet, &mut flow) {
        watch::kept_back(packet, why);
        return DROP;
    }
    let rewritten =
        if packet.quoted != 0 { icmp::set_source(skb, packet, &flow) } else { skb::set_source(skb, packet, &flow) };
    done(packet, rewritten)
}

/// Whether an unmarked packet that leaves may belong to a flow: the reply to a client that is not masqueraded, or what
/// this node itself says of a packet that it cannot forward, to the client or to a backend that does not know the client.
#[inline(always)]
fn may_be_ours(skb: Skb, to_clients: bool) -> bool {
    (to_clients && conntrack::are_there(meta::PLAIN_FLOWS))
        || (conntrack::are_there(meta::MASQUERADED_FLOWS) && skb::is_icmp(skb))
}

#[inline(always)]
fn done(packet: &Packet, rewritten: Option<()>) -> i32 {
    if rewritten.is_some() { NEXT } else { malformed(packet) }
}

#[inline(never)]
fn malformed(packet: &Packet) -> i32 {
    watch::stopped(packet, Counter::PacketMalformed, NO_SERVICE);
    DROP
}

/// A packet to one of the ports that masquerade clients, if it belongs to one.
#[inline(always)]
fn unmasquerade(skb: Skb, packet: &Packet) -> Option<i32> {
    // SCTP keeps the client's port, whatever that is.
    if !nat::is_ours(packet.tuple.dst_port) && packet.tuple.proto != proto::SCTP {
        return None;
    }
    if !conntrack::are_there(meta::MASQUERADED_FLOWS) {
        return None;
    }
    let entry = conntrack::find(&packet.tuple)?;
    (entry.flow.role() == ROLE_RETURN && nat::is_answer(packet, &entry)).then(|| send(skb, packet, &entry.flow))
}

/// A packet of a known flow, or an error about one.
#[inline(always)]
fn follow(skb: Skb, packet: &Packet) -> Option<i32> {
    let now = select::now(); // VERIFIER: first, since what lives on while it is asked for would lie on the stack
    let entry = conntrack::find(&packet.tuple)?;
    if packet.quoted != 0 {
        return Some(hand_on(skb, packet, &entry.flow, icmp::set_destination(skb, packet, &entry.flow)));
    }
    if entry.flow.role() == ROLE_DIAL {
        entry.touch(packet, now);
    }
    if entry.flow.role() == ROLE_RETURN && !nat::is_answer(packet, &entry) {
        return None;
    }
    Some(send(skb, packet, &entry.flow))
}

/// Gives a packet its new destination.
#[inline(always)]
fn send(skb: Skb, packet: &Packet, flow: &Flow) -> i32 {
    hand_on(skb, packet, flow, skb::set_destination(skb, packet, flow))
}

/// Tells egress what is left to do.
#[inline(always)]
fn hand_on(skb: Skb, packet: &Packet, flow: &Flow, rewritten: Option<()>) -> i32 {
    if done(packet, rewritten) == DROP {
        return DROP;
    }
    if flow.role() == ROLE_RETURN {
        skb::set_mark(skb, skb::mark(skb) | maps::reply_mark());
    } else if flow.flags & FLAG_MASQUERADE != 0 {
        skb::set_mark(skb, skb::mark(skb) | maps::masquerade_mark());
    }
    NEXT
}

/// A packet that may open a flow: a SYN, or any datagram. A verdict, [`REFUSES`], or [`OPENS`] and what it dials; the
/// caller goes on, so that this one's stack is free again.
#[inline(never)]
fn dial(skb: Skb, packet: &Packet, dialled: &mut Frontend) -> i32 {
    let tuple = &packet.tuple;
    let key = FrontendKey { addr: tuple.dst, port: tuple.dst_port, proto: tuple.proto, zero: 0 };
    let Some(frontend) = maps::frontend(&key) else {
        return unknown(packet, &key);
    };
    if frontend.kind == KIND_LOOPBACK {
        return NEXT; // of a martian packet
    }
    if let Some(entry) = conntrack::find(tuple)
        && entry.flow.role() == ROLE_DIAL
        && conntrack::is_current(tuple, &entry.flow, frontend.service)
    {
        return again(skb, packet, &entry);
    }
    *dialled = frontend;
    OPENS
}

/// What dials no frontend: nobody's business, unless its address is a Service's or could be.
#[inline(always)]
fn unknown(packet: &Packet, key: &FrontendKey) -> i32 {
    if maps::is_near_a_guarded_address(&key.addr) {
        if maps::frontend(&key.of_unknown_port()).is_some() {
            watch::stopped(packet, Counter::PacketUnknownPort, NO_SERVICE);
            return REFUSES; // V-4
        }
        if maps::in_service_cidrs(&key.addr) {
            watch::stopped(packet, Counter::PacketUnknownAddress, NO_SERVICE);
            return DROP; // V-5
        }
    }
    if maps::is_near_one_guarded_outside(&key.addr) && maps::frontend(&key.of_unknown_port_from_outside()).is_some() {
        return STRAYS;
    }
    NEXT
}

/// A packet to an unknown port of a load balancer's or external address (F31); a verdict or [`REFUSES`].
/// Where the network leads the address to this node, the kernel would send the packet back into the network, and the
/// network here again. What the host takes for its own is left to its processes, as balancers' health checks are; what
/// pods send is meant for whoever else has the address.
#[inline(never)]
fn stray(skb: Skb, packet: &Packet) -> i32 {
    if whose_pod(skb, &packet.tuple.src) == RANGE_OWN_PODS || !route::is_sent_on(skb, packet) {
        return NEXT;
    }
    watch::stopped(packet, Counter::PacketUnknownPort, NO_SERVICE);
    REFUSES
}

#[inline(always)]
fn again(skb: Skb, packet: &Packet, entry: &Entry) -> i32 {
    entry.touch(packet, select::now());
    send(skb, packet, &entry.flow)
}

/// A new flow to a frontend (F17 to F22); a verdict or [`REFUSES`].
#[inline(never)]
fn open(skb: Skb, packet: &Packet, frontend: Frontend) -> i32 {
    let tuple = &packet.tuple;
    if frontend.kind == KIND_NODE_PORT && tuple.proto == proto::UDP && own::awaits(skb, packet) {
        return NEXT;
    }
    let config = maps::config(frontend.service);
    if frontend.kind == KIND_LOAD_BALANCER && config.flags() & FLAG_SOURCE_RANGES != 0 {
        let range = SourceRange { service: frontend.service.to_be(), addr: tuple.src };
        if !maps::in_source_ranges(&range) {
            watch::stopped(packet, Counter::PacketSourceRange, frontend.service);
            return DROP; // V-6: before everything else, and silent
        }
    }
    let range = forget(whose_pod(skb, &tuple.src), config.0 as u32);
    let scope = match frontend.kind {
        KIND_CLUSTER_IP if range == 0 && maps::cluster_ips_inside_only() => {
            watch::stopped(packet, Counter::PacketClusterIpFromOutside, frontend.service);
            return DROP; // F54
        }
        KIND_CLUSTER_IP => Scope::Cluster,
        // Only this node's: replies to another node's pod might not come past us, and that pod's own node has served
        // it already where it was to be served as an inside client (DL-1, SVC-41).
        _ if range == RANGE_OWN_PODS => Scope::Inside,
        _ => Scope::Outside,
    };
    let Some(word) = maps::word(frontend.service, scope) else {
        watch::stopped(packet, Counter::PacketBroken, frontend.service);
        return NEXT;
    };
    match word.verdict() {
        VERDICT_FORWARD => forward(skb, packet, frontend, Choice { word, config, range }),
        VERDICT_REJECT => {
            watch::stopped(packet, Counter::PacketReject, frontend.service);
            REFUSES
        }
        VERDICT_DROP => {
            watch::stopped(packet, Counter::PacketDrop, frontend.service);
            DROP
        }
        _ => NEXT, // the word was never written: the service is being removed
    }
}

/// Whose pod a packet comes from: `RANGE_…`, or 0 (DL-1 to DL-5).
#[inline(always)]
fn whose_pod(skb: Skb, src: &Addr) -> u32 {
    if maps::detects_pods_by_address() {
        return maps::pod_range(src);
    }
    if maps::detects_pods() && maps::device(skb::ifindex(skb)).is_some_and(|device| device.flags & DEVICE_OF_PODS != 0)
    {
        return RANGE_OWN_PODS;
    }
    0
}

/// What a backend is chosen by.
struct Choice {
    word: Word,
    config: Config,
    /// Whose pod the client is: `RANGE_…`, or 0.
    range: u32,
}

#[inline(always)]
fn forward(skb: Skb, packet: &Packet, frontend: Frontend, choice: Choice) -> i32 {
    let tuple = &packet.tuple;
    let client = AffinityKey { service: frontend.service, kind: CLIENT_ADDRESS, client: tuple.src.words };
    let draw = if choice.config.algorithm() == ALGORITHM_MAGLEV { hash(packet) } else { select::random() };
    let chosen = select::backend(choice.word, choice.config, &client, draw);
    let Some((id, backend)) = chosen.and_then(|id| Some((id, maps::backend(id)?))) else {
        watch::stopped(packet, Counter::PacketBroken, frontend.service);
        return NEXT;
    };
    if tuple.proto == proto::SCTP && backend.port != tuple.dst_port {
        watch::stopped(packet, Counter::PacketSctpPort, frontend.service);
        return DROP;
    }
    let is_own = maps::is_own_address(&backend.addr);
    let mut masqueraded = is_masqueraded(&tuple.src, frontend.kind, &choice, backend);
    if masqueraded && !is_own && backend.flags & FLAG_LOCAL != 0 && !conntrack::can_masquerade_to_workloads() {
        conntrack::announce(meta::MASQUERADED_FLOWS); // the agent attaches them, for the flows after this one
        masqueraded = backend.addr.is(&tuple.src);
    }
    let flags = if masqueraded { FLAG_MASQUERADE } else { 0 };
    let mut flow = conntrack::flow(packet, frontend.service, id, flags, (&backend.addr, backend.port));
    let masqueraded = flow.flags & FLAG_MASQUERADE != 0;
    let is_own = forget_whether(is_own, flow.created);
    let made = match conntrack::open(packet, &flow) {
        Err(Refused::Clash) => conntrack::open_from_another_port(packet, &mut flow),
        made => made,
    };
    if let Err(why) = made {
        watch::stopped(packet, why.counter(), frontend.service);
        return DROP;
    }
    if masqueraded {
        conntrack::announce(meta::MASQUERADED_FLOWS);
    }
    // A process of this node sees its client in any case: its packets never leave.
    if !masqueraded || is_own {
        conntrack::announce(meta::PLAIN_FLOWS);
    }
    watch::opened(packet, &flow);
    send(skb, packet, &flow)
}

/// Whether the backend shall see this node in place of the client (F35, F36).
#[inline(always)]
fn is_masqueraded(client: &Addr, kind: u32, choice: &Choice, backend: &Backend) -> bool {
    let is_local = backend.flags & FLAG_LOCAL != 0;
    if backend.addr.is(client) {
        return true; // hairpin
    }
    if kind == KIND_CLUSTER_IP {
        return maps::masquerade_all() || (maps::detects_pods() && choice.range == 0);
    }
    choice.config.flags() & FLAG_EXTERNAL_LOCAL == 0 && !(is_local && maps::keep_client())
}

/// The same for the packets of a flow on every node.
#[inline(always)]
fn hash(packet: &Packet) -> u32 {
    let t = &packet.tuple;
    let ports = u32::from(t.src_port) << 16 | u32::from(t.dst_port);
    let mut hash = 0x9e37_79b9_u32 ^ u32::from(t.proto);
    let words = [
        t.src.words[0],
        t.src.words[1],
        t.src.words[2],
        t.src.words[3],
        t.dst.words[0],
        t.dst.words[1],
        t.dst.words[2],
        t.dst.words[3],
        ports,
    ];
    for word in words {
        hash = (hash ^ u32::from_be(word)).wrapping_mul(0x85eb_ca6b);
        hash ^= hash >> 15;
    }
    hash
}
