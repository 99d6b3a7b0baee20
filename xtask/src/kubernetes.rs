//! Programs of a real Kubernetes, built once from their Go modules into the cache: no download site, no registry of
//! images and no container engine is needed, only Go and its module proxy.

use std::{
    fs::{self, File, TryLockError},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail};

use crate::root;

/// The release that is tested against, and the one of its libraries, which count from 0.
const RELEASE: &str = "v1.36.3";
const LIBRARIES: &str = "v0.36.3";
/// The Go that this release asks for.
const GO: (u32, u32) = (1, 26);

/// What tests of the API need.
pub const API: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

/// What can be built: name, package, version, and how long that takes on two cores with nothing in Go's caches.
const PROGRAMS: [(&str, &str, &str, &str); 8] = [
    ("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", RELEASE, "4–6 min"),
    ("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", RELEASE, "1–4 min"),
    ("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler", RELEASE, "1–4 min"),
    ("kubelet", "k8s.io/kubernetes/cmd/kubelet", RELEASE, "1–4 min"),
    ("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy", RELEASE, "1–4 min"),
    ("kubectl", "k8s.io/kubernetes/cmd/kubectl", RELEASE, "1–2 min"),
    ("etcd", "go.etcd.io/etcd/server/v3", "v3.6.13", "1–2 min"),
    ("helm", "helm.sh/helm/v3/cmd/helm", "v3.22.0", "3–4 min"),
];

/// The folder that holds `names`, after building what is missing. A stopped build goes on where it was, thanks to
/// Go's own caches; two at once wait for each other.
///
/// # Errors
/// When Go is missing or too old, or a build fails: what needs the programs is then skipped.
pub fn programs(names: &[&str]) -> Result<PathBuf> {
    let folder = root::cache()?.join(format!("kubernetes-{RELEASE}"));
    if is_complete(&folder, names) {
        return Ok(folder);
    }
    check_go()?;
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let _lock = lock(&folder.join("lock"))?;
    for name in names.iter().filter(|name| !folder.join(name).exists()) {
        build(&folder, name).with_context(|| format!("{name} cannot be built from its Go module"))?;
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
    let Some((_, package, version, time)) = PROGRAMS.iter().find(|program| program.0 == name) else {
        let known: Vec<&str> = PROGRAMS.iter().map(|program| program.0).collect();
        bail!("there is no such program; known are {}", known.join(", "));
    };
    println!("kubernetes: building {name} {version}, once ({time} on two cores)");
    let start = Instant::now();
    let module = module(folder, name, package, version)?;
    let partial = folder.join(format!("{name}.partial"));
    let mut command = go(&module, &["build", "-tags", "selinux,notest,grpcnotrace", "-ldflags", &stamp(), "-o"]);
    root::run(command.arg(&partial).arg(package))?;
    fs::rename(&partial, folder.join(name))?;
    println!("kubernetes: {name} is built, after {} s", start.elapsed().as_secs());
    Ok(())
}

/// A Go module that depends on the program, so that every version is pinned by it. Kubernetes' programs share one.
fn module(folder: &Path, name: &str, package: &str, version: &str) -> Result<PathBuf> {
    let is_kubernetes = package.starts_with("k8s.io/kubernetes/");
    let module = folder.join("src").join(if is_kubernetes { "kubernetes" } else { name });
    fs::create_dir_all(&module)?;
    if !module.join("go.mod").exists() {
        let (major, minor) = GO;
        let mut text = format!("module sheave/tools\n\ngo {major}.{minor}.0\n");
        if is_kubernetes {
            text += &replacements(&module)?;
        }
        // Complete or not there at all.
        fs::write(module.join("go.mod.partial"), text)?;
        fs::rename(module.join("go.mod.partial"), module.join("go.mod"))?;
    }
    root::run(&mut go(&module, &["get", "-tool", &format!("{package}@{version}")]))?;
    Ok(module)
}

/// Kubernetes' module takes its libraries from folders beside it, as version v0.0.0. From outside of its source tree
/// they are the published ones of the same release.
fn replacements(module: &Path) -> Result<String> {
    let mut command = go(module, &["mod", "download", "-json", &format!("k8s.io/kubernetes@{RELEASE}")]);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output().context("cannot start go")?;
    let said = String::from_utf8_lossy(&output.stdout);
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
