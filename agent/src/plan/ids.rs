//! Allocation of ids and of room in the table. Pure: what is in use is told at the start, from the maps.

use std::collections::{BTreeMap, BTreeSet};

/// Numbers from 0, smallest free first, so that arrays stay dense.
#[derive(Clone, Debug)]
pub struct Ids {
    capacity: u32,
    /// Every number from here on was never taken.
    next: u32,
    /// Free numbers below `next`.
    free: BTreeSet<u32>,
}

impl Ids {
    /// All of `0..capacity` is free.
    #[must_use]
    pub const fn new(capacity: u32) -> Self {
        Self { capacity, next: 0, free: BTreeSet::new() }
    }

    /// Numbers that can still be taken.
    #[must_use]
    pub fn available(&self) -> usize {
        (self.capacity - self.next) as usize + self.free.len()
    }

    /// Numbers in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.capacity as usize - self.available()
    }

    /// Takes the smallest free number.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop_first().or_else(|| {
            (self.next < self.capacity).then(|| {
                self.next += 1;
                self.next - 1
            })
        })
    }

    /// Marks a number as in use that the maps show in use; says whether it was free.
    pub fn reserve(&mut self, id: u32) -> bool {
        if id >= self.capacity {
            return false;
        }
        if id < self.next {
            return self.free.remove(&id);
        }
        self.free.extend(self.next..id);
        self.next = id + 1;
        true
    }

    /// Gives a number back.
    pub fn release(&mut self, id: u32) {
        if id < self.next {
            self.free.insert(id);
        }
    }
}

/// Room for runs: intervals, best fit, merged when given back.
#[derive(Clone, Debug)]
pub struct Runs {
    capacity: u32,
    /// Free intervals: offset → length.
    free: BTreeMap<u32, u32>,
    /// The same by length.
    by_length: BTreeSet<(u32, u32)>,
}

impl Runs {
    /// All of `0..capacity` is free.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        let mut runs = Self { capacity, free: BTreeMap::new(), by_length: BTreeSet::new() };
        runs.insert(0, capacity);
        runs
    }

    /// Slots in use.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.capacity - self.free.values().sum::<u32>()
    }

    /// Takes `length` slots; the smallest interval that fits.
    pub fn take(&mut self, length: u32) -> Option<u32> {
        let (found, offset) = *self.by_length.range((length, 0)..).next()?;
        self.remove(offset, found);
        self.insert(offset + length, found - length);
        Some(offset)
    }

    /// Marks an interval as in use that the maps show in use; says whether it was free.
    pub fn reserve(&mut self, offset: u32, length: u32) -> bool {
        let Some((&start, &found)) = self.free.range(..=offset).next_back() else { return false };
        let Some(end) = offset.checked_add(length).filter(|end| *end <= start + found) else { return false };
        self.remove(start, found);
        self.insert(start, offset - start);
        self.insert(end, start + found - end);
        true
    }

    /// Gives an interval back.
    pub fn release(&mut self, mut offset: u32, mut length: u32) {
        if let Some((&before, &found)) = self.free.range(..offset).next_back()
            && before + found == offset
        {
            self.remove(before, found);
            (offset, length) = (before, length + found);
        }
        if let Some(&found) = self.free.get(&(offset + length)) {
            self.remove(offset + length, found);
            length += found;
        }
        self.insert(offset, length);
    }

    fn insert(&mut self, offset: u32, length: u32) {
        if length > 0 {
            self.free.insert(offset, length);
            self.by_length.insert((length, offset));
        }
    }

    fn remove(&mut self, offset: u32, length: u32) {
        self.free.remove(&offset);
        self.by_length.remove(&(length, offset));
    }
}

#[cfg(test)]
mod tests {
    use super::{Ids, Runs};

    #[test]
    fn ids_are_dense_and_never_given_twice() {
        let mut ids = Ids::new(5);
        assert!(ids.reserve(2) && !ids.reserve(2) && !ids.reserve(5));
        let taken: Vec<_> = std::iter::from_fn(|| ids.take()).collect();
        assert_eq!((taken, ids.available()), (vec![0, 1, 3, 4], 0));
        ids.release(3);
        assert_eq!((ids.available(), ids.used(), ids.take(), ids.take()), (1, 4, Some(3), None));
    }

    #[test]
    fn runs_merge_when_they_come_back() {
        let mut runs = Runs::new(10);
        assert!(runs.reserve(4, 2) && !runs.reserve(5, 1) && !runs.reserve(9, 2));
        let (a, b) = (runs.take(4).unwrap(), runs.take(3).unwrap());
        assert_eq!((a, b, runs.take(2), runs.used()), (0, 6, None, 9));
        runs.release(a, 4);
        runs.release(b, 3);
        runs.release(4, 2);
        assert_eq!((runs.used(), runs.take(10)), (0, Some(0)));
    }
}
