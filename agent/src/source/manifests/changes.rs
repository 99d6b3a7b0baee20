//! When to look at the directory again, and at which files for certain.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    path::Path,
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use notify::{
    Event, EventKind,
    event::{AccessKind, AccessMode, ModifyKind},
};

/// A burst of events is over after a pause of this length …
const PAUSE: Duration = Duration::from_millis(1);
/// … and looked at after this time even if it goes on.
const BURST: Duration = Duration::from_millis(200);
/// A file that is being written counts as written after a pause of this length: half a file may well be valid YAML.
const GROWN: Duration = Duration::from_millis(250);
/// The directory is looked at that often without any event: network file systems and links to elsewhere have none.
const UNTOLD: Duration = Duration::from_secs(5);

/// Whether an event can mean a change. Our own looking makes events too, of opening and reading: to wake up for those
/// would be to look for ever.
pub fn matters(event: &notify::Result<Event>) -> bool {
    use AccessKind::Close;
    !matches!(event, Ok(Event { kind: EventKind::Access(access), .. }) if *access != Close(AccessMode::Write))
}

/// What happened since the last look.
pub struct Changes {
    told: Receiver<notify::Result<Event>>,
    /// Files that events named.
    named: BTreeSet<String>,
    /// Those of them whose writer may not be done, and when it was last seen to write.
    growing: BTreeMap<String, Instant>,
}

impl Changes {
    /// Nothing yet.
    pub const fn new(told: Receiver<notify::Result<Event>>) -> Self {
        Self { told, named: BTreeSet::new(), growing: BTreeMap::new() }
    }

    /// Whether something happened to the file: its fingerprint alone misses two writes within a tick of the clock.
    pub fn names(&self, file: &str) -> bool {
        self.named.contains(file)
    }

    /// Whether the file is being written, so that it is better left alone.
    pub fn is_growing(&self, file: &str) -> bool {
        self.growing.contains_key(file)
    }

    /// Waits until another look is worth it.
    pub fn wait(&mut self) {
        self.named.retain(|file| self.growing.contains_key(file));
        let grown = self.growing.values().map(|written| GROWN.saturating_sub(written.elapsed())).min();
        match self.told.recv_timeout(grown.unwrap_or(UNTOLD)) {
            Ok(event) => self.take_burst(event),
            Err(RecvTimeoutError::Timeout) => {}
            // The watcher lives as long as the directory that waits here, so this is out of reach; it must not spin.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(UNTOLD),
        }
        self.growing.retain(|_, written| written.elapsed() < GROWN);
    }

    fn take_burst(&mut self, first: notify::Result<Event>) {
        let begin = Instant::now();
        self.take(first);
        while begin.elapsed() < BURST
            && let Ok(event) = self.told.recv_timeout(PAUSE)
        {
            self.take(event);
        }
    }

    fn take(&mut self, event: notify::Result<Event>) {
        // An error or an overflow names nothing; the look that follows compares all fingerprints.
        let Ok(event) = event else { return };
        let is_growing = match event.kind {
            EventKind::Create(_) | EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any) => true,
            EventKind::Access(_) // its writer has closed it
            | EventKind::Modify(_)
            | EventKind::Remove(_)
            | EventKind::Any
            | EventKind::Other => false,
        };
        for name in event.paths.iter().filter_map(|path| Path::file_name(path).and_then(OsStr::to_str)) {
            if is_growing {
                self.growing.insert(name.to_owned(), Instant::now());
            } else {
                self.growing.remove(name);
            }
            self.named.insert(name.to_owned());
        }
    }
}
