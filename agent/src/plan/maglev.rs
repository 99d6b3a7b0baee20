//! Consistent hashing after Google's Maglev (Eisenbud et al., NSDI 2016, section 3.4), with weights.
//!
//! The table depends on addresses, ports and weights only, so every node fills the same one and a connection that
//! another node takes over finds its backend.

use std::{
    net::{IpAddr, SocketAddr},
    str::FromStr,
};

/// A backend that takes slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// What is written to the slots.
    pub id: u32,
    /// What its preferences depend on.
    pub target: SocketAddr,
    /// Its share in relation to the others', at least 1.
    pub weight: u32,
}

/// Number of slots of a table: a prime, since otherwise a member's steps would visit a part of the table only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(u32);

impl Size {
    /// Small enough for tests that look at every write.
    #[cfg(test)]
    pub(crate) const TINY: Self = Self(13);

    /// Good for about 160 backends with shares that differ by less than 1 %; 128 KiB a table.
    pub const DEFAULT: Self = Self(16_381);

    /// Below, shares are too coarse; above, a table costs megabytes a Service.
    const RANGE: std::ops::RangeInclusive<u32> = 251..=131_071;

    /// A table of `size` slots.
    ///
    /// # Errors
    /// A sentence for the operator, when the size is out of range or no prime.
    pub fn new(size: u32) -> Result<Self, String> {
        if !Self::RANGE.contains(&size) {
            return Err(format!(
                "a Maglev table has {} to {} slots, not {size}",
                Self::RANGE.start(),
                Self::RANGE.end()
            ));
        }
        let is_prime = (2..).take_while(|d| d * d <= size).all(|d| !size.is_multiple_of(d));
        if is_prime { Ok(Self(size)) } else { Err(format!("a Maglev table needs a prime number of slots, not {size}")) }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::new(text.parse().map_err(|_| format!("{text:?} is not a number of slots"))?)
    }
}

/// Fills a table with the ids of `members`, which must come in the same order on every node. Empty without members.
#[must_use]
pub fn fill(members: &[Member], size: Size) -> Vec<u32> {
    const FREE: u32 = u32::MAX;
    let Some(heaviest) = members.iter().map(|m| m.weight.max(1)).max() else { return Vec::new() };
    let mut preferences: Vec<Preference> = members.iter().map(|m| Preference::of(m.target, size)).collect();
    let mut credits = vec![0; members.len()];
    let mut table = vec![FREE; size.0 as usize];
    let mut free = size.0;
    loop {
        for ((member, preference), credit) in members.iter().zip(&mut preferences).zip(&mut credits) {
            // The heaviest takes a slot in every round, the others whenever their weights have added up to as much.
            *credit += member.weight.max(1);
            if *credit < heaviest {
                continue;
            }
            *credit -= heaviest;
            let Some(slot) = preference.find(|slot| table[*slot] == FREE) else { return table }; // it has no end
            table[slot] = member.id;
            free -= 1;
            if free == 0 {
                return table;
            }
        }
    }
}

/// The order in which a member wants the slots: a walk over all of them in equal steps.
struct Preference {
    next: u32,
    step: u32,
    size: u32,
}

impl Preference {
    fn of(target: SocketAddr, Size(size): Size) -> Self {
        let hash = hash(target);
        let next = (hash % u64::from(size)) as u32;
        let step = (mix(hash) % u64::from(size - 1)) as u32 + 1;
        Self { next, step, size }
    }
}

impl Iterator for Preference {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let slot = self.next;
        self.next = (slot + self.step) % self.size;
        Some(slot as usize)
    }
}

/// FNV-1a over the address and the port, then mixed. Never to be changed: during an upgrade nodes must agree.
fn hash(target: SocketAddr) -> u64 {
    let octets = match target.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    let bytes = octets.into_iter().chain(target.port().to_be_bytes());
    mix(bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)))
}

/// The finaliser of SplitMix64: every input bit reaches every output bit.
const fn mix(hash: u64) -> u64 {
    let hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^ (hash >> 31)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::{Member, Size, fill};

    const SMALL: Size = Size(251);
    const SIZE: Size = Size::DEFAULT;

    fn member(id: u32, weight: u32) -> Member {
        let [_, _, high, low] = id.to_be_bytes();
        Member { id, target: SocketAddr::from(([10, 244, high, low], 8080)), weight }
    }

    fn shares(table: &[u32], members: usize) -> Vec<u32> {
        let mut shares = vec![0; members];
        table.iter().for_each(|id| shares[*id as usize] += 1);
        shares
    }

    #[test]
    fn slots_are_shared_evenly() {
        for count in [1, 2, 3, 10, 100, 163] {
            let members: Vec<_> = (0..count).map(|id| member(id, 1)).collect();
            let shares = shares(&fill(&members, SIZE), members.len());
            let (min, max) = (*shares.iter().min().unwrap(), *shares.iter().max().unwrap());
            assert_eq!(shares.iter().sum::<u32>(), SIZE.0);
            assert!(max - min <= 1, "{count} members hold {min} to {max} slots");
        }
    }

    #[test]
    fn slots_follow_the_weights() {
        let weights = [1, 10, 50, 100];
        let members: Vec<_> = weights.iter().zip(0..).map(|(weight, id)| member(id, *weight)).collect();
        for (share, weight) in shares(&fill(&members, SIZE), members.len()).into_iter().zip(weights) {
            let fair = f64::from(SIZE.0) * f64::from(weight) / 161.0;
            assert!((f64::from(share) - fair).abs() <= 2.0, "weight {weight} holds {share} slots, not {fair}");
        }
    }

    #[test]
    fn little_moves_when_a_member_leaves() {
        let members: Vec<_> = (0..100).map(|id| member(id, 1)).collect();
        let before = fill(&members, SIZE);
        let after = fill(&[&members[..40], &members[41..]].concat(), SIZE);
        let moved = before.iter().zip(&after).filter(|(was, is)| was != is && **was != 40).count();
        assert!(after.iter().all(|id| *id != 40));
        assert!(moved * 100 <= SIZE.0 as usize * 5, "{moved} of {} slots moved between members that stayed", SIZE.0);
    }

    #[test]
    fn the_table_depends_on_targets_only() {
        let members: Vec<_> = (0..10).map(|id| member(id, 1)).collect();
        let renamed: Vec<_> = members.iter().map(|m| Member { id: m.id + 1000, ..*m }).collect();
        let expected: Vec<_> = fill(&members, SMALL).into_iter().map(|id| id + 1000).collect();
        assert_eq!(fill(&renamed, SMALL), expected);
        // A changed hash would send clients elsewhere while nodes are being upgraded.
        assert_eq!(fill(&members, SMALL)[..8], [1, 7, 0, 9, 0, 8, 7, 4]);
    }

    #[test]
    fn more_members_than_slots_is_not_fatal() {
        let members: Vec<_> = (0..1000).map(|id| member(id, 1)).collect();
        assert_eq!(fill(&members, SMALL).len(), 251);
        assert!(fill(&[], SMALL).is_empty());
    }

    #[test]
    fn only_primes_of_sensible_size_are_sizes() {
        for (size, ok) in
            [(251, true), (16_381, true), (131_071, true), (0, false), (241, false), (1000, false), (262_139, false)]
        {
            assert_eq!(Size::new(size).is_ok(), ok, "{size}");
        }
    }
}
