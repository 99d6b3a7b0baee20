//! What becomes of a packet, and why: all that the packet path can do.

use sheave_ebpf::counter::Counter;

/// Where a packet comes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// It arrives where clients may be.
    Ingress,
    /// It arrives from a workload, the sockets of which dial Services without us.
    PodIngress,
    /// It leaves to where clients may be.
    Egress,
    /// It leaves to a workload.
    PodEgress,
}

/// All hooks.
pub const HOOKS: [Hook; 4] = [Hook::Ingress, Hook::PodIngress, Hook::Egress, Hook::PodEgress];

/// What happens to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It goes on, and others see it.
    Next,
    /// It is gone.
    Drop,
    /// It leaves the way it came.
    Back,
}

/// A packet behind a hook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What happens to it.
    pub verdict: Verdict,
    /// Its bytes by then; of one that is dropped, they mean nothing.
    pub bytes: Vec<u8>,
    /// Its mark by then.
    pub mark: u32,
}

/// Why.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Why {
    /// Nobody's business: not a bit changes.
    Foreign,
    /// A connected socket of this host waits for the datagram.
    Awaited,
    /// Client to backend, the first packet of a flow.
    Opened,
    /// Client to backend, of a known flow.
    Followed,
    /// Client to backend, from now on with this node as its source.
    Masqueraded,
    /// Backend to this node: to the masqueraded client.
    Returned,
    /// Backend to client: from the frontend.
    Answered,
    /// A fragment without ports, of one of those.
    Fragment,
    /// An ICMP error about one of those (F33).
    Error,
    /// An ICMP error that quotes one of those, but is not for whom it quotes.
    FalseError,
    /// A ping is answered (F32).
    Pinged,
    /// No endpoint (V-1).
    NoEndpoint,
    /// Local, and no local endpoint (V-2, V-3).
    NoLocalEndpoint,
    /// An unknown port of a ClusterIP (V-4).
    UnknownPort,
    /// An address of the service CIDR that no Service has (V-5).
    UnknownAddress,
    /// An unknown port of a virtual address, which the kernel would send out again (F31).
    Stray,
    /// One of those, told to an SCTP client by an ICMP error.
    Unreachable,
    /// A client that is not in the source ranges (V-6).
    SourceRange,
    /// A ClusterIP is dialled from outside (F54), and must not be.
    FromOutside,
    /// SCTP to another port: its checksum covers the port.
    SctpPort,
    /// The replies could not be told from another flow's: the client gets another port, or with SCTP nothing.
    Clash,
    /// No port is free to masquerade with (F37).
    Exhausted,
    /// A port to masquerade with turns out to be another connection's (F37).
    GivenUp,
}

impl Why {
    /// All of them.
    pub const ALL: [Self; 23] = [
        Self::Foreign,
        Self::Awaited,
        Self::Opened,
        Self::Followed,
        Self::Masqueraded,
        Self::Returned,
        Self::Answered,
        Self::Fragment,
        Self::Error,
        Self::FalseError,
        Self::Pinged,
        Self::NoEndpoint,
        Self::NoLocalEndpoint,
        Self::UnknownPort,
        Self::UnknownAddress,
        Self::Stray,
        Self::Unreachable,
        Self::SourceRange,
        Self::FromOutside,
        Self::SctpPort,
        Self::Clash,
        Self::Exhausted,
        Self::GivenUp,
    ];
}

impl Fate {
    /// Whether just what people are told of such a fate was counted. Ports that were tried in vain do not matter.
    #[must_use]
    pub fn is_counted(&self, counted: &[Counter]) -> bool {
        let told: &[Counter] = match (self.why, self.outcome.verdict) {
            (Why::Opened, _) => &[Counter::PacketForward],
            (Why::Clash, Verdict::Drop) => &[Counter::PacketClash],
            (Why::Clash, _) => &[Counter::PacketForward, Counter::PacketOtherPort],
            (Why::FalseError, _) => &[Counter::PacketMalformed],
            (Why::Pinged, _) => &[Counter::PacketPing],
            (Why::NoEndpoint, _) => &[Counter::PacketReject],
            (Why::NoLocalEndpoint, _) => &[Counter::PacketDrop],
            (Why::UnknownPort | Why::Stray, _) => &[Counter::PacketUnknownPort],
            (Why::UnknownAddress, _) => &[Counter::PacketUnknownAddress],
            (Why::Unreachable, verdict) => {
                let limit: &[Counter] = if verdict == Verdict::Drop { &[Counter::PacketErrorLimit] } else { &[] };
                let told = |why: &Counter| counted.iter().eq([&[*why], limit].concat().iter());
                return [Counter::PacketReject, Counter::PacketUnknownPort].iter().any(told);
            }
            (Why::SourceRange, _) => &[Counter::PacketSourceRange],
            (Why::FromOutside, _) => &[Counter::PacketClusterIpFromOutside],
            (Why::SctpPort, _) => &[Counter::PacketSctpPort],
            (Why::Exhausted, _) => &[Counter::SnatExhausted],
            (Why::GivenUp, _) => &[Counter::SnatGivenUp],
            (
                Why::Foreign
                | Why::Awaited
                | Why::Followed
                | Why::Masqueraded
                | Why::Returned
                | Why::Answered
                | Why::Fragment
                | Why::Error,
                _,
            ) => &[],
        };
        counted.iter().filter(|counter| **counter != Counter::SnatRetry).eq(told)
    }
}

/// What should become of a packet.
#[derive(Clone, Debug)]
pub struct Fate {
    /// The reason.
    pub why: Why,
    /// What it should be behind the hook, checksums aside.
    pub outcome: Outcome,
}

/// A packet as it comes by, and what the programs made of it.
#[derive(Clone, Copy, Debug)]
pub struct Came<'a> {
    /// Its bytes.
    pub bytes: &'a [u8],
    /// Its mark.
    pub mark: u32,
    /// Where the rules leave a choice, the model looks at what was chosen, and holds the programs to it.
    pub did: &'a Outcome,
}

impl Came<'_> {
    /// It goes on as it is.
    #[must_use]
    pub fn untouched(&self, why: Why) -> Fate {
        self.becomes(self.bytes.to_vec(), why)
    }

    /// It goes on with other bytes.
    #[must_use]
    pub fn becomes(&self, bytes: Vec<u8>, why: Why) -> Fate {
        Fate { why, outcome: Outcome { verdict: Verdict::Next, bytes, mark: self.mark } }
    }

    /// It is gone.
    #[must_use]
    pub fn dropped(&self, why: Why) -> Fate {
        Fate { why, outcome: Outcome { verdict: Verdict::Drop, bytes: Vec::new(), mark: self.mark } }
    }

    /// Its answer leaves the way it came.
    #[must_use]
    pub fn answered(&self, bytes: Vec<u8>, why: Why) -> Fate {
        Fate { why, outcome: Outcome { verdict: Verdict::Back, bytes, mark: self.mark } }
    }
}
