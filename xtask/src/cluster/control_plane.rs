//! etcd, API server, controllers, scheduler: in a network namespace and cgroup of their own.

use std::process::Command;

use anyhow::Result;

use super::{
    cgroup,
    lab::{API, Lab, PODS, SERVICES, write},
    process::{self, eventually, said},
};

/// The administrator's, of a cluster that nobody else reaches.
const TOKEN: &str = "lab-admin";
const ETCD: &str = "http://127.0.0.1:2379";

/// Starts all of it; returns when the API answers.
pub fn start(lab: &Lab) -> Result<()> {
    let state = lab.state.display();
    let key = format!("{state}/sa.key");
    said(Command::new("openssl").args(["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", &key]))?;
    write(&lab.state.join("tokens.csv"), &format!("{TOKEN},admin,admin,system:masters\n"))?;
    write(&lab.kubeconfig(), &kubeconfig(lab))?;
    let run = |program: &str, flags: &[String]| -> Result<()> {
        let mut words = lab.inside("cp")?;
        words.push(lab.program(program));
        words.extend_from_slice(flags);
        process::start(&cgroup::make("cp")?, &words, &lab.logs().join(format!("{program}.log")))
    };
    run(
        "etcd",
        &[
            format!("--data-dir={state}/etcd"),
            "--unsafe-no-fsync".into(), // nothing of it is to outlive the cluster
            format!("--listen-client-urls={ETCD}"),
            format!("--advertise-client-urls={ETCD}"),
            "--listen-peer-urls=http://127.0.0.1:2380".into(),
        ],
    )?;
    run(
        "kube-apiserver",
        &[
            format!("--etcd-servers={ETCD}"),
            format!("--advertise-address={API}"), // what pods reach behind the ClusterIP
            "--bind-address=::".into(),
            "--secure-port=6443".into(),
            format!("--cert-dir={state}/apiserver"), // it makes its own certificate there
            format!("--token-auth-file={state}/tokens.csv"),
            "--authorization-mode=Node,RBAC".into(),
            "--allow-privileged=true".into(),
            format!("--service-cluster-ip-range={SERVICES}"),
            "--kubelet-preferred-address-types=InternalIP".into(),
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!("--service-account-key-file={key}"),
            format!("--service-account-signing-key-file={key}"),
        ],
    )?;
    eventually("the API server is ready", 90, || lab.said(&["get", "--raw", "/readyz", "--request-timeout=2s"]))?;
    let kubeconfig = format!("--kubeconfig={}", lab.kubeconfig().display());
    run(
        "kube-controller-manager",
        &[
            kubeconfig.clone(),
            "--leader-elect=false".into(),
            format!("--service-account-private-key-file={key}"),
            format!("--root-ca-file={state}/apiserver/apiserver.crt"),
            "--allocate-node-cidrs=false".into(), // they are in the nodes' routes already
            format!("--cluster-cidr={PODS}"),
            format!("--service-cluster-ip-range={SERVICES}"),
        ],
    )?;
    run("kube-scheduler", &[kubeconfig, "--leader-elect=false".into()])
}

fn kubeconfig(lab: &Lab) -> String {
    let authority = lab.state.join("apiserver/apiserver.crt");
    format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: lab\n\
         clusters: [{{name: lab, cluster: {{server: 'https://{API}:6443', certificate-authority: '{}'}}}}]\n\
         users: [{{name: admin, user: {{token: {TOKEN}}}}}]\n\
         contexts: [{{name: lab, context: {{cluster: lab, user: admin}}}}]\n",
        authority.display()
    )
}
