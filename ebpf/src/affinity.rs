//! Session affinity: who went where, and when last.

pod! {
    /// A client of a service.
    pub struct AffinityKey [24] {
        /// Service id; the service's frontends share their entries.
        pub service: u32,
        /// `CLIENT_…`: what `client` holds.
        pub kind: u32,
        /// Address words, or the cookie's low and high half and two zeros.
        pub client: [u32; 4],
    }
}

/// `client` is a source address: what a packet shows.
pub const CLIENT_ADDRESS: u32 = 0;
/// `client` is a network namespace's cookie: a socket that dials has no source address yet.
pub const CLIENT_NETNS: u32 = 1;

/// The value: backend id and time of the last new connection, one aligned word so that it is seen whole.
#[inline(always)]
#[must_use]
pub const fn word(backend: u32, last_used: u32) -> u64 {
    (backend as u64) << 32 | last_used as u64
}

/// Backend id of an affinity word.
#[inline(always)]
#[must_use]
pub const fn backend(word: u64) -> u32 {
    (word >> 32) as u32
}

/// Boot-time seconds of the last new connection in an affinity word.
#[inline(always)]
#[must_use]
pub const fn last_used(word: u64) -> u32 {
    word as u32
}
