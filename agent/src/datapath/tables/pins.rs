//! Where things are pinned: pure paths. bpffs refuses names with a dot.

use std::path::{Path, PathBuf};

use sheave_ebpf::ABI_VERSION;

/// `<bpffs>/sheave/v<ABI>/{maps,links}/…`
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pins {
    /// `<bpffs>/sheave`: all versions.
    pub base: PathBuf,
    /// `<bpffs>/sheave/v<ABI>`: this version.
    pub root: PathBuf,
}

impl Pins {
    /// Below a mounted bpffs.
    #[must_use]
    pub fn below(bpffs: &Path) -> Self {
        let base = bpffs.join("sheave");
        Self { root: base.clone(), base }.of_version(ABI_VERSION)
    }

    /// Those of another version.
    #[must_use]
    pub fn of_version(&self, number: u32) -> Self {
        Self { base: self.base.clone(), root: self.base.join(format!("v{number}")) }
    }

    /// Where this version's are made when they must appear all at once.
    #[must_use]
    pub fn next(&self) -> Self {
        Self { base: self.base.clone(), root: self.base.join("next") }
    }

    /// Directory of the maps.
    #[must_use]
    pub fn maps(&self) -> PathBuf {
        self.root.join("maps")
    }

    /// Pin of a map: its name in lower case.
    #[must_use]
    pub fn map(&self, name: &str) -> PathBuf {
        self.maps().join(name.to_lowercase())
    }

    /// Directory of the links.
    #[must_use]
    pub fn links(&self) -> PathBuf {
        self.root.join("links")
    }

    /// Pin of the link of a cgroup program.
    #[must_use]
    pub fn link(&self, program: &str) -> PathBuf {
        self.links().join(program)
    }

    /// Pin of a device's link; `direction` is `in` or `out`.
    #[must_use]
    pub fn device_link(&self, index: u32, direction: &str) -> PathBuf {
        self.links().join(format!("tc_{index}_{direction}"))
    }

    /// The device that a pin of that name belongs to.
    #[must_use]
    pub fn device_of(name: &str) -> Option<u32> {
        name.strip_prefix("tc_")?.split_once('_')?.0.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::Pins;
    use std::path::Path;

    #[test]
    fn no_pin_has_a_dot() {
        let pins = Pins::below(Path::new("/sys/fs/bpf"));
        for path in [pins.map("FRONTENDS"), pins.link("connect4"), pins.device_link(7, "in")] {
            assert!(!path.to_string_lossy().contains('.'), "{path:?}");
        }
        assert_eq!(Pins::device_of("tc_17_out"), Some(17));
        assert_eq!(Pins::device_of("connect4"), None);
        assert_eq!(pins.map("SOURCE_RANGES"), Path::new("/sys/fs/bpf/sheave/v2/maps/source_ranges"));
    }
}
