//! Packages of any Debian suite, downloaded and unpacked into a folder. Nothing is installed on this host: apt works
//! with lists of its own, from the mirrors that this host already uses.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::root;

/// Signs all of Debian's suites.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// apt's view of some suites.
pub struct Suites {
    /// Options that make every apt program look there.
    options: Vec<String>,
    /// Where packages are downloaded to.
    archives: PathBuf,
}

impl Suites {
    /// Fetches the lists of those suites. `work` is a folder for them, kept for the next time.
    pub fn open(names: &[&str], work: &Path) -> Result<Self> {
        ensure!(Path::new("/usr/bin/apt-get").exists(), "no apt-get here");
        ensure!(Path::new(KEYRING).exists(), "{KEYRING} is missing (package debian-archive-keyring)");
        let archives = work.join("archives");
        fs::create_dir_all(archives.join("partial"))?;
        fs::create_dir_all(work.join("lists/partial"))?;
        let mirrors = mirrors()?;
        let lines = names.iter().map(|name| {
            let mirror = mirrors.of(name);
            format!("deb [signed-by={KEYRING}] {mirror} {name} main\n")
        });
        let sources = work.join("sources.list");
        fs::write(&sources, lines.collect::<String>())?;
        let options = [
            format!("Dir::Etc::SourceList={}", sources.display()),
            "Dir::Etc::SourceParts=/dev/null".into(),
            format!("Dir::State::Lists={}", work.join("lists").display()),
            format!("Dir::Cache::Archives={}", archives.display()),
            "Dir::Cache::PkgCache=".into(),
            "Dir::Cache::SrcPkgCache=".into(),
            "APT::Sandbox::User=".into(), // the cache may lie where apt's own user cannot look
            "Acquire::Languages=none".into(),
            "Debug::NoLocking=1".into(), // another apt may run: nothing of it is touched
        ];
        let options = options.into_iter().flat_map(|option| ["-o".into(), option]).collect();
        let suites = Self { options, archives };
        root::run(&mut suites.apt("apt-get", &["-qq", "update"])).context("cannot fetch lists of packages")?;
        Ok(suites)
    }

    /// Names of packages with that prefix.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let output = self.apt("apt-cache", &["pkgnames", prefix]).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
    }

    /// Unpacks packages, without what they depend on.
    pub fn unpack(&self, packages: &[&str], into: &Path) -> Result<()> {
        let mut apt = self.apt("apt-get", &["-qq", "download"]);
        root::run(apt.args(packages).current_dir(&self.archives))?;
        self.unpack_archives(into)
    }

    /// Unpacks a package of a suite with everything it depends on and this host lacks.
    pub fn unpack_all(&self, package: &str, suite: &str, into: &Path) -> Result<()> {
        let words =
            ["-qq", "--yes", "--download-only", "--no-install-recommends", "--target-release", suite, "install"];
        root::run(self.apt("apt-get", &words).arg(package))?;
        self.unpack_archives(into)
    }

    fn unpack_archives(&self, into: &Path) -> Result<()> {
        for entry in fs::read_dir(&self.archives)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "deb") {
                root::run(Command::new("dpkg-deb").arg("--extract").arg(&path).arg(into))?;
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    fn apt(&self, program: &str, words: &[&str]) -> Command {
        let mut command = root::command(program, words);
        command.args(&self.options);
        command
    }
}

/// Debian's archives, as this host reaches them.
struct Mirrors {
    main: String,
    security: String,
}

impl Mirrors {
    fn of(&self, suite: &str) -> &str {
        if suite.ends_with("-security") { &self.security } else { &self.main }
    }
}

fn mirrors() -> Result<Mirrors> {
    let said = root::output("apt-get", &["indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"])
        .unwrap_or_default();
    let of = |label: &str| {
        let uri = said.lines().find_map(|line| line.strip_prefix(label)?.strip_prefix(' '));
        uri.map(str::to_owned).with_context(|| format!("this host's apt knows no mirror of {label}"))
    };
    Ok(Mirrors { main: of("Debian")?, security: of("Debian-Security")? })
}

/// A search path for shared libraries of unpacked packages, in front of what the environment has.
pub fn library_path(root: &Path) -> Result<std::ffi::OsString> {
    let own = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"].map(|folder| root.join(folder));
    let given = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let given = env::split_paths(&given).filter(|path| !path.as_os_str().is_empty());
    match env::join_paths(own.into_iter().chain(given)) {
        Ok(path) => Ok(path),
        Err(error) => bail!("the cache folder cannot stand in a search path: {error}"),
    }
}
