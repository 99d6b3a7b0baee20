//! Which backend: the affinity entry while it holds, else the service's algorithm. Shared by every hook.
use crate::{atomic, count, maps};
use aya_ebpf::{
    bindings::{BPF_ANY, BPF_NOEXIST},
    helpers::{bpf_get_prandom_u32, bpf_jiffies64, bpf_ktime_get_ns},
};
use sheave_ebpf::{
    affinity::{self, AffinityKey},
    backend,
    counter::Counter,
    service::{ALGORITHM_LEAST_CONNECTIONS, ALGORITHM_ROUND_ROBIN, Config, MAX_RUN, Word},
};

/// Seconds on the kernel's monotonic clock, at most some ticks ago. Reading that clock costs as much as a look-up, and a
/// tick is a load (since Linux 5.6): what it said is kept until some have gone by.
#[inline(always)]
pub fn now() -> u32 {
    const TICKS: u32 = 4; // as a power of two: 16 of them are 16 to 160 ms
    let clock = maps::clock();
    // SAFETY: plain helper calls, and an aligned word, read and written whole.
    unsafe {
        let tick = (bpf_jiffies64() >> TICKS) as u32;
        let kept = clock.read_volatile();
        if (kept >> 32) as u32 == tick {
            return kept as u32;
        }
        let now = (bpf_ktime_get_ns() / 1_000_000_000) as u32;
        clock.write_volatile(u64::from(tick) << 32 | u64::from(now));
        now
    }
}

/// A backend id for a new connection of `client`. `draw` decides where chance does: a random number, or with Maglev the
/// hash of what makes a connection go the same way on every node.
#[inline(always)]
pub fn backend(word: Word, config: Config, client: &AffinityKey, draw: u32) -> Option<u32> {
    if config.affinity_timeout() == 0 {
        return choose(word, config, client.service, draw);
    }
    sticky(word, config, client, draw)
}

/// A number to draw with.
#[inline(always)]
pub fn random() -> u32 {
    // SAFETY: a plain helper call.
    unsafe { bpf_get_prandom_u32() }
}

/// A function of its own: most services have no affinity, and the search would weigh on every program twice.
#[inline(never)]
fn sticky(word: Word, config: Config, client: &AffinityKey, draw: u32) -> Option<u32> {
    let now = now();
    if let Some(id) = remembered(word, config, client, now) {
        return Some(id);
    }
    let known = maps::affinity(client).is_some();
    let id = choose(word, config, client.service, draw)?;
    let flags = if known { BPF_ANY } else { BPF_NOEXIST };
    if maps::insert_affinity(client, affinity::word(id, now), flags.into()).is_err() {
        // Another connection of this client was first (A01); its choice holds for both.
        if let Some(theirs) = remembered(word, config, client, now) {
            return Some(theirs);
        }
        count::bump(Counter::AffinityFull);
    }
    Some(id)
}

/// The client's backend, if its entry is fresh and the backend is in this scope's set (A03, A05); refreshes it (A08).
#[inline(always)]
fn remembered(word: Word, config: Config, client: &AffinityKey, now: u32) -> Option<u32> {
    let entry = maps::affinity(client)?;
    // SAFETY: a live element; the value is one aligned word, read and written whole.
    let value = unsafe { entry.read_volatile() };
    let (id, last) = (affinity::backend(value), affinity::last_used(value));
    // Another CPU's clock may be ahead by a tick, and so by a second: what was used "later" was used just now.
    if now.saturating_sub(last) > config.affinity_timeout() || !is_member(word, id) {
        return None;
    }
    if now != last {
        // SAFETY: as above. Should the element have been reused meanwhile, another client's entry names a backend
        // that is not of its service, and it chooses anew.
        unsafe { entry.write_volatile(affinity::word(id, now)) };
    }
    Some(id)
}

/// Binary search, for the first slot that is not smaller, in the sorted run or in the sorted members behind a Maglev table.
#[inline(always)]
fn is_member(word: Word, id: u32) -> bool {
    let (mut first, mut length) = (word.offset(), word.length());
    if word.is_maglev() {
        let Some(members) = maps::slot(first + length) else { return false };
        first += length + 1;
        length = members;
    }
    let end = first.wrapping_add(length);
    // A run has at most 2^24 - 1 slots.
    for _ in 0..24 {
        if length == 0 {
            break;
        }
        let half = length / 2;
        let Some(middle) = maps::slot(first.wrapping_add(half)) else { return false };
        // VERIFIER: no branch here. Before Linux 6.4 little is pruned in programs with functions, and two ways a turn
        // are too many to walk: "BPF program is too large. Processed 1000001 insn" (5.10).
        let right = is_less(middle, id);
        first = first.wrapping_add(right.wrapping_mul(half.wrapping_add(1)));
        length = half.wrapping_sub(right & !length & 1);
    }
    first < end && maps::slot(first) == Some(id)
}

/// 1 when `a < b`, else 0, without a jump.
#[inline(always)]
fn is_less(a: u32, b: u32) -> u32 {
    let mut difference = u64::from(a).wrapping_sub(u64::from(b));
    // VERIFIER: LLVM makes a comparison and a jump of the same shift in Rust.
    // SAFETY: a shift of a register.
    #[cfg(target_arch = "bpf")]
    unsafe {
        core::arch::asm!("{0} >>= 63", inout(reg) difference, options(pure, nomem, nostack));
    }
    #[cfg(not(target_arch = "bpf"))]
    {
        difference >>= 63;
    }
    difference as u32
}

/// By algorithm. At a socket Maglev is a random choice by weight: the client's port is not known before it connects.
#[inline(always)]
fn choose(word: Word, config: Config, service: u32, draw: u32) -> Option<u32> {
    match config.algorithm() {
        ALGORITHM_ROUND_ROBIN => maps::slot(word.offset() + turn(service, word.length())),
        ALGORITHM_LEAST_CONNECTIONS => {
            // Two different slots: of two backends the idle one is always found.
            let length = word.length();
            let first = below(length, draw);
            let mut second = first + below(length - 1, random()) + 1;
            if second >= length {
                second -= length;
            }
            let (a, b) = (maps::slot(word.offset() + first)?, maps::slot(word.offset() + second)?);
            Some(if load(b) < load(a) { b } else { a })
        }
        _ => maps::slot(word.offset() + below(word.length(), draw)),
    }
}

/// Multiply and shift: as even as a division, and always below `length`; 0 for a length of 0.
#[inline(always)]
pub fn below(length: u32, draw: u32) -> u32 {
    ((u64::from(draw) * u64::from(length)) >> 32) as u32
}

/// The next turn. Two CPUs may draw the same number at once; over many connections the counts still agree to that.
#[inline(always)]
fn turn(service: u32, length: u32) -> u32 {
    let Some(cursor) = maps::cursor(service) else { return 0 };
    // SAFETY: array slots are stable and 8-byte aligned.
    let turn = unsafe {
        let turn = cursor.read_volatile();
        atomic::add(cursor, 1);
        turn
    };
    turn.checked_rem(u64::from(length & MAX_RUN)).unwrap_or(0) as u32
}

#[inline(always)]
fn load(id: u32) -> u64 {
    // SAFETY: array slots are stable and 8-byte aligned.
    maps::connections(id).map_or(0, |count| backend::connections(unsafe { count.read_volatile() }))
}
