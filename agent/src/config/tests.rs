//! kube-proxy's configuration and what becomes of it.

use std::{collections::BTreeMap, path::Path};

use super::{Settings, file, kube_proxy::ROWS};

/// As kubeadm writes it, for a cluster of its default kind.
const KUBEADM: &str = r#"
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection: {acceptContentTypes: "", burst: 0, contentType: "", kubeconfig: /var/lib/kube-proxy/kubeconfig.conf, qps: 0}
clusterCIDR: 10.244.0.0/16,fd00:10:244::/56
configSyncPeriod: 0s
conntrack: {maxPerCore: null, min: null, tcpBeLiberal: null, tcpCloseWaitTimeout: null, tcpEstablishedTimeout: null, udpStreamTimeout: 0s, udpTimeout: 0s}
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
kind: KubeProxyConfiguration
logging: {flushFrequency: 0, options: {json: {infoBufferSize: "0"}, text: {infoBufferSize: "0"}}, verbosity: 0}
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"#;

fn read(text: &str) -> Result<Settings, String> {
    let mut settings = Settings::default();
    file::read(&mut settings, Path::new("/etc/c.conf"), text, &|flag| flag == "node-name").map_err(|e| e.0)?;
    Ok(settings)
}

/// `flag=value` of each setting, in order.
fn shown(settings: &Settings) -> String {
    let by_flag: BTreeMap<_, _> = settings.iter().map(|s| (s.flag.clone(), s.value.clone())).collect();
    by_flag.iter().map(|(flag, value)| format!("{flag}={value}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn the_file_that_kubeadm_writes_needs_no_remark() {
    let settings = read(KUBEADM).unwrap();
    let expected = "cluster-cidr=10.244.0.0/16,fd00:10:244::/56 conntrack-udp-timeout=0s \
                    conntrack-udp-timeout-stream=0s kubeconfig=/var/lib/kube-proxy/kubeconfig.conf nodeport-addresses=all";
    assert_eq!(shown(&settings), expected);
    assert_eq!(settings.remarks, Vec::<String>::new());
    let origin = |flag: &str| settings.iter().find(|s| s.flag == flag).unwrap().origin.clone();
    assert_eq!(origin("cluster-cidr"), "clusterCIDR in /etc/c.conf");
    assert_eq!(origin("nodeport-addresses"), "default of mode in /etc/c.conf");
}

#[test]
fn fields_become_flags() {
    for (fields, expected) in [
        ("mode: nftables", ""),
        ("hostnameOverride: n1\nmode: nftables", "node-name=n1"),
        (
            "mode: iptables\nnodePortAddresses: [192.0.2.0/24, '2001:db8::/64']",
            "nodeport-addresses=192.0.2.0/24,2001:db8::/64",
        ),
        ("mode: nftables\nnodePortAddresses: [primary]", "nodeport-addresses=primary"),
        ("mode: nftables\nhealthzBindAddress: 192.0.2.1", "healthz-bind-address=192.0.2.1"),
        ("mode: nftables\nmetricsBindAddress: 0.0.0.0:10249", "metrics-bind-address=0.0.0.0:10249"),
        (
            "mode: nftables\nbindAddress: '::'\nhealthzBindAddress: '[::1]:1'",
            "healthz-bind-address=[::1]:1 metrics-bind-address=[::1]:10249",
        ),
        ("mode: nftables\nnftables: {masqueradeAll: true}", "masquerade-all=true"),
        ("mode: nftables\niptables: {masqueradeAll: false, localhostNodePorts: false}", "loopback-nodeports=false"),
        ("mode: nftables\ndetectLocalMode: NodeCIDR", "detect-pods=node"),
        (
            "mode: nftables\ndetectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}",
            "detect-pods=bridge pod-bridge-interface=cni0",
        ),
        (
            "mode: nftables\ndetectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: cali}",
            "detect-pods=prefix pod-interface-name-prefix=cali",
        ),
        ("mode: ipvs\nipvs: {scheduler: lc}", "lb-algorithm=least-connections nodeport-addresses=all"),
        (
            "mode: nftables\nconntrack: {maxPerCore: 0, min: 5, tcpBeLiberal: true, tcpCloseWaitTimeout: 1h0m0s, \
             tcpEstablishedTimeout: 24h0m0s, udpStreamTimeout: 3m0s, udpTimeout: 40s}",
            "conntrack-max-per-core=0 conntrack-min=5 conntrack-tcp-be-liberal=true \
             conntrack-tcp-timeout-close-wait=1h0m0s conntrack-tcp-timeout-established=24h0m0s \
             conntrack-udp-timeout=40s conntrack-udp-timeout-stream=3m0s",
        ),
        ("mode: nftables\nlogging: {format: json, verbosity: 4}", "log-format=json log-level=debug"),
    ] {
        let text = format!("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{fields}");
        let settings = read(&text).unwrap_or_else(|e| panic!("{fields}: {e}"));
        assert_eq!((shown(&settings).as_str(), settings.remarks.len()), (expected, 0), "{fields}: {settings:?}");
    }
}

#[test]
fn what_has_no_effect_is_answered_with_a_sentence() {
    for (fields, words) in [
        ("ipvs: {strictARP: true}", "ipvs.strictARP in /etc/c.conf has no effect: sheave does not use IPVS"),
        ("iptables: {syncPeriod: 30s}", "iptables.syncPeriod in /etc/c.conf has no effect"),
        ("featureGates: {NFTablesProxyMode: true}", "featureGates.NFTablesProxyMode in /etc/c.conf has no effect"),
        ("clusterCIDRs: 10.0.0.0/8", "clusterCIDRs in /etc/c.conf is not a field of kube-proxy"),
    ] {
        let text = format!("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n{fields}");
        let remarks = read(&text).unwrap().remarks;
        assert!(remarks.len() == 1 && remarks[0].contains(words), "{fields}: {remarks:?}");
    }
}

#[test]
fn a_file_that_cannot_be_meant_is_refused() {
    let kube_proxy = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
    let own = "apiVersion: sheave.io/v1alpha1\nkind: AgentConfiguration\n";
    for (text, words) in [
        ("[", "is not a YAML mapping"),
        ("apiVersion: v1\nkind: ConfigMap", "expected KubeProxyConfiguration of kubeproxy.config.k8s.io/v1alpha1"),
        (&format!("{kube_proxy}mode: userspace"), "\"userspace\" is none of kube-proxy's modes"),
        (&format!("{kube_proxy}bindAddress: eth0"), "\"eth0\" is no IP address"),
        (&format!("{own}nodeNam: n1"), "has no flag --node-nam"),
    ] {
        let error = read(text).expect_err(text);
        assert!(error.contains(words) && error.contains("/etc/c.conf"), "{text}: {error}");
    }
    assert_eq!(shown(&read(&format!("{own}nodeName: n1")).unwrap()), "node-name=n1");
}

#[test]
fn every_flag_and_field_of_kube_proxy_stands_once() {
    let mut seen = std::collections::BTreeSet::new();
    for row in ROWS {
        let names = row.flag.iter().map(|(name, _)| *name).chain(row.fields.iter().copied());
        for name in names {
            assert!(seen.insert(name), "{name} stands twice");
        }
        assert!(row.flag.is_some() || !row.fields.is_empty());
    }
}
