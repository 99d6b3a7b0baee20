//! The file system that a machine starts with: a cpio archive in the kernel's "newc" format, written here because the
//! format is simpler than depending on the program.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::root;

const FILE: u32 = 0o100_755;
const FOLDER: u32 = 0o040_755;

/// An archive that grows. Archives may be put behind one another: the kernel unpacks all of them.
#[derive(Clone, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: BTreeSet<String>,
}

impl Archive {
    /// A file with its folders; the path begins without a slash.
    pub fn file(&mut self, path: &str, contents: &[u8]) {
        for (end, _) in path.match_indices('/') {
            let folder = &path[..end];
            if self.folders.insert(folder.to_owned()) {
                self.entry(folder, FOLDER, &[]);
            }
        }
        self.entry(path, FILE, contents);
    }

    /// A program of this host, and the shared libraries it is linked to, each where the program looks for it.
    pub fn program(&mut self, path: &str, from: &Path) -> Result<()> {
        let stripped = root::target().join("vm/stripped");
        let strip = Command::new("strip").arg("-o").arg(&stripped).arg(from).status();
        let smaller = strip.is_ok_and(|status| status.success()); // else it is large, and works as well
        let read = if smaller { &stripped } else { from };
        self.file(path, &fs::read(read).with_context(|| read.display().to_string())?);
        let from = from.to_string_lossy();
        let linked = root::output("ldd", &[&from]).with_context(|| format!("`ldd {from}` fails"))?;
        for library in linked.split_whitespace().filter(|word| word.starts_with('/')) {
            let path = library.trim_start_matches('/');
            if self.folders.insert(path.to_owned()) {
                self.file(path, &fs::read(library).with_context(|| library.to_owned())?);
            }
        }
        Ok(())
    }

    /// The archive, closed and padded.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) {
        self.entries += 1;
        let length = |bytes: usize| u32::try_from(bytes).expect("no file of 4 GiB goes into an initramfs");
        let (name, size) = (length(path.len() + 1), length(contents.len()));
        // inode, mode, uid, gid, links, mtime, size, device (2), special device (2), name with its NUL, checksum
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name, 0];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::Archive;

    #[test]
    fn folders_come_before_their_files_and_only_once() {
        let mut archive = Archive::default();
        archive.file("a/b/one", b"1");
        archive.file("a/b/two", b"22222");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        let (mut rest, mut found) = (bytes.as_slice(), Vec::new());
        while let Some(entry) = rest.strip_prefix(b"070701") {
            let field = |n: usize| {
                let digits = std::str::from_utf8(&entry[n * 8..][..8]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (size, name) = (field(6), field(11));
            let path = std::str::from_utf8(&entry[104..][..name - 1]).unwrap();
            let data = (110 + name).next_multiple_of(4);
            found.push((path, rest[data..][..size].to_vec()));
            rest = &rest[(data + size).next_multiple_of(4)..];
        }
        let expected: [(&str, &[u8]); 5] =
            [("a", b""), ("a/b", b""), ("a/b/one", b"1"), ("a/b/two", b"22222"), ("TRAILER!!!", b"")];
        assert_eq!(found, expected.map(|(path, data)| (path, data.to_vec())));
        assert!(rest.is_empty());
    }
}
