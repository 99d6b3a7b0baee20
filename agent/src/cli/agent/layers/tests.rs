//! Which layer says what holds.

use std::{ffi::OsString, fs, path::PathBuf};

use super::{Effective, Resolved, print, resolve};
use crate::options::{AgentOptions, SourceOptions};

/// A file that goes with the test.
struct File(PathBuf);

impl File {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("sheave-{}-{name}", std::process::id()));
        fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn resolved(flags: &str) -> Result<Resolved, String> {
    let line: Vec<OsString> = "sheave agent".split(' ').chain(flags.split_whitespace()).map(OsString::from).collect();
    resolve(&line).map_err(|e| format!("{e:#}"))
}

fn value(resolved: &Resolved, flag: &str) -> (String, String) {
    let Effective { value, origin, .. } = resolved.values.iter().find(|v| v.flag == flag).unwrap();
    (value.clone().unwrap_or_default(), origin.clone())
}

#[test]
fn our_flag_comes_before_kube_proxys_before_the_file_before_the_default() {
    let file = File::new(
        "layers.conf",
        "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\n\
         hostnameOverride: of-file\nhealthzBindAddress: 192.0.2.1:1\nmetricsBindAddress: 192.0.2.1:2\n\
         clientConnection: {kubeconfig: /k}",
    );
    let path = file.0.display();
    let found = resolved(&format!(
        "--config {path} --healthz-bind-address 192.0.2.2:1 --hostname-override=of-proxy --masquerade-all"
    ))
    .unwrap();
    for (flag, expected, origin) in [
        ("healthz-bind-address", "192.0.2.2:1", "--healthz-bind-address".to_owned()),
        ("metrics-bind-address", "192.0.2.1:2", format!("metricsBindAddress in {path}")),
        ("node-name", "of-proxy", "--hostname-override".to_owned()),
        ("nodeport-addresses", "primary", "default".to_owned()),
        ("masquerade-all", "true", "--masquerade-all".to_owned()),
        ("kubeconfig", "/k", format!("clientConnection.kubeconfig in {path}")),
    ] {
        assert_eq!(value(&found, flag), (expected.to_owned(), origin), "{flag}");
    }
    let options: AgentOptions = found.args.into_options().unwrap();
    assert_eq!(options.node_name, "of-proxy");
    assert_eq!(options.metrics_bind_address, Some("192.0.2.1:2".parse().unwrap()));

    let without_cluster = resolved(&format!("--config {path} --manifests /m")).unwrap().args.into_options().unwrap();
    assert_eq!(without_cluster.source, SourceOptions::Manifests("/m".into()));
}

#[test]
fn flags_of_kube_proxy_are_mapped_answered_or_refused() {
    let common = "--node-name n1";
    for (flags, flag, expected) in [
        ("--proxy-mode=iptables", "nodeport-addresses", "all"),
        ("--proxy-mode nftables", "nodeport-addresses", "primary"),
        ("--proxy-mode=ipvs --nodeport-addresses 192.0.2.0/24", "nodeport-addresses", "192.0.2.0/24"),
        ("--healthz-port=1234", "healthz-bind-address", "0.0.0.0:1234"),
        ("--metrics-port 0", "metrics-bind-address", ""),
        ("--master=https://192.0.2.1:6443", "api-server", "https://192.0.2.1:6443"),
        ("-v=4", "log-level", "debug"),
        ("--v=2", "log-level", "info"),
        ("--iptables-localhost-nodeports=false", "loopback-nodeports", "false"),
    ] {
        let found = resolved(&format!("{common} {flags}")).unwrap_or_else(|e| panic!("{flags}: {e}"));
        assert_eq!(value(&found, flag).0, expected, "{flags}");
        assert!(found.remarks.is_empty(), "{flags}: {:?}", found.remarks);
        found.args.into_options().unwrap_or_else(|e| panic!("{flags}: {e}"));
    }
    let idle = resolved(&format!("{common} --ipvs-tcp-timeout=1s --ipvs-strict-arp --feature-gates=A=true")).unwrap();
    assert_eq!(idle.remarks.len(), 3, "{:?}", idle.remarks);
    for (flags, words) in [
        ("--cleanup", "run `sheave cleanup`"),
        ("--init-only", "run `sheave check`"),
        ("--write-config-to=/x", "--print-config"),
        ("--proxy-mode=userspace", "--proxy-mode: \"userspace\" is none"),
        ("--healthz-port=x", "is no port"),
        ("--config=/does/not/exist", "/does/not/exist"),
    ] {
        let error = resolved(&format!("{common} {flags}")).expect_err(flags);
        assert!(error.contains(words), "{flags}: {error}");
    }
}

#[test]
fn a_bad_value_in_a_file_is_named_with_its_place() {
    let text = "apiVersion: sheave.io/v1alpha1\nkind: AgentConfiguration\nmaxFrontends: 0\n";
    let file = File::new("bad.yaml", text);
    let error = resolved(&format!("--config {}", file.0.display())).unwrap_err();
    assert!(error.contains("'0'") && error.contains(&format!("maxFrontends in {}", file.0.display())), "{error}");
}

#[test]
fn what_is_printed_is_a_file_that_says_the_same() {
    let flags = "--node-name n1 --manifests /m --devices eth0,eth1 --host-sockets-only --healthz-bind-address=";
    let first = resolved(flags).unwrap();
    let text = print(&first.values);
    assert!(text.lines().any(|l| l.starts_with("nodeName: \"n1\" ") && l.ends_with("# --node-name")), "{text}");
    let file = File::new("printed.yaml", &text);
    let second = resolved(&format!("--config {}", file.0.display())).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let values = |resolved: &Resolved| -> Vec<(String, Option<String>)> {
        resolved.values.iter().map(|v| (v.flag.clone(), v.value.clone())).collect()
    };
    assert_eq!(values(&second), values(&first), "{text}");
    assert_eq!(
        format!("{:?}", second.args.into_options().unwrap()),
        format!("{:?}", first.args.into_options().unwrap())
    );
}
