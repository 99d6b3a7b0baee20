//! Step 4: runs of backend ids, into free room of `TABLES`.
//!
//! | how full | who may still take room |
//! |---|---|
//! | to 7/8 | everybody |
//! | to 15/16 | plain runs: a slot for each backend, whatever its weight, and no Maglev table |
//! | to the end | plain runs of groups that are there already, so that no other group stops their changes |

use std::collections::BTreeSet;

use sheave_ebpf::{
    maps,
    service::{ALGORITHM_MAGLEV, VERDICT_DROP, VERDICT_REJECT, Word},
};

use super::{Identity, Reconciler};
use crate::{
    datapath::{Datapath, Error, Result},
    plan::group::{GroupPlan, ScopePlan},
};

/// What is to be written.
struct Run {
    /// Of a Maglev table with the number of its members and the members behind it.
    slots: Vec<u32>,
    /// How many of them are selectable.
    length: u32,
    is_maglev: bool,
    /// Every member has one slot.
    is_plain: bool,
}

impl Run {
    fn new(mut slots: Vec<u32>, is_maglev: bool) -> Self {
        let length = slots.len() as u32;
        let members: BTreeSet<u32> = slots.iter().copied().collect();
        let is_plain = !is_maglev && members.len() == slots.len();
        if is_maglev {
            slots.push(members.len() as u32);
            slots.extend(members);
        } else {
            slots.sort_unstable();
        }
        Self { slots, length, is_maglev, is_plain }
    }

    /// The same members without weights.
    fn plain(&self) -> Self {
        let selectable = self.slots[..self.length as usize].iter().copied();
        Self::new(selectable.collect::<BTreeSet<u32>>().into_iter().collect(), false)
    }
}

impl<D: Datapath> Reconciler<D> {
    /// The words that step 5 is to store. Runs that are as wanted already are kept. Where there is no room for weights or
    /// a Maglev table, the run is a plain one, and the shortage is returned beside the words.
    pub(super) fn put_runs(&mut self, plan: &GroupPlan) -> Result<([Word; 3], Option<Error>)> {
        let Some(group) = self.groups.get(&plan.key) else { return Ok(([Word::default(); 3], None)) };
        let old = group.words;
        let mut made = Vec::new();
        let put = self.words(plan, &old, &mut made);
        if put.is_err() {
            made.iter().for_each(|word| self.rest_run_unless(*word, &old));
        }
        put
    }

    /// `made` becomes the words of runs that were written.
    fn words(&mut self, plan: &GroupPlan, old: &[Word; 3], made: &mut Vec<Word>) -> Result<([Word; 3], Option<Error>)> {
        let (mut words, mut shortage) = (*old, None);
        for (word, wanted) in words.iter_mut().zip(&plan.scopes) {
            match wanted {
                ScopePlan::Unused => {} // cleared in step 8, when nothing leads there
                ScopePlan::Reject => *word = Word::verdict_only(VERDICT_REJECT),
                ScopePlan::Drop => *word = Word::verdict_only(VERDICT_DROP),
                ScopePlan::Forward(slots) => {
                    let run = self.run_of_plan(plan, slots);
                    *word = match self.keep_or_put(&run, old, made) {
                        Err(error @ Error::NoSpace { .. }) if !run.is_plain => {
                            shortage = Some(error);
                            self.keep_or_put(&run.plain(), old, made)?
                        }
                        put => put?,
                    };
                }
            }
        }
        Ok((words, shortage))
    }

    /// Slots as ids. Backends without an id are left out.
    fn run_of_plan(&self, plan: &GroupPlan, slots: &[u32]) -> Run {
        let group = self.groups.get(&plan.key);
        let id = |index: &u32| {
            let backend = plan.backends.get(*index as usize)?;
            group?.backends.get(&Identity::from(backend)).copied()
        };
        Run::new(slots.iter().filter_map(id).collect(), plan.config.algorithm() == ALGORITHM_MAGLEV)
    }

    fn keep_or_put(&mut self, run: &Run, old: &[Word; 3], made: &mut Vec<Word>) -> Result<Word> {
        if run.length == 0 {
            return Ok(Word::verdict_only(VERDICT_REJECT)); // only with a full BACKENDS map
        }
        if let Some(word) = old.iter().chain(&*made).find(|word| self.holds(**word, run)) {
            return Ok(*word);
        }
        let word = self.put_run(run, old)?;
        made.push(word);
        Ok(word)
    }

    /// Whether a word leads to exactly this run.
    fn holds(&self, word: Word, run: &Run) -> bool {
        word.is_maglev() == run.is_maglev
            && word.length() == run.length
            && self.run_of(word).is_some_and(|(offset, total)| {
                total as usize == run.slots.len()
                    && (offset..).zip(&run.slots).all(|(i, id)| self.datapath.slot(i) == *id)
            })
    }

    /// `old` words lead to what the run replaces.
    fn put_run(&mut self, run: &Run, old: &[Word; 3]) -> Result<Word> {
        let total = run.slots.len() as u32;
        let replaced: BTreeSet<(u32, u32)> = old.iter().filter_map(|word| self.run_of(*word)).collect();
        let replaced: u32 = replaced.iter().map(|(_, length)| length).sum();
        let capacity = self.datapath.limits().slots;
        let full = Error::NoSpace { map: maps::TABLES, capacity, flag: Some("--max-table-slots") };
        if !run.is_plain && self.named_slots().saturating_sub(replaced) + total > capacity - capacity / 8 {
            return Err(full);
        }
        let mut offset = self.runs.take(total);
        if offset.is_none() {
            self.reclaim()?;
            offset = self.runs.take(total);
        }
        let offset = offset.ok_or(full)?;
        for (slot, id) in (offset..).zip(&run.slots) {
            if let Err(error) = self.datapath.put_slot(slot, *id) {
                self.runs.release(offset, total); // nothing names it
                return Err(error);
            }
        }
        Ok(Word::forward(offset, run.length, run.is_maglev))
    }

    /// Whether a group that is not there yet may take so many slots.
    pub(super) fn has_room_for_new(&self, slots: usize) -> bool {
        let capacity = self.datapath.limits().slots;
        slots == 0 || self.named_slots() as usize + slots <= (capacity - capacity / 16) as usize
    }

    /// Slots in use, without those that rest.
    fn named_slots(&self) -> u32 {
        let [_, _, resting] = self.resting.counts();
        self.runs.used().saturating_sub(resting as u32)
    }

    /// The run of a word rests, unless one of `named` leads to it too.
    pub(super) fn rest_run_unless(&mut self, word: Word, named: &[Word]) {
        let Some((offset, length)) = self.run_of(word) else { return };
        if !named.iter().any(|other| self.run_of(*other).is_some_and(|(o, _)| o == offset)) {
            self.resting.run(offset, length);
        }
    }
}
