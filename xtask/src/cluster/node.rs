//! A node: a holder of its namespaces, containerd, a kubelet, and a CNI configuration of plain routes.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::{
    cgroup,
    images::Images,
    lab::{self, Lab, write},
    process::{self, eventually, said},
};

/// Folders of the host that every node has its own of.
const OWN: [(&str, &str); 5] = [
    ("cni", "/var/lib/cni"),
    ("shims", "/run/containerd"),
    ("netns", "/run/netns"),
    ("sheave", "/run/sheave"),
    ("container-logs", "/var/log/containers"),
];

/// Starts node `number`; returns when its kubelet runs.
pub fn start(lab: &Lab, number: u8, images: &Images) -> Result<()> {
    let folder = lab.folder(number);
    let own = OWN.map(|(name, _)| name);
    for name in ["cni-conf", "kubelet", "containerd", "run", "logs"].into_iter().chain(own) {
        fs::create_dir_all(folder.join(name)).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    write(&folder.join("resolv.conf"), "nameserver 127.0.0.1\n")?;
    write(&folder.join("cni-conf/10-lab.conflist"), &cni(number))?;
    write(&folder.join("containerd.toml"), &containerd(lab, number))?;
    write(&folder.join("kubelet.yaml"), &kubelet(lab, number))?;
    hold(lab, number)?;

    let name = format!("n{number}");
    let run = |program: &str, words: &[String]| -> Result<()> {
        let mut all = lab.inside(&name)?;
        all.extend_from_slice(words);
        process::start(&cgroup::make(&name)?, &all, &lab.logs().join(format!("{program}-{name}.log")))
    };
    let config = folder.join("containerd.toml").display().to_string();
    run("containerd", &["containerd".into(), "--config".into(), config])?;
    eventually(&format!("containerd of {name} answers"), 30, || ctr(lab, number, &["version"]))?;
    import(lab, number, &images.common)?;
    run(
        "kubelet",
        &[
            lab.program("kubelet"),
            format!("--config={}", folder.join("kubelet.yaml").display()),
            format!("--kubeconfig={}", lab.kubeconfig().display()),
            format!("--hostname-override={name}"),
            format!("--node-ip={}", lab::addresses(number).join(",")),
            format!("--root-dir={}", folder.join("kubelet").display()),
            format!("--cert-dir={}", folder.join("pki").display()),
        ],
    )
}

/// Starts the process that keeps the node's namespaces, with the mounts that are the node's own.
fn hold(lab: &Lab, number: u8) -> Result<()> {
    let folder = lab.folder(number);
    let folder = folder.display();
    let mut script = format!("set -e; mount --make-rshared /; hostname n{number}; ");
    for (name, path) in OWN {
        script += &format!("mkdir -p {path}; mount --bind {folder}/{name} {path}; ");
    }
    if is_overlay(&lab.state)? {
        // An overlay cannot be made of overlays.
        script += &format!("mount -t tmpfs tmpfs {folder}/containerd; ");
    }
    script += &format!("mount -t bpf bpf /sys/fs/bpf; echo $$ > {folder}/pid; exec sleep infinity");
    let mut words = vec!["nsenter".to_owned(), format!("--net={}", lab::namespace(&format!("n{number}")))];
    words.extend(["unshare", "--mount", "--uts", "--propagation=private", "sh", "-c"].map(str::to_owned));
    words.push(script);
    let log = lab.logs().join(format!("n{number}.log"));
    process::start(&cgroup::make(&format!("n{number}"))?, &words, &log)?;
    eventually(&format!("n{number} has its namespaces"), 20, || {
        let process = fs::read_to_string(lab.folder(number).join("pid")).unwrap_or_default();
        ensure!(process.ends_with('\n'), "{}", fs::read_to_string(&log).unwrap_or_default());
        Ok(())
    })
}

fn is_overlay(path: &Path) -> Result<bool> {
    Ok(said(Command::new("stat").args(["--file-system", "--format=%T"]).arg(path))?.trim() == "overlayfs")
}

/// Makes the images of an archive known to a node; they are unpacked when they are first used.
pub fn import(lab: &Lab, number: u8, archive: &Path) -> Result<()> {
    let archive = archive.to_string_lossy();
    ctr(lab, number, &["--namespace=k8s.io", "images", "import", "--no-unpack", &archive])
}

/// containerd's client, on a node.
fn ctr(lab: &Lab, number: u8, words: &[&str]) -> Result<()> {
    let mut command = lab.enter(&format!("n{number}"))?;
    command.arg("ctr").arg("--address").arg(lab.folder(number).join("containerd.sock")).args(words);
    said(&mut command).map(drop)
}

/// A link of its own for every pod, and routes: no bridge, and nobody who would masquerade.
fn cni(number: u8) -> String {
    let [v4, v6] = lab::pod_networks(number);
    format!(
        r#"{{"cniVersion": "0.4.0", "name": "lab", "plugins": [
  {{"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {{
    "type": "host-local",
    "ranges": [[{{"subnet": "{v4}"}}], [{{"subnet": "{v6}"}}]],
    "routes": [{{"dst": "0.0.0.0/0"}}, {{"dst": "::/0"}}]}}}},
  {{"type": "portmap", "capabilities": {{"portMappings": true}}, "snat": true}}]}}
"#
    )
}

fn containerd(lab: &Lab, number: u8) -> String {
    let folder = lab.folder(number);
    let folder = folder.display();
    format!(
        r#"version = 2
root = "{folder}/containerd"
state = "{folder}/run"
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{folder}/cni-conf"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"#,
        super::images::PAUSE
    )
}

fn kubelet(lab: &Lab, number: u8) -> String {
    let folder = lab.folder(number);
    let folder = folder.display();
    format!(
        "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix://{folder}/containerd.sock
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /lab-n{number}
enforceNodeAllocatable: []
failSwapOn: false
clusterDNS: [10.96.0.10]
clusterDomain: cluster.local
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
resolvConf: {folder}/resolv.conf
evictionHard: {{memory.available: 50Mi, nodefs.available: 1%, imagefs.available: 1%}}
imageGCHighThresholdPercent: 100 # they could not be pulled again
imageGCLowThresholdPercent: 99
podLogsDir: {folder}/logs
"
    )
}
