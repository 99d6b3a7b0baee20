//! The images that a cluster and Kubernetes' network tests want, made here: no registry is asked for anything.

use std::{
    fs::{self, File},
    io::BufWriter,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tar::{Builder, Header};

use super::{Proxy, Up, process::said};
use crate::{
    image::{
        self,
        oci::{self, File as Entry, Image},
    },
    kubernetes::CERTIFICATE,
    root,
};

/// What keeps a pod's namespaces.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
/// kube-proxy with the programs that it runs.
pub const KUBE_PROXY: &str = "registry.k8s.io/kube-proxy:v1.36.3";
/// Counts up when the images change, so that caches are not asked for the old ones.
const EDITION: u32 = 1;
/// Where the tests' images are said to come from.
const E2E: &str = "registry.k8s.io/e2e-test-images";
/// What tests call in pods.
const TOOLS: &str =
    "netcat-openbsd,curl,wget,bind9-dnsutils,iproute2,conntrack,iptables,nftables,procps,iputils-ping,kmod";
/// Leaves when told to, and reaps what is left to it.
const SLEEP: &str = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done";

/// Archives to import on every node.
pub struct Images {
    /// What every cluster needs.
    pub common: PathBuf,
    /// sheave's own, where it is to serve.
    pub sheave: Option<PathBuf>,
}

impl Images {
    /// Makes what is missing; sheave's own is made anew unless it is given.
    ///
    /// # Errors
    /// When a program or package is missing, or sheave cannot be built.
    pub fn make(programs: &Path, wanted: &Up) -> Result<Self> {
        let common = programs.join(format!("images-{EDITION}.tar"));
        if !common.exists() {
            println!("cluster: making images (the first time a minute)");
            let partial = programs.join("images.partial");
            pack(programs, &partial)?;
            fs::rename(&partial, &common)?; // so what is there is whole
        }
        let sheave = match &wanted.image {
            _ if wanted.proxy != Proxy::Sheave => None,
            Some(given) => Some(given.canonicalize().with_context(|| format!("cannot find {}", given.display()))?),
            None => Some(image::archive(None, None)?),
        };
        Ok(Self { common, sheave })
    }
}

fn pack(programs: &Path, to: &Path) -> Result<()> {
    let debian = debian(programs)?;
    let busybox = busybox()?;
    let program = |names: &[&str]| -> Result<Vec<u8>> {
        let file = |name: &&str| -> Result<Entry> {
            let from = programs.join(name);
            let content = fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
            Ok(Entry { path: (*name).to_owned(), mode: 0o755, content })
        };
        oci::layer(&names.iter().map(file).collect::<Result<Vec<Entry>>>()?)
    };
    let agnhost = program(&["agnhost", "coredns", CERTIFICATE[0], CERTIFICATE[1]])?;
    let regression = program(&["regression-issue-74839"])?;
    let (coredns, kube_proxy) = (program(&["coredns"])?, program(&["kube-proxy"])?);
    let images = [
        image(PAUSE, &["/bin/sh", "-c", SLEEP], &[], &[&busybox]),
        image(&format!("{E2E}/agnhost:2.63.0"), &["/agnhost"], &["pause"], &[&debian, &agnhost]),
        image(&format!("{E2E}/glibc-dns-testing:2.0.0"), &[], &["sleep", "infinity"], &[&debian]),
        image("registry.k8s.io/build-image/distroless-iptables:v0.9.6", &[], &["sh"], &[&debian]),
        image(&format!("{E2E}/busybox:1.37.0-1"), &[], &["sh"], &[&busybox]),
        image(&format!("{E2E}/regression-issue-74839:1.4"), &["/regression-issue-74839"], &[], &[&regression]),
        image("registry.k8s.io/coredns/coredns:v1.15.0", &["/coredns"], &[], &[&coredns]),
        image(KUBE_PROXY, &["/kube-proxy"], &[], &[&debian, &kube_proxy]),
    ];
    let output = File::create(to).with_context(|| format!("cannot make {}", to.display()))?;
    oci::archive(&images, BufWriter::new(output))
}

fn image<'a>(name: &str, run: &[&str], words: &[&str], layers: &[&'a Vec<u8>]) -> Image<&'a Vec<u8>> {
    Image { name: name.to_owned(), config: config(run, words), layers: layers.to_vec() }
}

fn config(run: &[&str], words: &[&str]) -> Value {
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let mut config = json!({ "Env": [path], "WorkingDir": "/" });
    for (key, list) in [("Entrypoint", run), ("Cmd", words)] {
        if !list.is_empty() {
            config[key] = json!(list);
        }
    }
    config
}

/// A small Debian with what tests call; a tarball.
fn debian(programs: &Path) -> Result<Vec<u8>> {
    let to = programs.join("debian.partial");
    let mut mmdebstrap = root::command("mmdebstrap", &["--quiet", "--variant=minbase", "--format=tar"]);
    mmdebstrap.arg("--dpkgopt=force-unsafe-io"); // a machine that crashes now starts anew anyway
    root::run(mmdebstrap.arg(format!("--include={TOOLS}")).arg("bookworm").arg(&to))?;
    let layer = fs::read(&to).with_context(|| format!("cannot read {}", to.display()))?;
    fs::remove_file(to)?;
    Ok(layer)
}

/// busybox under all of its names.
fn busybox() -> Result<Vec<u8>> {
    let from = "/bin/busybox";
    let content = fs::read(from).with_context(|| format!("cannot read {from}"))?;
    let files = [
        Entry { path: "bin/busybox".into(), mode: 0o755, content },
        Entry { path: "tmp/.keep".into(), mode: 0o644, content: Vec::new() },
    ];
    // A tarball ends with two empty blocks; what follows is put in front of them.
    let mut layer = oci::layer(&files)?;
    layer.truncate(layer.len() - 1024);
    let mut links = Builder::new(layer);
    let names = said(Command::new(from).arg("--list"))?;
    if !names.lines().any(|name| name == "sh") {
        bail!("{from} has no shell");
    }
    for name in names.lines().filter(|name| *name != "busybox") {
        let mut header = Header::new_ustar();
        header.set_entry_type(tar::EntryType::Symlink);
        header.set_size(0);
        header.set_mode(0o777);
        links.append_link(&mut header, format!("bin/{name}"), "busybox")?;
    }
    Ok(links.into_inner()?)
}
