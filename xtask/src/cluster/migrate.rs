//! docs/migrating-from-kube-proxy.md, step by step on a real cluster, while clients go on asking: nobody may notice.

use std::{thread, time::Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    Proxy, Up,
    images::Images,
    lab::{self, Lab, write},
    process::{eventually, said},
    proxy,
    traffic::{self, Traffic},
};
use crate::{kubernetes, tally::Tally};

/// The Service that is asked.
const WEB: &str = include_str!("web.yaml");
const NODE_PORT: &str = "30080";
const CLUSTER_IP: &str = "10.96.0.80:80";

/// The way there and back.
struct Migration {
    lab: Lab,
    clients: Vec<(&'static str, Traffic)>,
}

type Step = (&'static str, fn(&Migration) -> Result<()>);

/// Who asks through node ports.
const OUTSIDE: &str = "outside";

/// The one step that is seen, and only from outside: what sheave translates packet by packet ends with it.
const SEEN: &str = "5 every node is cleaned";

/// Numbers are those of the document's sections.
const STEPS: [Step; 8] = [
    ("2 install beside kube-proxy", Migration::install),
    ("3 kube-proxy leaves every node", Migration::take_away),
    ("3 its rules are removed", Migration::clean),
    ("4 nothing of it is left", Migration::look),
    ("4 every agent is restarted", Migration::restart),
    ("5 kube-proxy comes back", Migration::let_in),
    (SEEN, Migration::leave),
    ("5 nothing of sheave is left", Migration::look_again),
];

/// Goes the way and prints the table; what was begun under traffic is only good when no request failed.
pub fn tally(cluster: &Up) -> Result<Tally> {
    let images = Images::make(&kubernetes::folder()?, &Up { proxy: Proxy::Sheave, ..cluster.clone() })?;
    let from = if cluster.proxy == Proxy::Iptables { Proxy::Iptables } else { Proxy::Nftables };
    let lab = super::up(&Up { proxy: from, ..cluster.clone() })?;
    proxy::import_sheave(&lab, &images)?;
    lab.apply(WEB)?;
    lab.said(&["rollout", "status", "deployment/web", "--timeout=120s"])?;
    let mut migration = Migration { clients: clients(&lab)?, lab };
    // The pods run, but kube-proxy may not have noticed yet.
    let serves = eventually("every client is served", 30, || migration.check());
    let mut table = vec![("1 kube-proxy serves", Instant::now(), serves)];
    for (name, step) in STEPS {
        let start = Instant::now();
        let result = step(&migration).and_then(|()| match name {
            SEEN => {
                thread::sleep(traffic::PATIENCE); // what was under way has been judged by then
                migration.forgive(OUTSIDE);
                migration.check()
            }
            _ => migration.check(),
        });
        let is_bad = result.is_err();
        println!("migrate: {name}: {}", if is_bad { "FAILED" } else { "ok" });
        table.push((name, start, result));
        if is_bad {
            break; // the rest would only tell of this
        }
    }
    if table.iter().any(|(_, _, result)| result.is_err()) {
        let _ = migration.let_in(); // a cluster that serves, for the next time
    }
    migration.clients.clear();
    migration.on_nodes("nft delete table ip keep; nft delete table ip6 keep; true", |_| Ok(()))?;
    migration.lab.said(&["delete", "--filename", &apply_file(&migration.lab)?, "--wait=false"])?;

    let mut total = Tally::default();
    println!("\n{:<8} STEP", "RESULT");
    for (name, start, result) in &table {
        total += Tally::of(result, *start);
        match result {
            Ok(()) => println!("{:<8} {name}", "ok"),
            Err(error) => println!("{:<8} {name}: {error:#}", "FAILED"),
        }
    }
    println!();
    Ok(total)
}

fn apply_file(lab: &Lab) -> Result<String> {
    let path = lab.state.join("web.yaml");
    write(&path, WEB)?;
    Ok(path.display().to_string())
}

/// Outside, by node ports; on each node, by the ClusterIP and its own node port.
fn clients(lab: &Lab) -> Result<Vec<(&'static str, Traffic)>> {
    let ports: Vec<String> = lab.numbers().flat_map(lab::addresses).map(|address| with_port(&address)).collect();
    let mut clients = vec![(OUTSIDE, Traffic::start(lab, "out", &ports)?)];
    for number in lab.numbers() {
        let mut addresses = vec![CLUSTER_IP.to_owned()];
        addresses.extend(lab::addresses(number).iter().map(|address| with_port(address)));
        clients.push(("on a node", Traffic::start(lab, &format!("n{number}"), &addresses)?));
    }
    Ok(clients)
}

fn with_port(address: &str) -> String {
    if address.contains(':') { format!("[{address}]:{NODE_PORT}") } else { format!("{address}:{NODE_PORT}") }
}

impl Migration {
    fn check(&mut self) -> Result<()> {
        for (name, client) in &mut self.clients {
            client.check().with_context(|| format!("a client {name} was disturbed"))?;
        }
        Ok(())
    }

    /// Forgets what went wrong for such clients so far.
    fn forgive(&mut self, who: &str) {
        for (_, client) in self.clients.iter_mut().filter(|(name, _)| *name == who) {
            let _ = client.check();
        }
    }

    fn install(&self) -> Result<()> {
        let words = ["-n", "kube-system", "get", "configmap", "kube-proxy", "-o", r"jsonpath={.data.config\.conf}"];
        let config = self.lab.state.join("config.conf");
        write(&config, &self.lab.said(&words)?)?;
        let file = format!("kubeProxyConfig={}", config.display());
        let values = proxy::values()?;
        let install = ["install", "sheave", &proxy::chart(), "--set-file", &file];
        proxy::helm(&self.lab, &[install.as_slice(), proxy::words(&values).as_slice()].concat())?;
        proxy::rolled_out(&self.lab, "sheave")
    }

    fn take_away(&self) -> Result<()> {
        let patch = r#"{"spec":{"template":{"spec":{"nodeSelector":{"sheave.io/kube-proxy":"wanted"}}}}}"#;
        self.lab.said(&["-n", "kube-system", "patch", "daemonset", "kube-proxy", "--patch", patch])?;
        self.has_no_pods("k8s-app=kube-proxy")
    }

    /// A NAT chain stays, so that connections which kube-proxy has translated do.
    fn clean(&self) -> Result<()> {
        for family in ["ip", "ip6"] {
            let table = format!("add table {family} keep");
            let chain = format!("add chain {family} keep nat {{ type nat hook postrouting priority 100; }}");
            let rule = format!("add rule {family} keep nat ct state new accept"); // keeps conntrack, too
            self.on_nodes(&format!("nft '{table}; {chain}; {rule}'"), |_| Ok(()))?;
        }
        let list = ["-n", "kube-system", "get", "pods", "-l", "app.kubernetes.io/name=sheave", "-o", "name"];
        for pod in self.lab.said(&list)?.lines() {
            self.lab.said(&["-n", "kube-system", "exec", pod, "--", "sheave", "cleanup", "--kube-proxy"])?;
        }
        Ok(())
    }

    fn look(&self) -> Result<()> {
        proxy::rolled_out(&self.lab, "sheave")?;
        self.on_nodes("nft list ruleset", |said| {
            let left = said.lines().find(|line| line.contains("kube-proxy") || line.contains("KUBE-SERVICES"));
            ensure!(left.is_none(), "netfilter still has `{}`", left.unwrap_or_default());
            Ok(())
        })?;
        let check = ["-n", "kube-system", "exec", "daemonset/sheave", "--", "sheave", "check", "-o", "json"];
        let said: Value = serde_json::from_str(&self.lab.said(&check)?).context("sheave check says no JSON")?;
        let found = said["items"].as_array().into_iter().flatten().find(|item| item["name"] == "kube-proxy");
        let found = found.context("sheave check says nothing of kube-proxy")?;
        ensure!(found["status"] == "ok", "sheave check has found it: {found}");
        Ok(())
    }

    fn restart(&self) -> Result<()> {
        self.lab.said(&["-n", "kube-system", "rollout", "restart", "daemonset/sheave"])?;
        proxy::rolled_out(&self.lab, "sheave")
    }

    fn let_in(&self) -> Result<()> {
        let patch = r#"[{"op":"remove","path":"/spec/template/spec/nodeSelector/sheave.io~1kube-proxy"}]"#;
        self.lab.said(&["-n", "kube-system", "patch", "daemonset", "kube-proxy", "--type=json", "--patch", patch])?;
        proxy::rolled_out(&self.lab, "kube-proxy")?;
        // It is ready before it has written a rule, and it writes those of each family by themselves.
        eventually("kube-proxy has written its rules", 60, || {
            for family in ["ip", "ip6"] {
                let list = format!("nft list table {family} kube-proxy || {family}tables-save --table nat");
                self.on_nodes(&list, |said| {
                    ensure!(said.contains("default/web"), "nothing of {family} leads to Service default/web");
                    Ok(())
                })?;
            }
            Ok(())
        })
    }

    fn leave(&self) -> Result<()> {
        proxy::remove_sheave(&self.lab)?;
        self.has_no_pods("app.kubernetes.io/name=sheave")
    }

    fn look_again(&self) -> Result<()> {
        self.on_nodes("ls /sys/fs/bpf /run/sheave; tc filter show dev eth0 ingress", |said| {
            let left = said.lines().find(|line| line.contains("sheave") && !line.ends_with(':'));
            ensure!(left.is_none(), "{}", left.unwrap_or_default());
            Ok(())
        })
    }

    fn on_nodes(&self, script: &str, check: impl Fn(&str) -> Result<()>) -> Result<()> {
        for number in self.lab.numbers() {
            let name = format!("n{number}");
            let said = said(self.lab.enter(&name)?.args(["sh", "-c", script]))?;
            check(&said).with_context(|| format!("on {name}"))?;
        }
        Ok(())
    }

    fn has_no_pods(&self, label: &str) -> Result<()> {
        eventually(&format!("no pod has {label}"), 90, || {
            let said = self.lab.said(&["-n", "kube-system", "get", "pods", "-l", label, "-o", "name"])?;
            ensure!(said.trim().is_empty(), "there are {}", said.trim().replace('\n', ", "));
            Ok(())
        })
    }
}
