//! A directory of manifests, read and then watched: `*.yaml`, `*.yml` and `*.json`.
//!
//! A file counts once its writer is done with it: renamed into place, closed, or quiet for half a minute; until then
//! what it said before counts. An empty file counts only when it is closed. A ConfigMap volume works too: there the
//! files are symbolic links through `..data`, which is renamed. Where the filesystem tells no events, as across a
//! network or behind a link to elsewhere, a file counts when it has not changed for five seconds.

mod changes;
mod claims;
mod read;
mod text;

use std::{
    collections::BTreeMap,
    fs,
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{MetadataExt, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Instant, SystemTime},
};

use anyhow::Context;
use notify::{RecommendedWatcher, RecursiveMode, Watcher};

use self::{
    changes::{Changes, Writing},
    claims::{Claims, Touched},
};
use super::{
    Sender, SourceState,
    convert::ConvertOptions,
    decode::{Key, Kind, Object},
    report::Report,
};

/// Reads the directory and watches it, in a thread of its own: to read 100,000 endpoints takes a while.
///
/// # Errors
/// When the directory is not there or cannot be watched.
pub fn start(directory: &Path, options: ConvertOptions, events: Sender) -> anyhow::Result<()> {
    let (tell, told) = mpsc::channel();
    let tell = move |event| {
        if changes::matters(&event) {
            let _ = tell.send(event); // nobody listens any more once the agent ends
        }
    };
    let watcher =
        notify::recommended_watcher(tell).context("cannot watch files; is fs.inotify.max_user_instances used up?")?;
    let mut directory = Directory {
        path: directory.to_owned(),
        watcher,
        watched: None,
        files: BTreeMap::new(),
        growing: BTreeMap::new(),
        claims: Claims::new(options),
        report: Report::new(events),
        has_listed: false,
    };
    directory.watch().with_context(|| format!("cannot read manifests from {}", directory.path.display()))?;
    thread::Builder::new()
        .stack_size(STACK)
        .name("manifests".to_owned())
        .spawn(move || directory.run(Changes::new(told)))
        .context("cannot start a thread to read manifests")?;
    Ok(())
}

struct Directory {
    path: PathBuf,
    watcher: RecommendedWatcher,
    /// Device and inode of the directory that is watched: another may come to bear its name.
    watched: Option<(u64, u64)>,
    /// How each file was when it was read last.
    files: BTreeMap<String, Fingerprint>,
    /// How files that change without events were at the last look.
    growing: BTreeMap<String, Fingerprint>,
    claims: Claims,
    report: Report,
    has_listed: bool,
}

impl Directory {
    fn run(mut self, mut changes: Changes) {
        while !self.report.is_closed() {
            self.scan(&mut changes);
            changes.wait();
        }
    }

    /// Sees to it that the directory which bears the name now is the one that is watched.
    fn watch(&mut self) -> anyhow::Result<()> {
        let metadata = fs::metadata(&self.path)?;
        anyhow::ensure!(metadata.is_dir(), "it is not a directory");
        let identity = (metadata.dev(), metadata.ino());
        if self.watched != Some(identity) {
            let _ = self.watcher.unwatch(&self.path); // there may be nothing to unwatch
            self.watched = None;
            self.watcher.watch(&self.path, RecursiveMode::NonRecursive)?;
            self.watched = Some(identity);
        }
        Ok(())
    }

    fn scan(&mut self, changes: &mut Changes) {
        let found = match self.watch().and_then(|()| Ok(find(&self.path)?)) {
            Ok(found) => found,
            Err(error) => return self.is_away(&error),
        };
        let gone: Vec<String> = self.files.keys().filter(|name| !found.contains_key(*name)).cloned().collect();
        let mut touched = Vec::new();
        for name in gone {
            self.files.remove(&name);
            self.growing.remove(&name);
            self.report.object(&manifest(&name), &[]);
            touched.extend(self.claims.remove(&name));
        }
        let now = Instant::now();
        for (name, fingerprint) in found {
            let known = self.files.get(&name);
            if known == Some(&fingerprint) && !changes.names(&name) {
                continue;
            }
            if known.is_some_and(|known| known.is_same_file(&fingerprint)) && !changes.names(&name) {
                // Not read now, and so again unlike what it was read as: each look asks whether it still changes.
                if self.growing.insert(name.clone(), fingerprint) != Some(fingerprint) {
                    changes.changed_untold(&name, now);
                }
            }
            match changes.writing(&name, now) {
                Some(Writing::Busy) => continue,
                Some(Writing::Pausing) => {
                    self.wait_for_writer(&name);
                    continue;
                }
                Some(Writing::Quiet) if fingerprint.size == 0 => continue,
                Some(Writing::Quiet) | None => {}
            }
            changes.taken(&name);
            self.growing.remove(&name);
            touched.extend(self.read(&name));
            self.files.insert(name, fingerprint);
        }
        self.tell(touched);
        self.state(Vec::new());
    }

    fn wait_for_writer(&mut self, name: &str) {
        let object = manifest(name);
        self.report.object(
            &object,
            &[format!("{object} is open for writing, so its previous content counts until it is closed.")],
        );
    }

    fn read(&mut self, name: &str) -> Vec<Touched> {
        let text = match read_text(&self.path.join(name)) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Vec::new(), // it just went: the next scan sees it
            Err(error) => return self.keep(name, &error),
        };
        match self.claims.read(name, &text) {
            Ok(touched) => {
                let notes = self.claims.notes(name);
                let problem = format!("{} is only partly used: {}", manifest(name), notes.join(" "));
                self.report
                    .object(&manifest(name), if notes.is_empty() { &[] } else { std::slice::from_ref(&problem) });
                touched
            }
            Err(error) => self.keep(name, &error),
        }
    }

    /// Keeps what a file said, since what it says now cannot be read.
    fn keep(&mut self, name: &str, error: &dyn std::fmt::Display) -> Vec<Touched> {
        let object = manifest(name);
        self.report
            .object(&object, &[format!("{object} cannot be read, so its previous content still counts: {error}.")]);
        Vec::new()
    }

    fn tell(&mut self, touched: Vec<Touched>) {
        let has_listed = std::mem::replace(&mut self.has_listed, true);
        if !has_listed {
            let mut lists = self.claims.lists();
            Kind::ALL.into_iter().for_each(|kind| self.report.update(lists.complete(kind)));
        }
        let mut keys: BTreeMap<Key, bool> = BTreeMap::new();
        for Touched { key, changed } in touched {
            *keys.entry(key).or_default() |= changed;
        }
        for (key, changed) in keys {
            self.report.object(&key.to_string(), &self.claims.problems(&key));
            if changed && has_listed {
                let object = self.claims.get(&key).cloned();
                self.report.update(object.map_or_else(|| key.gone(), Object::update));
            }
        }
    }

    fn is_away(&mut self, error: &anyhow::Error) {
        self.watched = None;
        self.state(vec![format!("{} cannot be read, so its last content still counts: {error}.", self.path.display())]);
    }

    fn state(&mut self, problems: Vec<String>) {
        self.report.state(SourceState { source: format!("manifests {}", self.path.display()), problems });
    }
}

fn manifest(name: &str) -> String {
    format!("manifest {name}")
}

/// What tells, nearly always, that a file is another or was written to.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Fingerprint {
    device: u64,
    inode: u64,
    size: u64,
    written: Option<SystemTime>,
    changed: (i64, i64),
}

impl Fingerprint {
    /// Only its contents may be other ones: written in place, not put in its place.
    const fn is_same_file(&self, other: &Self) -> bool {
        self.device == other.device && self.inode == other.inode
    }
}

/// 100,000 endpoints are some 50 MB.
const LARGEST: u64 = 1 << 30;

/// Reads a file without ever waiting: not for the other end of a pipe, nor for news from a device or from proc.
fn read_text(path: &Path) -> io::Result<String> {
    let refuse = |why: &str| Err(io::Error::new(ErrorKind::InvalidInput, why));
    // Before it is opened, which alone has effects on some devices.
    let metadata = fs::metadata(path)?;
    if !metadata.is_file() {
        return refuse("it is not a regular file");
    }
    if metadata.len() > LARGEST {
        return refuse("it is larger than 1 GiB");
    }
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return refuse("it is not a regular file");
    }
    let mut text = String::new(); // files of proc say that they are empty
    if file.take(LARGEST + 1).read_to_string(&mut text)? as u64 > LARGEST {
        return refuse("it is larger than 1 GiB");
    }
    Ok(text)
}

/// Documents are read recursively, and aliases nest them deeper than their text shows. Address space only: pages count
/// when they are touched.
const STACK: usize = 512 << 20;

/// The manifest files of a directory. Names that begin with a dot are not for us: editors and ConfigMap volumes use
/// them while they work.
fn find(directory: &Path) -> io::Result<BTreeMap<String, Fingerprint>> {
    let mut found = BTreeMap::new();
    let identity = || fs::metadata(directory).map(|d| (d.dev(), d.ino()));
    let before = identity()?;
    for entry in fs::read_dir(directory)? {
        let Ok(name) = entry?.file_name().into_string() else { continue };
        let is_manifest = [".yaml", ".yml", ".json"].iter().any(|end| name.ends_with(end));
        if !is_manifest || name.starts_with('.') {
            continue;
        }
        let Ok(metadata) = fs::metadata(directory.join(&name)) else { continue }; // gone, or a link to nowhere
        found.insert(
            name,
            Fingerprint {
                device: metadata.dev(),
                inode: metadata.ino(),
                size: metadata.size(),
                written: metadata.modified().ok(),
                changed: (metadata.ctime(), metadata.ctime_nsec()),
            },
        );
    }
    // Renamed away meanwhile, its files seem to be gone: that is no deletion.
    if identity()? == before { Ok(found) } else { Err(ErrorKind::NotFound.into()) }
}
