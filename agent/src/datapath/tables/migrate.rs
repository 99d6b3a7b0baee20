//! Taking over from an agent with another map layout (`docs/adr/0006-upgrades.md`).
//!
//! Maps that mean the same in both versions are taken over as they are: the very same objects, so that nothing is
//! copied and nothing is lost between a copy and its use. Links are taken over by renaming their pins; our programs
//! then go into them in one step, like into our own.

use std::{collections::BTreeSet, fs, io, path::Path};

use sheave_ebpf::{ABI_VERSION, maps};

use crate::datapath::{
    Error, Limits, Result,
    programs::{
        attach::remove_directory,
        link::{Pinned, make_directory},
        load::{Shape, pinned_entries, shapes},
    },
    tables::pins::Pins,
};

/// What others left, in order of age.
#[derive(Debug, Default)]
pub struct Legacy(Vec<Version>);

#[derive(Debug)]
struct Version {
    number: u32,
    pins: Pins,
}

/// The state of the tables at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tables {
    /// Ours, or those of another version that are as good: programs may be attached at once.
    Valid,
    /// Not filled yet, while the programs of another version serve from its own: they go on until ours are filled.
    Afresh,
}

/// Maps whose entries only mean something together: names, ids, and what refers to them.
const TOGETHER: [&str; 13] = [
    maps::FRONTENDS,
    maps::SERVICES,
    maps::TABLES,
    maps::BACKENDS,
    maps::CONNECTIONS,
    maps::NAMES,
    maps::META,
    maps::SOURCE_RANGES,
    maps::CURSORS,
    maps::AFFINITY,
    maps::SOCKETS,
    maps::PEERS,
    maps::CONNTRACK,
];
/// Of those, what holds nothing but the sessions of clients: when it changes, sessions start afresh, and nothing else
/// is lost.
const SESSIONS: [&str; 5] = [maps::CURSORS, maps::AFFINITY, maps::SOCKETS, maps::PEERS, maps::CONNTRACK];

impl Legacy {
    /// Looks for pins of other versions.
    ///
    /// # Errors
    /// When the directory of pins cannot be read.
    pub fn find(pins: &Pins) -> Result<Self> {
        let failed = |e| Error::kernel(format!("listing {}", pins.base.display()), e);
        let entries = match fs::read_dir(&pins.base) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            entries => entries.map_err(failed)?,
        };
        let mut found = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix('v')?.parse().ok());
            if let Some(number) = number.filter(|number| *number != ABI_VERSION) {
                found.push(Version { number, pins: pins.of_version(number) });
            }
        }
        found.sort_by_key(|version| version.number);
        Ok(Self(found))
    }

    /// There is no other version's state.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes over the maps that mean the same, before ours are made. All at once: if it is killed in the middle, the
    /// next start begins again.
    ///
    /// # Errors
    /// When a pin cannot be made.
    pub fn take_maps(&self, pins: &Pins, limits: &Limits) -> Result<Tables> {
        let next = pins.next();
        discard(&next)?;
        let Some(old) = self.0.iter().rfind(|version| version.pins.maps().exists()) else { return Ok(Tables::Valid) };
        let tables = || TOGETHER.into_iter().filter(|name| !SESSIONS.contains(name));
        if pins.maps().exists() {
            // A predecessor of our version got this far, or was here before: are its tables those that work now?
            let is_shared = |name| Pinned::open(pins.map(name)).is_ok_and(|map| map.is_at(&old.pins.map(name)));
            let is_switched = !has_entries(&old.pins.links());
            return Ok(if is_switched || tables().all(is_shared) { Tables::Valid } else { Tables::Afresh });
        }
        let same = old.same_maps(limits);
        if !tables().all(|name| same.contains(name)) {
            tracing::warn!(
                from = old.number,
                to = ABI_VERSION,
                "the tables of another version cannot be taken over: its programs keep serving until ours are filled; \
                 session affinity and flows on the packet path start afresh"
            );
            return Ok(Tables::Afresh);
        }
        for name in &same {
            let failed = |e| Error::kernel(format!("taking over the map {}", old.pins.map(name).display()), e);
            Pinned::open(old.pins.map(name)).and_then(|map| map.moved(next.map(name)).pin()).map_err(failed)?;
        }
        let failed = |e| Error::kernel(format!("renaming {}", next.root.display()), e);
        fs::rename(&next.root, &pins.root).map_err(failed)?;
        let begins_anew: Vec<_> = TOGETHER.iter().filter(|name| !same.contains(*name)).collect();
        tracing::info!(from = old.number, to = ABI_VERSION, ?begins_anew, "took over the maps of another version");
        Ok(Tables::Valid)
    }

    /// Moves the pins of links here. What is here already stays, and the other version's is removed with its directory.
    ///
    /// # Errors
    /// When a pin cannot be moved.
    pub fn move_links(&self, pins: &Pins) -> Result<()> {
        for version in self.0.iter().rev() {
            let Ok(entries) = fs::read_dir(version.pins.links()) else { continue };
            for entry in entries.flatten() {
                let here = pins.links().join(entry.file_name());
                if !here.exists() {
                    let failed = |e| Error::kernel(format!("moving the pin {}", entry.path().display()), e);
                    make_directory(&pins.links()).and_then(|()| fs::rename(entry.path(), &here)).map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    /// Removes what is left of other versions, links first.
    ///
    /// # Errors
    /// When a pin cannot be removed.
    pub fn remove(self) -> Result<()> {
        for version in self.0 {
            discard(&version.pins)?;
            tracing::info!(version = version.number, "removed the pins of another version");
        }
        Ok(())
    }
}

impl Version {
    /// The maps that we would make just so.
    fn same_maps(&self, limits: &Limits) -> BTreeSet<&'static str> {
        let is_older = self.number < ABI_VERSION;
        let is_same = |name| is_older && maps::changed_in(name) <= self.number;
        let fits = |shape: &Shape| matches!(pinned_entries(&self.pins.map(shape.name), shape), Ok(Some(_)));
        shapes(limits).iter().filter(|shape| is_same(shape.name) && fits(shape)).map(|shape| shape.name).collect()
    }
}

fn has_entries(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_some())
}

/// Removes a version's pins. What is not there is not missed.
fn discard(pins: &Pins) -> Result<()> {
    let mut removed = Vec::new();
    for directory in [pins.links(), pins.maps(), pins.root.clone()] {
        remove_directory(&directory, false, &mut removed)?;
    }
    Ok(())
}
