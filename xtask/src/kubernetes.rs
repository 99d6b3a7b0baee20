//! Programs of a real Kubernetes, built once from their Go modules into the cache: no download site, no registry of
//! images and no container engine is needed, only Go and its module proxy.

use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};

use crate::root;

/// The release that is tested against, and the one of its libraries, which count from 0.
const RELEASE: &str = "v1.36.3";
const LIBRARIES: &str = "v0.36.3";
/// The Go that this release asks for.
const GO: (u32, u32) = (1, 26);

/// Files that are built with agnhost.
pub const CERTIFICATE: [&str; 2] = ["localhost.crt", "localhost.key"];

/// What tests of the API need.
pub const API: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

/// What tests of a migration need.
pub const TAKEOVER: [&str; 3] = ["etcd", "kube-apiserver", "kube-proxy"];

/// The tests that a cluster is tested with, and what runs them several at a time.
pub const E2E: [&str; 2] = ["ginkgo", "e2e.test"];

/// Something that can be built.
struct Program {
    name: &'static str,
    package: &'static str,
    /// Of its module; `None` = the one that Kubernetes itself asks for.
    version: Option<&'static str>,
    /// What a build takes on two cores with nothing in Go's caches.
    time: &'static str,
}

/// Where most of the programs are.
const KUBERNETES: &str = "k8s.io/kubernetes/";

const fn program(name: &'static str, package: &'static str, version: &'static str, time: &'static str) -> Program {
    Program { name, package, version: Some(version), time }
}

/// The long one with the most dependencies first: the others then find them built.
const PROGRAMS: [Program; 13] = [
    program("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", RELEASE, "4–6 min"),
    program("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", RELEASE, "1–4 min"),
    program("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", RELEASE, "1–4 min"),
    program("kubelet", "k8s.io/kubernetes/cmd/kubelet", RELEASE, "1–4 min"),
    program("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", RELEASE, "1–4 min"),
    program("kubectl", "k8s.io/kubernetes/cmd/kubectl", RELEASE, "1–2 min"),
    program("agnhost", "k8s.io/kubernetes/test/images/agnhost", RELEASE, "2–3 min"),
    program("regression-issue-74839", "k8s.io/kubernetes/test/images/regression-issue-74839", RELEASE, "seconds"),
    program("e2e.test", "k8s.io/kubernetes/test/e2e", RELEASE, "8–12 min"),
    Program { name: "ginkgo", package: "github.com/onsi/ginkgo/v2/ginkgo", version: None, time: "seconds" },
    program("etcd", "go.etcd.io/etcd/server/v3", "v3.6.13", "1–2 min"),
    program("coredns", "github.com/coredns/coredns", "v1.15.0", "4–6 min"),
    program("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0", "3–4 min"),
];

impl Program {
    /// Tests are built otherwise than programs.
    fn is_test(&self) -> bool {
        self.name.ends_with(".test")
    }

    /// Kubernetes' programs share a module; every other has its own, so that none drags another's versions along.
    fn module(&self) -> &str {
        if self.package.starts_with(KUBERNETES) || self.version.is_none() { "kubernetes" } else { self.name }
    }
}

/// Where what was built is kept.
///
/// # Errors
/// When nothing says where caches are.
pub fn folder() -> Result<PathBuf> {
    Ok(root::cache()?.join(format!("kubernetes-{RELEASE}")))
}

/// The folder that holds `names`, after building what is missing. A stopped build goes on where it was, thanks to
/// Go's own caches; two at once wait for each other.
///
/// # Errors
/// When Go is missing or too old, or a build fails: what needs the programs is then skipped.
pub fn programs(names: &[&str]) -> Result<PathBuf> {
    let folder = folder()?;
    if is_complete(&folder, names) {
        return Ok(folder);
    }
    check_go()?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for name in names {
        // For one at a time: who needs two programs does not wait until somebody else has built ten.
        let _lock = lock(&folder.join("lock"))?;
        if !folder.join(name).exists() {
            build(&folder, name).with_context(|| format!("{name} cannot be built from its Go module"))?;
        }
    }
    Ok(folder)
}

fn is_complete(folder: &Path, names: &[&str]) -> bool {
    names.iter().all(|name| folder.join(name).exists())
}

fn check_go() -> Result<()> {
    let (major, minor) = GO;
    let said = root::output("go", &["env", "GOVERSION"]).unwrap_or_default();
    if go_version(&said).is_none_or(|found| found < GO) {
        let found = if said.is_empty() { "none".to_owned() } else { said };
        bail!("Kubernetes {RELEASE} is built with Go {major}.{minor} or newer (https://go.dev/dl); found: {found}");
    }
    Ok(())
}

/// From `go1.26.8`; nothing from development versions.
fn go_version(said: &str) -> Option<(u32, u32)> {
    let (major, rest) = said.strip_prefix("go")?.split_once('.')?;
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// Held until dropped; the kernel lets go of it when the process dies.
fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot make {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            println!("kubernetes: waiting for another build into {}", path.display());
            file.lock()?;
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    Ok(file)
}

fn build(folder: &Path, name: &str) -> Result<()> {
    let Some(program) = PROGRAMS.iter().find(|program| program.name == name) else {
        let known: Vec<&str> = PROGRAMS.iter().map(|program| program.name).collect();
        bail!("there is no such program; known are {}", known.join(", "));
    };
    println!("kubernetes: building {name}, once ({} on two cores)", program.time);
    let start = Instant::now();
    let module = module(folder, program)?;
    let partial = folder.join(format!("{name}.partial"));
    let how: &[&str] =
        if program.is_test() { &["test", "-c", "-vet=off"] } else { &["build", "-tags", "selinux,notest,grpcnotrace"] };
    let mut command = go(&module, how);
    root::run(command.args(["-ldflags", &stamp(), "-o"]).arg(&partial).arg(program.package))?;
    if name == "agnhost" {
        certificate(folder, &module)?;
    }
    fs::rename(&partial, folder.join(name))?;
    println!("kubernetes: {name} is built, after {} s", start.elapsed().as_secs());
    Ok(())
}

/// A Go module that depends on the program, so that every version is pinned by it.
fn module(folder: &Path, program: &Program) -> Result<PathBuf> {
    let name = program.module();
    let module = folder.join("src").join(name);
    fs::create_dir_all(&module)?;
    if !module.join("go.mod").exists() {
        let (major, minor) = GO;
        let mut text = format!("module sheave/tools\n\ngo {major}.{minor}.0\n");
        if name == "kubernetes" {
            text += &replacements(&module)?;
        }
        // Complete or not there at all.
        fs::write(module.join("go.mod.partial"), text)?;
        fs::rename(module.join("go.mod.partial"), module.join("go.mod"))?;
    }
    let package = program.package;
    match program.version {
        Some(version) => {
            let way = if program.is_test() { "-t" } else { "-tool" };
            root::run(&mut go(&module, &["get", way, &format!("{package}@{version}")]))?;
        }
        None => {
            root::run(&mut go(&module, &["get", &format!("{KUBERNETES}test/e2e/framework@{RELEASE}")]))?;
            let path = package.strip_suffix("/ginkgo").unwrap_or(package);
            let version = said(&mut go(&module, &["list", "-m", "-f", "{{.Version}}", path]))?;
            root::run(&mut go(&module, &["get", "-tool", &format!("{package}@{version}")]))?;
        }
    }
    Ok(module)
}

/// agnhost serves TLS with a certificate that lies in its sources, and in its image.
fn certificate(folder: &Path, module: &Path) -> Result<()> {
    let sources = said(&mut go(module, &["list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes"]))?;
    for file in CERTIFICATE {
        let from = Path::new(&sources).join("test/images/agnhost/porter").join(file);
        let content = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        fs::write(folder.join(file), content)?; // not copied: files of a module are read-only
    }
    Ok(())
}

/// What a command prints.
fn said(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot start go")?;
    ensure!(output.status.success(), "{command:?} failed: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Kubernetes' module takes its libraries from folders beside it, as version v0.0.0. From outside of its source tree
/// they are the published ones of the same release.
fn replacements(module: &Path) -> Result<String> {
    let said = said(&mut go(module, &["mod", "download", "-json", &format!("k8s.io/kubernetes@{RELEASE}")]))?;
    let path = go_mod_path(&said).with_context(|| format!("`go mod download` of Kubernetes said: {said}"))?;
    let go_mod = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    Ok(replace_lines(&go_mod))
}

fn go_mod_path(json: &str) -> Option<&str> {
    json.lines().find_map(|line| line.trim().strip_prefix("\"GoMod\": \"")?.strip_suffix("\","))
}

fn replace_lines(go_mod: &str) -> String {
    let library = |line: &str| {
        let name = line.trim().strip_suffix(" v0.0.0")?.to_owned();
        name.starts_with("k8s.io/").then(|| format!("replace {name} => {name} {LIBRARIES}\n"))
    };
    go_mod.lines().filter_map(library).collect()
}

/// The programs ask their own version for which features to offer.
fn stamp() -> String {
    let mut numbers = RELEASE.trim_start_matches('v').split('.');
    let mut next = || numbers.next().unwrap_or_default();
    let (major, minor) = (next(), next());
    let set = |field: &str, value: &str| format!(" -X k8s.io/component-base/version.{field}={value}");
    format!("-s -w{}{}{}", set("gitVersion", RELEASE), set("gitMajor", major), set("gitMinor", minor))
}

fn go(module: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("go");
    command.args(args).current_dir(module);
    // A program that needs no library of the host, and no module of a workspace around the cache.
    command.env("CGO_ENABLED", "0").env("GOFLAGS", "-trimpath").env("GOWORK", "off");
    command
}

#[cfg(test)]
mod tests {
    use super::{go_mod_path, go_version, is_complete, replace_lines};

    #[test]
    fn go_says_its_version() {
        for (said, expected) in [
            ("go1.26.8", Some((1, 26))),
            ("go1.27rc1", Some((1, 27))),
            ("go2.0", Some((2, 0))),
            ("devel +4f7cb2b", None),
            ("", None),
        ] {
            assert_eq!(go_version(said), expected, "{said}");
        }
    }

    #[test]
    fn libraries_of_kubernetes_are_taken_from_their_release() {
        let go_mod = "require (\n\tk8s.io/api v0.0.0\n\tk8s.io/klog/v2 v2.140.0\n\tk8s.io/kubelet v0.0.0\n)\n";
        let expected = "replace k8s.io/api => k8s.io/api v0.36.3\nreplace k8s.io/kubelet => k8s.io/kubelet v0.36.3\n";
        assert_eq!(replace_lines(go_mod), expected);
    }

    #[test]
    fn go_says_where_a_module_is() {
        let json = "{\n\t\"Path\": \"k8s.io/kubernetes\",\n\t\"GoMod\": \"/m/v1.36.3.mod\",\n\t\"Dir\": \"/m\"\n}\n";
        assert_eq!(go_mod_path(json), Some("/m/v1.36.3.mod"));
        assert_eq!(go_mod_path("{}"), None);
    }

    #[test]
    fn what_is_there_is_not_built_again() {
        let folder = std::env::temp_dir();
        assert!(is_complete(&folder, &[]));
        assert!(!is_complete(&folder, &["no-such-program"]));
    }
}
