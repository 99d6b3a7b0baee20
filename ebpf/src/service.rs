//! What a service does with a connection: one word per scope, each switched by a single store.

/// Words a service has in `SERVICES`: the three scopes and the configuration.
pub const WORDS_PER_SERVICE: u32 = 4;

/// Which of a service's words decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u32)]
pub enum Scope {
    /// The ClusterIP was dialled: internalTrafficPolicy.
    Cluster = 0,
    /// An external address was dialled from this cluster: the cluster-wide set.
    Inside = 1,
    /// An external address was dialled from outside: externalTrafficPolicy.
    Outside = 2,
}

/// Index into `SERVICES` of a scope's word.
#[inline(always)]
#[must_use]
pub const fn word_index(service: u32, scope: Scope) -> u32 {
    service * WORDS_PER_SERVICE + scope as u32
}

/// Index into `SERVICES` of the configuration word.
#[inline(always)]
#[must_use]
pub const fn config_index(service: u32) -> u32 {
    service * WORDS_PER_SERVICE + 3
}

/// The word was never written: the frontend is treated as unknown.
pub const VERDICT_NONE: u8 = 0;
/// Take a backend from the run.
pub const VERDICT_FORWARD: u8 = 1;
/// No endpoint anywhere: refuse.
pub const VERDICT_REJECT: u8 = 2;
/// Endpoints exist, but the Local policy leaves none: drop silently.
pub const VERDICT_DROP: u8 = 3;

/// The commit point of a scope: verdict (bits 63–60), Maglev flag (59), run length (bits 55–32), run offset (31–0).
///
/// A run is `length` slots of `TABLES`, each a backend id, sorted by id and possibly with repetitions (weights).
/// A Maglev run keeps Maglev's order instead; behind its slots follow the number of members and the members, sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Word(pub u64);

/// Largest length of a run.
pub const MAX_RUN: u32 = (1 << 24) - 1;

const MAGLEV: u64 = 1 << 59;

impl Word {
    /// `verdict` without a run.
    #[must_use]
    pub const fn verdict_only(verdict: u8) -> Self {
        Self((verdict as u64) << 60)
    }

    /// Forward into `[offset, offset + length)`. `length` must be in 1 ..= [`MAX_RUN`].
    #[must_use]
    pub const fn forward(offset: u32, length: u32, maglev: bool) -> Self {
        let flag = if maglev { MAGLEV } else { 0 };
        Self((VERDICT_FORWARD as u64) << 60 | flag | ((length & MAX_RUN) as u64) << 32 | offset as u64)
    }

    /// One of the `VERDICT_…` constants.
    #[inline(always)]
    #[must_use]
    pub const fn verdict(self) -> u8 {
        (self.0 >> 60) as u8
    }

    /// Whether the run is a Maglev table.
    #[inline(always)]
    #[must_use]
    pub const fn is_maglev(self) -> bool {
        self.0 & MAGLEV != 0
    }

    /// First slot of the run.
    #[inline(always)]
    #[must_use]
    pub const fn offset(self) -> u32 {
        self.0 as u32
    }

    /// Slots in the run.
    #[inline(always)]
    #[must_use]
    pub const fn length(self) -> u32 {
        (self.0 >> 32) as u32 & MAX_RUN
    }
}

/// Uniformly at random for every new connection (kube-proxy's way).
pub const ALGORITHM_RANDOM: u8 = 0;
/// In turn.
pub const ALGORITHM_ROUND_ROBIN: u8 = 1;
/// The less loaded of two random choices, by live connections.
pub const ALGORITHM_LEAST_CONNECTIONS: u8 = 2;
/// Consistent hashing of the client; the same on every node.
pub const ALGORITHM_MAGLEV: u8 = 3;

/// LoadBalancer addresses admit only clients in `SOURCE_RANGES`.
pub const FLAG_SOURCE_RANGES: u32 = 1;
/// Processes in the host's network namespace are within the source ranges: one of the node's addresses is.
pub const FLAG_HOST_ALLOWED: u32 = 1 << 1;
/// Pods of this node are within the source ranges: the node's pod CIDRs are.
pub const FLAG_PODS_ALLOWED: u32 = 1 << 2;
/// Some pods of this node may be within the source ranges and some not: the packet path checks their addresses,
/// since a socket that connects has none yet.
pub const FLAG_PODS_BY_PACKET: u32 = 1 << 4;
/// externalTrafficPolicy is Local: clients from outside are not masqueraded.
pub const FLAG_EXTERNAL_LOCAL: u32 = 1 << 3;

/// A service's configuration in one word: affinity timeout in seconds (bits 63–32), flags (31–8), algorithm (7–0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Config(pub u64);

impl Config {
    /// `affinity_timeout` in seconds, 0 = no affinity; `flags` are `FLAG_…`.
    #[must_use]
    pub const fn new(algorithm: u8, flags: u32, affinity_timeout: u32) -> Self {
        Self((affinity_timeout as u64) << 32 | ((flags & 0xff_ffff) as u64) << 8 | algorithm as u64)
    }

    /// One of the `ALGORITHM_…` constants.
    #[inline(always)]
    #[must_use]
    pub const fn algorithm(self) -> u8 {
        self.0 as u8
    }

    /// The `FLAG_…` bits.
    #[inline(always)]
    #[must_use]
    pub const fn flags(self) -> u32 {
        (self.0 >> 8) as u32 & 0xff_ffff
    }

    /// Seconds; 0 = no affinity.
    #[inline(always)]
    #[must_use]
    pub const fn affinity_timeout(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_gives_back_what_went_in() {
        let word = Word::forward(u32::MAX, MAX_RUN, true);
        assert_eq!((word.verdict(), word.offset(), word.length()), (VERDICT_FORWARD, u32::MAX, MAX_RUN));
        assert!(word.is_maglev() && !Word::forward(1, 1, false).is_maglev());
        assert_eq!(Word::verdict_only(VERDICT_DROP).verdict(), VERDICT_DROP);
        assert_eq!(Word::default().verdict(), VERDICT_NONE);
        let config = Config::new(ALGORITHM_MAGLEV, FLAG_SOURCE_RANGES | FLAG_PODS_ALLOWED, 86_400);
        assert_eq!((config.algorithm(), config.flags(), config.affinity_timeout()), (3, 5, 86_400));
    }
}
