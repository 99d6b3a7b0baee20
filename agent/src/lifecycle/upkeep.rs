//! What others removed and the agent put back: tools, operators and other agents on a node detach programs, flush
//! qdiscs and empty directories. And what could not be put where it belongs, now or from the start.
//!
//! Each owner looks after its own things once in every [`PERIOD`] and notes here what it found; `status`, the metrics
//! and the log report it from here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// How long something may be missing before it is noticed. One round of checks costs some hundred system calls.
pub const PERIOD: Duration = Duration::from_secs(2);

/// What can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A program of the cgroup.
    CgroupLink,
    /// The packet path on a device.
    Device,
    /// The pin of a map or a link.
    Pin,
    /// The agent's socket.
    Socket,
    /// The discard device.
    Discard,
}

impl Part {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::CgroupLink, Self::Device, Self::Pin, Self::Socket, Self::Discard];

    /// As metrics and `status` call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CgroupLink => "cgroup-program",
            Self::Device => "device-programs",
            Self::Pin => "pin",
            Self::Socket => "agent-socket",
            Self::Discard => "discard-device",
        }
    }
}

/// A clone notes in the same place.
#[derive(Clone, Debug, Default)]
pub struct Upkeep(Arc<Mutex<Notes>>);

#[derive(Debug, Default)]
struct Notes {
    repairs: BTreeMap<Part, u64>,
    /// Put back since the last report.
    unreported: BTreeMap<Part, BTreeSet<String>>,
    /// What cannot be put back, by the reason.
    missing: BTreeMap<(Part, String), BTreeSet<String>>,
    /// Reasons since the last report.
    news: BTreeSet<(Part, String)>,
}

impl Upkeep {
    /// The outcome of checking one thing: `false` = it was there, `true` = it was gone and is back.
    pub fn note<E: Display>(&self, part: Part, name: impl Display, outcome: Result<bool, E>) {
        let name = name.to_string();
        let mut notes = self.lock();
        let reason = outcome.as_ref().err().map(|error| (part, error.to_string()));
        notes.missing.retain(|known, names| {
            if known.0 == part && reason.as_ref() != Some(known) {
                names.remove(&name);
            }
            !names.is_empty()
        });
        match (outcome, reason) {
            (Ok(true), _) => {
                *notes.repairs.entry(part).or_default() += 1;
                notes.unreported.entry(part).or_default().insert(name);
            }
            (Err(_), Some(reason)) => {
                if !notes.missing.contains_key(&reason) {
                    notes.news.insert(reason.clone());
                }
                notes.missing.entry(reason).or_default().insert(name);
            }
            (Ok(false), _) | (Err(_), None) => {}
        }
    }

    /// Ends a round of checks: logs one line for each kind of thing that was put back or cannot be, however many; a
    /// complaint only once for as long as it stays the same.
    pub fn report(&self) {
        let mut notes = self.lock();
        for (part, names) in std::mem::take(&mut notes.unreported) {
            tracing::warn!("something else removed this, and it was put back: {}", some(part, &names));
        }
        for news in std::mem::take(&mut notes.news) {
            if let Some(names) = notes.missing.get(&news) {
                tracing::warn!("{}", sentence(&news, names));
            }
        }
    }

    /// How often each part was put back.
    #[must_use]
    pub fn repairs(&self) -> BTreeMap<String, u64> {
        let notes = self.lock();
        let count = |part: Part| (part.name().to_owned(), notes.repairs.get(&part).copied().unwrap_or_default());
        Part::ALL.into_iter().map(count).collect()
    }

    /// What is missing, one sentence each.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.lock().missing.iter().map(|(reason, names)| sentence(reason, names)).collect()
    }

    /// A panic elsewhere cannot have spoilt it: it is whole after every statement.
    fn lock(&self) -> MutexGuard<'_, Notes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn sentence((part, reason): &(Part, String), names: &BTreeSet<String>) -> String {
    format!("this is missing, and cannot be put in its place: {}: {reason}", some(*part, names))
}

fn some(part: Part, names: &BTreeSet<String>) -> String {
    let first = names.first().map_or("", String::as_str);
    match names.len() {
        0 | 1 => format!("{} {first}", part.name()),
        more => format!("{} {first} and {} more", part.name(), more - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_lasts_until_the_thing_is_there_and_repairs_are_counted() {
        const GONE: &str = "this is missing, and cannot be put in its place: pin ";
        let upkeep = Upkeep::default();
        /// Name, thing, what a look gave; repairs and problems then.
        type Case<'a> = (&'a str, &'a str, Result<bool, &'a str>, u64, &'a [&'a str]);
        let cases: [Case<'_>; 8] = [
            ("it is there", "names", Ok(false), 0, &[]),
            ("it is gone", "names", Ok(true), 1, &[]),
            ("it cannot be put back", "names", Err("read-only"), 1, &["names: read-only"]),
            ("nor can another", "tables", Err("read-only"), 1, &["names and 1 more: read-only"]),
            ("for a new reason", "names", Err("no bpffs"), 1, &["names: no bpffs", "tables: read-only"]),
            ("again", "names", Err("no bpffs"), 1, &["names: no bpffs", "tables: read-only"]),
            ("one is back", "names", Ok(true), 2, &["tables: read-only"]),
            ("the other turns out to be there", "tables", Ok(false), 2, &[]),
        ];
        for (name, thing, outcome, repairs, problems) in cases {
            upkeep.note(Part::Pin, thing, outcome);
            assert_eq!(upkeep.repairs()["pin"], repairs, "{name}");
            let expected: Vec<_> = problems.iter().map(|problem| format!("{GONE}{problem}")).collect();
            assert_eq!(upkeep.problems(), expected, "{name}");
        }
    }
}
