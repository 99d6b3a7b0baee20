//! How many slots of a run each member gets.

/// Weight of a slice without annotation, so that an annotation of 10 beside it means a tenth of its share.
const FULL: u8 = 100;

/// Slots that weights may take in one run. Beyond it shares are rounded: 8 bytes a slot must not fill `TABLES`.
const MAX_WEIGHTED_SLOTS: u64 = 16_384;

/// Slots for each member, in order, as few as keep the proportions. 0 is kept for existing connections only, unless
/// nobody has more: then all are alike, because an annotation must not silence a Service that has endpoints.
pub(super) fn weights(members: impl Iterator<Item = Option<u8>>) -> Vec<u32> {
    let mut slots: Vec<u32> = members.map(|weight| u32::from(weight.unwrap_or(FULL))).collect();
    let divisor = slots.iter().copied().fold(0, gcd);
    if divisor == 0 {
        return vec![1; slots.len()];
    }
    slots.iter_mut().for_each(|slots| *slots /= divisor);

    let total: u64 = slots.iter().copied().map(u64::from).sum();
    if total > MAX_WEIGHTED_SLOTS && total > slots.len() as u64 {
        let scale = |slots: u32| (u64::from(slots) * MAX_WEIGHTED_SLOTS / total).max(1) as u32;
        slots.iter_mut().filter(|slots| **slots > 0).for_each(|slots| *slots = scale(*slots));
    }
    slots
}

/// Greatest common divisor; `gcd(0, n)` is `n`.
const fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::{MAX_WEIGHTED_SLOTS, weights};

    #[test]
    fn slots_keep_the_proportions_with_as_few_as_possible() {
        for (name, input, expected) in [
            ("nobody", vec![], vec![]),
            ("no annotation", vec![None, None, None], vec![1, 1, 1]),
            ("equal", vec![Some(7), Some(7)], vec![1, 1]),
            ("reduced", vec![Some(50), Some(100)], vec![1, 2]),
            ("no annotation is 100", vec![Some(10), None], vec![1, 10]),
            ("zero is not chosen", vec![Some(0), Some(20)], vec![0, 1]),
            ("zero beside no annotation", vec![None, Some(0)], vec![1, 0]),
            ("only zeros", vec![Some(0), Some(0)], vec![1, 1]),
            ("coprime", vec![Some(99), Some(100)], vec![99, 100]),
        ] {
            assert_eq!(weights(input.into_iter()), expected, "{name}");
        }
    }

    #[test]
    fn many_weighted_members_share_a_bounded_run() {
        let weight = |i| Some(if i % 2 == 0 { 100 } else { 49 });
        let slots = weights((0..2000).map(weight));
        let total: u32 = slots.iter().sum();
        assert!(u64::from(total) <= MAX_WEIGHTED_SLOTS, "{total} slots");
        assert!(slots[0] > slots[1] && slots[1] > 0, "{} and {}", slots[0], slots[1]);

        let equal = weights((0..20_000).map(|_| Some(30)));
        assert!(equal.iter().all(|slots| *slots == 1), "members without a difference need one slot each");
    }
}
