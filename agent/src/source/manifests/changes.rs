//! When to look at the directory again, which files to look at for certain, and which of them are being written.
//!
//! inotify tells when a file is written to and when a writer closes it. In between it is left alone: half a file may
//! well be valid YAML, and an empty one says that everything is gone. `kubectl get … > file` empties it first.

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
/// The directory is looked at that often without any event: network file systems and links to elsewhere have none.
const UNTOLD: Duration = Duration::from_secs(5);

/// How long the state of a file that may be incomplete lasts after the last sign of its writer.
const FRESH: Duration = Duration::from_millis(250);
/// A writer that holds its file open and writes nothing for so long is believed to be done, like the writer of a log.
/// Longer pauses at the end of a document cannot be told from the end of the file.
const BELIEVED: Duration = Duration::from_secs(30);

/// Whether an event can mean a change. Our own looking makes events too, of opening and reading: to wake up for those
/// would be to look for ever.
pub fn matters(event: &notify::Result<Event>) -> bool {
    use AccessKind::Close;
    !matches!(event, Ok(Event { kind: EventKind::Access(access), .. }) if *access != Close(AccessMode::Write))
}

/// A file whose writer may not be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writing {
    /// It was written to a moment ago.
    Busy,
    /// It is open, and its writer pauses.
    Pausing,
    /// It is open, and has been quiet for so long that it counts, unless it is empty.
    Quiet,
}

/// The last sign of a file's writer.
#[derive(Clone, Copy, Debug)]
struct Sign {
    at: Instant,
    /// It was written to and not closed. Otherwise it has just appeared, or changed without any event.
    is_open: bool,
    /// How long the sign lasts.
    lasts: Duration,
}

/// What happened since the last look.
pub struct Changes {
    told: Receiver<notify::Result<Event>>,
    /// Files that events named.
    named: BTreeSet<String>,
    writers: BTreeMap<String, Sign>,
}

impl Changes {
    /// Nothing yet.
    pub const fn new(told: Receiver<notify::Result<Event>>) -> Self {
        Self { told, named: BTreeSet::new(), writers: BTreeMap::new() }
    }

    /// Whether something happened to the file: its fingerprint alone misses two writes within a tick of the clock.
    pub fn names(&self, file: &str) -> bool {
        self.named.contains(file)
    }

    /// What is known of the file's writer; `None` = nobody writes it.
    pub fn writing(&self, file: &str, now: Instant) -> Option<Writing> {
        let sign = self.writers.get(file)?;
        let quiet = now.duration_since(sign.at);
        match (sign.is_open, quiet < sign.lasts) {
            (true, _) if quiet < FRESH => Some(Writing::Busy),
            (true, true) => Some(Writing::Pausing),
            (true, false) => Some(Writing::Quiet),
            (false, true) => Some(Writing::Busy),
            (false, false) => None,
        }
    }

    /// The file was written to though no event says so: whoever did it may go on.
    pub fn changed_untold(&mut self, file: &str, now: Instant) {
        self.writers.insert(file.to_owned(), Sign { at: now, is_open: false, lasts: UNTOLD });
    }

    /// The file counts as it is; its writer is forgotten until it gives another sign.
    pub fn taken(&mut self, file: &str) {
        self.writers.remove(file);
        self.named.remove(file);
    }

    /// Waits until another look is worth it.
    pub fn wait(&mut self) {
        self.named.retain(|file| self.writers.contains_key(file));
        match self.told.recv_timeout(self.pause(Instant::now())) {
            Ok(event) => self.take_burst(event),
            Err(RecvTimeoutError::Timeout) => {}
            // The watcher lives as long as the directory that waits here, so this is out of reach; it must not spin.
            Err(RecvTimeoutError::Disconnected) => std::thread::sleep(UNTOLD),
        }
    }

    /// Until what is known of a writer changes by the time alone.
    fn pause(&self, now: Instant) -> Duration {
        let turns = self.writers.values().flat_map(|sign| [FRESH, sign.lasts].map(|after| sign.at + after));
        let next = turns.filter(|turn| *turn > now).min();
        next.map_or(UNTOLD, |turn| (turn - now).min(UNTOLD))
    }

    fn take_burst(&mut self, first: notify::Result<Event>) {
        let begin = Instant::now();
        self.take(first, begin);
        while begin.elapsed() < BURST
            && let Ok(event) = self.told.recv_timeout(PAUSE)
        {
            self.take(event, Instant::now());
        }
    }

    fn take(&mut self, event: notify::Result<Event>, now: Instant) {
        // An error or an overflow names nothing; the look that follows compares all fingerprints.
        let Ok(event) = event else { return };
        let (sign, is_over) = match event.kind {
            EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Any) => {
                (Some(Sign { at: now, is_open: true, lasts: BELIEVED }), false)
            }
            // A new file may be a link, which nobody ever closes.
            EventKind::Create(_) => (Some(Sign { at: now, is_open: false, lasts: FRESH }), false),
            // Closed by its writer, another file's name, or gone.
            EventKind::Access(_) | EventKind::Modify(ModifyKind::Name(_)) | EventKind::Remove(_) => (None, true),
            EventKind::Modify(ModifyKind::Metadata(_) | ModifyKind::Other) | EventKind::Any | EventKind::Other => {
                (None, false)
            }
        };
        for name in event.paths.iter().filter_map(|path| Path::file_name(path).and_then(OsStr::to_str)) {
            if is_over {
                self.writers.remove(name);
            }
            if let Some(sign) = sign {
                self.writers.insert(name.to_owned(), sign);
            }
            self.named.insert(name.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use notify::event::{CreateKind, DataChange, MetadataKind, RemoveKind, RenameMode};

    use super::*;

    const CREATED: EventKind = EventKind::Create(CreateKind::File);
    const WRITTEN: EventKind = EventKind::Modify(ModifyKind::Data(DataChange::Any));
    const CHMOD: EventKind = EventKind::Modify(ModifyKind::Metadata(MetadataKind::Permissions));
    const RENAMED: EventKind = EventKind::Modify(ModifyKind::Name(RenameMode::To));
    const REMOVED: EventKind = EventKind::Remove(RemoveKind::File);
    const CLOSED: EventKind = EventKind::Access(AccessKind::Close(AccessMode::Write));

    #[test]
    fn a_file_is_left_alone_while_its_writer_has_it_open() {
        use Writing::{Busy, Pausing, Quiet};
        let (now, soon, later, far) = (Duration::ZERO, FRESH, BELIEVED - FRESH, BELIEVED);
        for (id, events, after, expected) in [
            ("nothing known", &[] as &[EventKind], now, None),
            ("just made", &[CREATED], now, Some(Busy)),
            ("made and not written: a link", &[CREATED], soon, None),
            ("being written", &[CREATED, WRITTEN], now, Some(Busy)),
            ("a writer that pauses", &[WRITTEN], soon, Some(Pausing)),
            ("and pauses", &[WRITTEN], later, Some(Pausing)),
            ("and pauses for too long", &[WRITTEN], far, Some(Quiet)),
            ("closed", &[CREATED, WRITTEN, CLOSED], now, None),
            ("opened again", &[WRITTEN, CLOSED, WRITTEN], soon, Some(Pausing)),
            ("its mode changed", &[WRITTEN, CHMOD], soon, Some(Pausing)),
            ("another in its place", &[WRITTEN, RENAMED], now, None),
            ("gone", &[WRITTEN, REMOVED], now, None),
        ] {
            let mut changes = Changes::new(mpsc::channel().1);
            let begin = Instant::now();
            for kind in events {
                changes.take(Ok(Event::new(*kind).add_path("/m/a.yaml".into())), begin);
            }
            assert_eq!(changes.writing("a.yaml", begin + after), expected, "{id}");
            assert_eq!(changes.names("a.yaml"), !events.is_empty(), "{id}");
        }
    }

    #[test]
    fn it_wakes_up_when_what_it_knows_changes_by_the_time_alone() {
        let mut changes = Changes::new(mpsc::channel().1);
        let begin = Instant::now();
        assert_eq!(changes.pause(begin), UNTOLD, "nothing is known");
        changes.take(Ok(Event::new(WRITTEN).add_path("/m/a.yaml".into())), begin);
        assert_eq!(changes.pause(begin), FRESH, "then the writer pauses");
        assert_eq!(changes.pause(begin + BELIEVED - FRESH), FRESH, "then it is believed to be done");
        assert_eq!(changes.pause(begin + BELIEVED), UNTOLD, "and no spinning after that");
        changes.changed_untold("a.yaml", begin);
        assert_eq!(changes.writing("a.yaml", begin + FRESH), Some(Writing::Busy));
        assert_eq!(changes.writing("a.yaml", begin + UNTOLD), None);
    }
}
