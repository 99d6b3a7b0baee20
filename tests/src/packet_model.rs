//! The packet path in plain Rust: what should become of a packet, given what is configured and the flows so far. Written
//! from the rules, whose row ids it cites, and held against the programs by `tests/packet_model.rs`, packet by packet.
//!
//! Ingress changes destinations: a frontend's into a backend's, this node's into that of the client which it stands for.
//! Egress changes sources: a masqueraded client's into this node's, a backend's into the frontend's.

pub mod fate;
pub mod programs;
pub mod shape;
pub mod traffic;
pub mod world;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    net::{IpAddr, SocketAddr},
};

use self::{
    fate::{Came, Fate, Hook, Outcome, Verdict, Why},
    shape::{Ends, Fragments, Shape, pong},
    world::{Endpoint, Kind, Net, PORTS, Scope, TAKEN, Whose, Without, World},
};
use crate::packet::{self, ACK, ETH, FIN, ICMP, ICMPV6, RST, SCTP, SYN, TCP, UDP};

/// Where the packets of a client go.
#[derive(Clone, Copy, Debug)]
struct Dial {
    service: usize,
    backend: SocketAddr,
    /// The client's port from then on.
    port: u16,
    is_masqueraded: bool,
    /// TCP flags so far.
    seen: u8,
}

/// Where replies seem to come from.
#[derive(Clone, Copy, Debug)]
struct Reply {
    frontend: SocketAddr,
    /// The client's own port.
    port: u16,
    /// TCP flags so far; `None` = there was no reply yet.
    seen: Option<u8>,
}

/// What is configured, and what has been seen.
#[derive(Debug)]
pub struct Model {
    /// What is configured.
    pub world: World,
    /// Client and frontend → backend, at ingress.
    dials: HashMap<Ends, Dial>,
    /// Backend and client → frontend, at egress.
    replies: HashMap<Ends, Reply>,
    /// Client and backend → this node, at egress.
    masquerades: HashMap<Ends, SocketAddr>,
    /// Backend and this node → client, at ingress.
    returns: HashMap<Ends, SocketAddr>,
    /// Those of them that were answered, as far as they know.
    answered: HashSet<Ends>,
    fragments: Fragments,
    /// Service and client → the backends that it may be bound to: one, once a packet has shown which.
    bound: HashMap<(usize, IpAddr), BTreeSet<Endpoint>>,
    /// Whether a client was ever masqueraded, and whether one was not: else there is nothing to look for.
    masqueraded: bool,
    plain: bool,
}

impl Model {
    /// Without flows.
    #[must_use]
    pub fn new(world: World) -> Self {
        Self {
            world,
            dials: HashMap::new(),
            replies: HashMap::new(),
            masquerades: HashMap::new(),
            returns: HashMap::new(),
            answered: HashSet::new(),
            fragments: Fragments::default(),
            bound: HashMap::new(),
            masqueraded: false,
            plain: false,
        }
    }

    /// What should become of a packet at a hook.
    pub fn fate(&mut self, hook: Hook, came: &Came) -> Fate {
        match hook {
            Hook::Ingress => self.ingress(came),
            Hook::PodIngress => self.ingress_from_workload(came),
            Hook::Egress => self.egress(came, true),
            Hook::PodEgress => self.egress(came, false),
        }
    }

    fn masquerade_mark(&self) -> u32 {
        1 << self.world.settings.mark_bit
    }

    fn reply_mark(&self) -> u32 {
        2 << self.world.settings.mark_bit
    }

    // ── Ingress ──

    fn ingress(&mut self, came: &Came) -> Fate {
        if came.bytes[..6] != [0; 6] {
            return came.untouched(Why::Foreign); // the link brought it to others
        }
        let Some(p) = Shape::read(came.bytes, &self.fragments, false) else { return self.ping(came) };
        if p.is_stopped() {
            return came.dropped(Why::Fragment);
        }
        self.fragments.forget(&p);
        if !p.may_open() {
            return self.follow(came, &p);
        }
        match self.returned(&p).filter(|_| p.proto != TCP) {
            Some(client) => self.arrive(came, &p, (client, p.src.port()), self.reply_mark(), Why::Returned),
            None => {
                let fate = self.dial(came, &p);
                if fate.outcome.verdict != Verdict::Next {
                    self.fragments.stop(&p);
                }
                fate
            }
        }
    }

    /// Workloads' sockets dial backends: what they send can only be a reply to a masqueraded client.
    fn ingress_from_workload(&mut self, came: &Came) -> Fate {
        let shape = Shape::read(came.bytes, &self.fragments, false).filter(|_| self.masqueraded);
        let Some(p) = shape else { return came.untouched(Why::Foreign) };
        if p.quoted.is_some() {
            return self.follow(came, &p);
        }
        match self.returned(&p) {
            Some(client) => self.hand_back(came, &p, client),
            None => came.untouched(Why::Foreign),
        }
    }

    fn ping(&self, came: &Came) -> Fate {
        let is_answered = |ip| self.world.settings.answer_pings && self.world.has(ip, |kind| kind == Kind::ClusterIp);
        match pong(came.bytes, is_answered) {
            Some(reply) => came.answered(reply, Why::Pinged),
            None => came.untouched(Why::Foreign),
        }
    }

    /// The client that a packet to one of the masquerading ports is for. SCTP keeps the client's port, whatever it is.
    fn returned(&self, p: &Shape) -> Option<SocketAddr> {
        let is_ours = (PORTS.0..=PORTS.1).contains(&p.dst.port()) || p.proto == SCTP;
        self.returns.get(&p.ends()).copied().filter(|_| self.masqueraded && is_ours)
    }

    /// What opens nothing belongs to a flow, or is nobody's business.
    fn follow(&mut self, came: &Came, p: &Shape) -> Fate {
        if !self.masqueraded && !self.plain {
            return came.untouched(Why::Foreign);
        }
        if let Some(dial) = self.dials.get_mut(&p.ends()) {
            dial.seen = seen_after(dial.seen, p.tcp);
            let dial = *dial;
            return self.forward(came, p, dial, Why::Followed);
        }
        match self.returns.get(&p.ends()).copied() {
            Some(client) => self.hand_back(came, p, client),
            None => came.untouched(Why::Foreign),
        }
    }

    /// What is for a port of this node that a client is masqueraded with.
    fn hand_back(&mut self, came: &Came, p: &Shape, client: SocketAddr) -> Fate {
        if p.proto == TCP && p.is_ordinary() && self.is_anothers(p, client) {
            self.masquerades.remove(&(p.proto, client, p.src));
            self.returns.remove(&p.ends());
            self.answered.remove(&p.ends());
            return came.untouched(Why::GivenUp);
        }
        self.arrive(came, p, (client, p.src.port()), self.reply_mark(), Why::Returned)
    }

    /// Whether a segment is for a connection that netfilter gave the same port: an ACK although no SYN was answered, or an
    /// answered SYN although the flow is done (F37).
    fn is_anothers(&mut self, p: &Shape, client: SocketAddr) -> bool {
        let is_first = !self.answered.contains(&p.ends());
        let reply = self.replies.get(&(p.proto, p.src, client));
        let dial = reply.and_then(|reply| {
            let client = SocketAddr::new(client.ip(), reply.port);
            self.dials.get(&(p.proto, client, reply.frontend))
        });
        let (dialled, replied) = (dial.map_or(0, |dial| dial.seen), reply.and_then(|reply| reply.seen));
        let is_done = replied.is_some_and(|replied| replied & RST != 0 || dialled & replied & FIN != 0);
        let is_anothers = match (is_first, p.tcp & SYN != 0) {
            (true, false) => p.tcp & RST == 0 && replied.is_none(),
            (false, true) => is_done,
            (true, true) | (false, false) => false,
        };
        if !is_anothers {
            self.answered.insert(p.ends());
        }
        is_anothers
    }

    /// A SYN, or any datagram.
    fn dial(&mut self, came: &Came, p: &Shape) -> Fate {
        let Some((service, kind)) = self.world.frontend(p.proto, p.dst) else { return self.unknown(came, p) };
        if let Some(dial) = self.dials.get(&p.ends()).copied().filter(|dial| self.is_current(p, dial, service)) {
            self.dials.insert(p.ends(), Dial { seen: seen_after(dial.seen, p.tcp), ..dial });
            return self.forward(came, p, dial, Why::Followed);
        }
        if kind == Kind::NodePort && p.proto == UDP && self.world.awaited.contains(&(p.src, p.dst)) {
            return came.untouched(Why::Awaited);
        }
        if kind == Kind::LoadBalancer && self.world.services[service].admits.is_some_and(|ip| ip != p.src.ip()) {
            return came.dropped(Why::SourceRange);
        }
        let whose = self.world.whose(p.src.ip());
        if kind == Kind::ClusterIp && whose == Whose::Nobodys && self.world.settings.inside_only {
            return came.dropped(Why::FromOutside);
        }
        // DL-1: a pod of another node was served as one of this cluster there, or was not to be.
        let scope = match kind {
            Kind::ClusterIp => Scope::Cluster,
            _ if whose == Whose::Own => Scope::Inside,
            _ => Scope::Outside,
        };
        match self.world.services[service].endpoints(scope) {
            Ok(endpoints) => self.open(came, p, service, kind, endpoints),
            Err(Without::Any) => self.refuse(came, p, Why::NoEndpoint),
            Err(Without::Local) => came.dropped(Why::NoLocalEndpoint),
        }
    }

    /// What dials no frontend.
    fn unknown(&mut self, came: &Came, p: &Shape) -> Fate {
        let ip = p.dst.ip();
        if self.world.has(ip, |kind| kind == Kind::ClusterIp) {
            return self.refuse(came, p, Why::UnknownPort);
        }
        if Net::Services.contains(ip) {
            return came.dropped(Why::UnknownAddress);
        }
        let is_virtual = self.world.has(ip, |kind| matches!(kind, Kind::LoadBalancer | Kind::ExternalIp));
        let is_sent_on = ip != Net::Virtual.ip(ip.is_ipv6(), TAKEN);
        if is_virtual && is_sent_on && self.world.whose(p.src.ip()) != Whose::Own {
            return self.refuse(came, p, Why::Stray);
        }
        came.untouched(Why::Foreign)
    }

    /// Whether what may open a flow goes on with one: its backend still serves, and of TCP
    /// neither both sides are done nor the backend has given up (F51).
    fn is_current(&self, p: &Shape, dial: &Dial, service: usize) -> bool {
        let mut endpoints = self.world.services[service].endpoints.iter();
        let serves = endpoints.any(|endpoint| endpoint.at == dial.backend && endpoint.serves);
        let client = SocketAddr::new(p.src.ip(), dial.port);
        let replies = self.replies.get(&(p.proto, dial.backend, client)).and_then(|reply| reply.seen).unwrap_or(0);
        let is_done = p.proto == TCP && (replies & RST != 0 || dial.seen & replies & FIN != 0);
        dial.service == service && serves && !is_done
    }

    /// A new flow: the backend that the client is bound to, else any.
    fn open(&mut self, came: &Came, p: &Shape, service: usize, kind: Kind, endpoints: Vec<Endpoint>) -> Fate {
        let is_sticky = self.world.services[service].is_sticky;
        let among = BTreeSet::from_iter(endpoints);
        let bound = self.bound.get(&(service, p.src.ip())).filter(|bound| is_sticky && bound.is_subset(&among));
        let (able, unable): (Vec<_>, Vec<_>) =
            bound.unwrap_or(&among).iter().copied().partition(|endpoint| self.why_not(p, endpoint.at).is_none());
        let chosen = able.iter().copied().find(|endpoint| sent_to(came.did) == Some(endpoint.at));
        let chosen = chosen.or_else(|| able.first().copied().filter(|_| unable.is_empty()));
        let bound = chosen.map_or_else(|| BTreeSet::from_iter(unable.iter().copied()), |chosen| [chosen].into());
        if is_sticky {
            self.bound.insert((service, p.src.ip()), bound);
        }
        let Some(endpoint) = chosen else {
            let why = unable.iter().find_map(|endpoint| self.why_not(p, endpoint.at));
            return came.dropped(why.unwrap_or(Why::Clash));
        };
        let port = self.port(came, p, endpoint.at);
        let dial = self.enter(p, service, kind, &endpoint, port);
        self.forward(came, p, dial, if port == p.src.port() { Why::Opened } else { Why::Clash })
    }

    /// Why a flow to this backend cannot be.
    fn why_not(&self, p: &Shape, backend: SocketAddr) -> Option<Why> {
        if p.proto == SCTP && backend.port() != p.dst.port() {
            return Some(Why::SctpPort);
        }
        (p.proto == SCTP && self.clashes(p, backend)).then_some(Why::Clash)
    }

    /// Whether replies from `backend` could not be told from those of another flow of this client.
    fn clashes(&self, p: &Shape, backend: SocketAddr) -> bool {
        self.replies.get(&(p.proto, backend, p.src)).is_some_and(|reply| {
            (reply.port, reply.frontend) != (p.src.port(), p.dst) && self.stands(p.proto, backend, p.src, reply)
        })
    }

    /// Whether the flow with these replies is still one: its client may have been led elsewhere since.
    fn stands(&self, proto: u8, backend: SocketAddr, client: SocketAddr, reply: &Reply) -> bool {
        let dial = self.dials.get(&(proto, SocketAddr::new(client.ip(), reply.port), reply.frontend));
        dial.is_some_and(|dial| (dial.backend, dial.port) == (backend, client.port()))
    }

    /// Whether the flow that has a masquerading port stands.
    fn is_held(&self, proto: u8, backend: SocketAddr, at: SocketAddr) -> bool {
        self.returns.get(&(proto, backend, at)).is_some_and(|client| {
            let reply = self.replies.get(&(proto, backend, *client));
            reply.is_none_or(|reply| self.stands(proto, backend, *client, reply))
        })
    }

    /// The client's port from now on: its own, or where that would clash any free one that means nothing else here.
    fn port(&self, came: &Came, p: &Shape, backend: SocketAddr) -> u16 {
        let own = p.src.port();
        let is_free = |client: &SocketAddr| {
            let port = client.port();
            (port < 1024) == (own < 1024)
                && port >= 512
                && !(PORTS.0..=PORTS.1).contains(&port)
                && self.world.frontend(p.proto, *client).is_none()
                && !self.replies.contains_key(&(p.proto, backend, *client))
        };
        let given = sent_from(came.did).filter(|client| self.clashes(p, backend) && is_free(client));
        given.map_or(own, |client| client.port())
    }

    fn enter(&mut self, p: &Shape, service: usize, kind: Kind, endpoint: &Endpoint, port: u16) -> Dial {
        let World { settings, workload_programs, .. } = self.world;
        let whose = self.world.whose(p.src.ip());
        let is_own = endpoint.at.ip() == World::node(endpoint.at.is_ipv6());
        let wanted = self.world.services[service].masquerades(&settings, kind, p.src.ip(), whose, endpoint);
        let is_hairpin = endpoint.at.ip() == p.src.ip();
        // Without programs on its device, a workload's replies to this node would go astray.
        let is_masqueraded = wanted && (workload_programs || !endpoint.is_local || is_own || is_hairpin);
        self.masqueraded |= wanted;
        // What is masqueraded to a process of this node does not leave: its replies come by as they are.
        self.plain |= !is_masqueraded || is_own;
        let dial = Dial { service, backend: endpoint.at, port, is_masqueraded, seen: seen_after(0, p.tcp) };
        let reply = Reply { frontend: p.dst, port: p.src.port(), seen: None };
        self.replies.insert((p.proto, endpoint.at, SocketAddr::new(p.src.ip(), port)), reply);
        self.dials.insert(p.ends(), dial);
        dial
    }

    /// TCP with a RST; a datagram, and of SCTP what opens an association, with an ICMP error.
    fn refuse(&mut self, came: &Came, p: &Shape, why: Why) -> Fate {
        match p.proto {
            TCP => came.answered(p.reset(), why),
            _ => match p.unreachable() {
                // There is a limit, which is counted.
                Some(_) if came.did.verdict == Verdict::Drop => came.dropped(Why::Unreachable),
                Some(error) => came.answered(error, Why::Unreachable),
                None => came.dropped(why),
            },
        }
    }

    fn forward(&mut self, came: &Came, p: &Shape, dial: Dial, why: Why) -> Fate {
        let mark = if dial.is_masqueraded { self.masquerade_mark() } else { 0 };
        self.arrive(came, p, (dial.backend, dial.port), mark, why)
    }

    /// With a new destination, and this source port.
    fn arrive(&mut self, came: &Came, p: &Shape, (to, src_port): (SocketAddr, u16), mark: u32, why: Why) -> Fate {
        self.fragments.remember(p, false);
        let Some(bytes) = p.sent_to(to, src_port) else { return came.dropped(Why::FalseError) };
        Came { mark: came.mark | mark, ..*came }.becomes(bytes, of_kind(p, why))
    }

    // ── Egress ──

    /// Our marks end here. A packet without one can be a reply to a client that we did not masquerade, or what this node
    /// says of a packet of ours.
    fn egress(&mut self, came: &Came, to_clients: bool) -> Fate {
        let ours = came.mark & (self.masquerade_mark() | self.reply_mark());
        let came = &Came { mark: came.mark & !ours, ..*came };
        if ours == 0 && !((to_clients && self.plain) || (self.masqueraded && is_icmp(came.bytes))) {
            return came.untouched(Why::Foreign);
        }
        let Some(p) = Shape::read(came.bytes, &self.fragments, true) else { return came.untouched(Why::Foreign) };
        if let Some(reply) = self.replies.get_mut(&p.ends()) {
            if p.quoted.is_none() {
                reply.seen = Some(seen_after(reply.seen.unwrap_or(0), p.tcp));
            }
            let sent = (reply.frontend, reply.port);
            return self.leave(came, &p, sent, Why::Answered);
        }
        if let Some(seen_as) = self.masquerades.get(&p.ends()).copied() {
            return self.leave(came, &p, (seen_as, p.dst.port()), Why::Masqueraded);
        }
        if ours & self.masquerade_mark() == 0 || !p.is_ordinary() {
            return came.untouched(Why::Foreign);
        }
        self.masquerade(came, &p)
    }

    /// A free port at random (F37).
    fn masquerade(&mut self, came: &Came, p: &Shape) -> Fate {
        let node = World::node(p.src.is_ipv6());
        let ports = if p.proto == SCTP { p.src.port()..=p.src.port() } else { PORTS.0..=PORTS.1 };
        let is_free = |at: &SocketAddr| {
            // A frontend would take its replies for new flows.
            let is_frontend = p.proto != SCTP && self.world.frontend(p.proto, *at).is_some();
            !is_frontend && !self.is_held(p.proto, p.dst, *at)
        };
        let free: Vec<_> = ports.map(|port| SocketAddr::new(node, port)).filter(is_free).collect();
        // The last free one may escape 32 tries, though hardly ever.
        if free.is_empty() || (free.len() == 1 && came.did.verdict == Verdict::Drop) {
            return came.dropped(if p.proto == SCTP { Why::SctpPort } else { Why::Exhausted });
        }
        let chosen = free.iter().find(|at| sent_from(came.did) == Some(**at)).unwrap_or(&free[0]);
        let back = (p.proto, p.dst, *chosen);
        self.answered.remove(&back);
        if let Some(client) = self.returns.insert(back, p.src) {
            self.replies.remove(&(p.proto, p.dst, client));
            self.masquerades.remove(&(p.proto, client, p.dst));
        }
        self.masquerades.insert(p.ends(), *chosen);
        self.leave(came, p, (*chosen, p.dst.port()), Why::Masqueraded)
    }

    /// With a new source, and this destination port.
    fn leave(&mut self, came: &Came, p: &Shape, (from, dst_port): (SocketAddr, u16), why: Why) -> Fate {
        self.fragments.remember(p, true);
        came.becomes(p.sent_from(from, dst_port), of_kind(p, why))
    }
}

/// TCP flags of one side after another segment: a RST counts until its side speaks on, which it does by what acknowledges
/// something and is no SYN; all others say nothing but RST.
const fn seen_after(then: u8, segment: u8) -> u8 {
    if segment & (SYN | ACK) == ACK { then & !RST | segment } else { then | segment & RST }
}

/// The same reason, as it is called where the packet is no ordinary one.
fn of_kind(p: &Shape, why: Why) -> Why {
    match p.quoted {
        Some(_) => Why::Error,
        None if p.is_later() => Why::Fragment,
        None => why,
    }
}

fn is_icmp(bytes: &[u8]) -> bool {
    match packet::version(bytes) {
        Some(false) => bytes.get(ETH + 9) == Some(&ICMP),
        Some(true) => bytes.get(ETH + 6) == Some(&ICMPV6),
        None => false,
    }
}

/// The destination that a packet has now.
fn sent_to(did: &Outcome) -> Option<SocketAddr> {
    let (ip, (_, port)) = ends(did)?;
    Some(SocketAddr::new(ip.dst, port))
}

/// The source that a packet has now.
fn sent_from(did: &Outcome) -> Option<SocketAddr> {
    let (ip, (port, _)) = ends(did)?;
    Some(SocketAddr::new(ip.src, port))
}

fn ends(did: &Outcome) -> Option<(packet::Ip, (u16, u16))> {
    let ip = packet::ip(&did.bytes, ETH, packet::version(&did.bytes)?)?;
    Some((ip, packet::ports(&did.bytes, ip.l4)?)).filter(|_| did.verdict == Verdict::Next)
}
