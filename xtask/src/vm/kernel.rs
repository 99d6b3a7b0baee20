//! Kernels and their modules, from Debian's packages, kept in the cache by their version.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::{apt::Suites, initramfs::Archive, vmlinux};
use crate::root;

/// Made for virtual machines: small, quick to boot, and with everything that matters here.
const FLAVOUR: &str = "-cloud-amd64";
/// What the tests need; what they depend on comes with them.
const MODULES: [&str; 8] = ["veth", "dummy", "bridge", "sch_ingress", "cls_bpf", "tcp_diag", "udp_diag", "virtio_net"];

/// A row of `tests/kernels.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// What the command line and the table call it.
    pub name: String,
    /// Debian's suite that has it.
    suite: String,
    /// Such as 6.1; none = the newest that there is.
    series: Option<String>,
    /// What it loads beside what all of them do.
    #[serde(default)]
    modules: Vec<String>,
    /// What it runs beside what all of them do: a file of tests/tests, and what the tests' names contain.
    #[serde(default)]
    pub tests: Vec<String>,
}

/// The matrix, oldest first.
pub fn matrix() -> Result<Vec<Wanted>> {
    #[derive(Deserialize)]
    struct Matrix {
        kernel: Vec<Wanted>,
    }
    let path = root::workspace().join("tests/kernels.toml");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let matrix: Matrix = toml::from_str(&text).with_context(|| path.display().to_string())?;
    Ok(matrix.kernel)
}

/// An unpacked kernel.
pub struct Kernel {
    /// `uname -r` of it.
    pub release: String,
    folder: PathBuf,
    modules: Vec<String>,
}

impl Kernel {
    /// From the cache; downloaded when there is none, or with `update` when there is a newer one.
    pub fn get(wanted: &Wanted, update: bool) -> Result<Self> {
        let cache = root::cache()?.join("vm").join(&wanted.name);
        let kept = newest(folders(&cache));
        match kept {
            Some(release) if !update => Ok(Self::kept(wanted, &cache, release)),
            Some(_) | None => Self::download(wanted, &cache),
        }
    }

    fn kept(wanted: &Wanted, cache: &Path, release: String) -> Self {
        Self { folder: cache.join(&release), release, modules: wanted.modules.clone() }
    }

    fn download(wanted: &Wanted, cache: &Path) -> Result<Self> {
        let Wanted { name, suite, series, .. } = wanted;
        let suites = Suites::open(&[suite], &cache.join("apt"))?;
        let prefix = format!("linux-image-{}", series.as_deref().unwrap_or_default());
        let releases = suites.names(&prefix)?.into_iter().filter_map(|package| release_of(&package, series.as_deref()));
        let release = newest(releases).with_context(|| format!("{suite} has no kernel {name}"))?;
        let folder = cache.join(&release);
        if folder.exists() {
            return Ok(Self::kept(wanted, cache, release));
        }
        println!("vm: downloading kernel {release} of {suite} (20–50 MB)");
        // Since 7.0 the kernel and its modules are packages of their own; the image package depends on them.
        let parts = ["image", "binary", "modules"].map(|part| format!("linux-{part}-{release}"));
        let known = suites.names("linux-")?;
        let parts: Vec<&str> = parts.iter().map(String::as_str).filter(|p| known.iter().any(|k| k == p)).collect();
        let partial = cache.join("partial");
        if partial.exists() {
            fs::remove_dir_all(&partial)?;
        }
        fs::create_dir_all(&partial)?;
        suites.unpack(&parts, &partial)?;
        fs::rename(&partial, &folder)?; // so what is there is whole
        Ok(Self::kept(wanted, cache, release))
    }

    /// The file to boot.
    pub fn image(&self) -> Result<PathBuf> {
        let places = [format!("boot/vmlinuz-{}", self.release), format!("usr/lib/modules/{}/vmlinuz", self.release)];
        let found = places.iter().map(|place| self.folder.join(place)).find(|path| path.exists());
        let packed = found.with_context(|| format!("no vmlinuz in {}", self.folder.display()))?;
        Ok(vmlinux::beside(&packed).unwrap_or(packed)) // which starts, too, only later
    }

    /// Adds the modules that the tests need, and `/modules`, the order to load them in.
    pub fn modules(&self, archive: &mut Archive) -> Result<()> {
        let mut found = BTreeMap::new();
        for folder in ["lib/modules", "usr/lib/modules"] {
            find_modules(&self.folder.join(folder), &mut found)?;
        }
        ensure!(!found.is_empty(), "no modules in {}", self.folder.display());
        let mut order = Vec::new();
        for name in MODULES.into_iter().chain(self.modules.iter().map(String::as_str)) {
            visit(name, &found, &mut order)?;
        }
        for (path, contents) in &order {
            archive.file(path, contents);
        }
        let list: String = order.iter().map(|(path, _)| format!("/{path}\n")).collect();
        archive.file("modules", list.as_bytes());
        Ok(())
    }
}

/// `6.1.0-57-cloud-amd64` from `linux-image-6.1.0-57-cloud-amd64`, not from `…-unsigned` or another series.
fn release_of(package: &str, series: Option<&str>) -> Option<String> {
    let release = package.strip_prefix("linux-image-")?;
    let numbers = release.strip_suffix(FLAVOUR)?;
    let whole = numbers.starts_with(|c: char| c.is_ascii_digit()) && numbers.matches('.').count() >= 2;
    let rest = numbers.strip_prefix(series.unwrap_or_default())?;
    (whole && (series.is_none() || rest.starts_with('.'))).then(|| release.to_owned())
}

/// By the numbers in it, as versions are compared.
fn newest(releases: impl IntoIterator<Item = String>) -> Option<String> {
    releases.into_iter().filter(|r| r.ends_with(FLAVOUR)).max_by_key(|release| {
        let numbers = release.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
        numbers.collect::<Vec<u32>>()
    })
}

fn folders(path: &Path) -> impl Iterator<Item = String> {
    fs::read_dir(path).into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok())
}

/// Every module below a folder, by its name: the file's, without dashes.
fn find_modules(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry?.path();
        if path.is_dir() {
            find_modules(&path, found)?;
        } else if let Some((name, _)) = path.file_name().and_then(|name| name.to_str()?.split_once(".ko")) {
            found.insert(name.replace('-', "_"), path);
        }
    }
    Ok(())
}

/// Appends a module behind everything it depends on. One without a file is part of the kernel.
fn visit(name: &str, found: &BTreeMap<String, PathBuf>, order: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    let path = format!("modules.d/{name}.ko");
    let Some(file) = found.get(name) else { return Ok(()) };
    if order.iter().any(|(known, _)| *known == path) {
        return Ok(());
    }
    let contents = decompressed(file)?;
    for dependency in depends(&contents) {
        visit(&dependency.replace('-', "_"), found, order)?;
    }
    order.push((path, contents));
    Ok(())
}

fn decompressed(file: &Path) -> Result<Vec<u8>> {
    if file.extension().is_none_or(|extension| extension != "xz") {
        return fs::read(file).with_context(|| file.display().to_string());
    }
    let output = Command::new("xz").args(["--decompress", "--stdout"]).arg(file).output().context("xz")?;
    ensure!(output.status.success(), "cannot decompress {}", file.display());
    Ok(output.stdout)
}

/// What modinfo says: a string `depends=a,b` in the file.
fn depends(module: &[u8]) -> Vec<&str> {
    let strings = module.split(|byte| *byte == 0);
    let found = strings.filter_map(|s| std::str::from_utf8(s.strip_prefix(b"depends=")?).ok()).next();
    found.unwrap_or_default().split(',').filter(|name| !name.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::{depends, matrix, newest, release_of};

    #[test]
    fn releases_are_told_from_other_packages() {
        for (package, series, expected) in [
            ("linux-image-6.1.0-57-cloud-amd64", Some("6.1"), Some("6.1.0-57-cloud-amd64")),
            ("linux-image-6.12.118+deb13-cloud-amd64", Some("6.12"), Some("6.12.118+deb13-cloud-amd64")),
            ("linux-image-7.3.4+deb13-cloud-amd64", None, Some("7.3.4+deb13-cloud-amd64")),
            ("linux-image-6.12.118+deb13-cloud-amd64", Some("6.1"), None),
            ("linux-image-6.1.0-57-amd64", Some("6.1"), None),
            ("linux-image-6.1.0-57-cloud-amd64-unsigned", Some("6.1"), None),
            ("linux-image-6.12-cloud-amd64", None, None),
            ("linux-image-cloud-amd64", None, None),
        ] {
            assert_eq!(release_of(package, series).as_deref(), expected, "{package}, {series:?}");
        }
    }

    #[test]
    fn the_newest_is_found_by_numbers() {
        let names = ["6.12.9+deb13-cloud-amd64", "6.12.118+deb13-cloud-amd64", "6.9.1-cloud-amd64", "apt"];
        assert_eq!(newest(names.map(str::to_owned)).as_deref(), Some(names[1]));
    }

    #[test]
    fn dependencies_are_read_from_the_module() {
        assert_eq!(depends(b"\x7fELF\0name=bridge\0depends=stp,llc\0"), ["stp", "llc"]);
        assert_eq!(depends(b"\x7fELF\0depends=\0name=llc\0"), [""; 0]);
    }

    #[test]
    fn the_matrix_names_every_kernel_once() {
        let mut names: Vec<String> = matrix().unwrap().into_iter().map(|kernel| kernel.name).collect();
        let count = names.len();
        names.sort();
        names.dedup();
        assert!(count >= 5 && names.len() == count, "{names:?}");
    }
}
