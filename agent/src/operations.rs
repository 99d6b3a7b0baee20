//! `docs/operations.md`, made from the code so that it cannot be out of date: `cargo xtask docs` writes it, the test
//! here says when that is due.

use std::{collections::BTreeMap, env, fmt::Write as _, fs, path::Path};

use clap::{Arg, CommandFactory as _};
use sheave_ebpf::counter::Counter;

use crate::{
    cli::Cli,
    config::kube_proxy::{Answer, ROWS},
    datapath::tables::pins::Pins,
    exit,
    observe::metrics::tests::full_page,
    options::HostPaths,
};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/operations.md");

#[test]
fn the_page_is_what_the_code_says() {
    let page = page();
    if env::var_os("SHEAVE_WRITE_DOCS").is_some() {
        fs::write(PATH, &page).unwrap();
    }
    let written = fs::read_to_string(PATH).unwrap_or_default();
    let difference = page.lines().zip(written.lines().chain(std::iter::repeat(""))).find(|(a, b)| a != b);
    assert!(page == written, "docs/operations.md is out of date, run `cargo xtask docs`: {difference:?}");
}

const HEAD: &str = "\
# Operations

Every flag, port, metric, exit code and file of the agent. `cargo xtask docs` writes this page from the code.

- `sheave status` shows at a glance whether a node is healthy, `sheave svc list` what it should do, `sheave lb list` what
  its kernel does, and `sheave monitor` what happens to connections. The last two work while the agent is down.
- SIGTERM and SIGINT stop the agent. What it put into the kernel stays and keeps working; the next agent adopts it.
- Logs go to stderr: a line for anything that an operator may want to act on, nothing per packet or per object. A
  complaint that does not change is not repeated.
- A manifest takes effect once its writer has closed it, renamed it into place, or been quiet for half a minute; an empty
  one only once it is closed. Until then, and while it cannot be read, its previous content counts, and `status` says so.
- When a map is full, the log, `status` and `sheave_map_pressure` name it, and whatever fits keeps working. Raise its flag:
  a map has its size for as long as it is pinned, so the new one takes effect at the node's next boot, or after `sheave
  cleanup` while no agent runs, which interrupts Services until the agent is back.
";

fn page() -> String {
    let mut page = HEAD.to_owned();
    let p = &mut page;
    section(p, "Exit codes", &["code", "meaning"]);
    for (code, meaning) in exit::CODES {
        row(p, &[&code.to_string(), meaning]);
    }
    endpoints(p);
    files(p);
    flags(p);
    kube_proxy(p);
    metrics(p);
    section(p, "Events of the datapath", &["event", "meaning"]);
    for counter in Counter::ALL {
        row(p, &[&code(counter.name()), counter.meaning().trim()]);
    }
    page
}

fn endpoints(p: &mut String) {
    section(p, "HTTP", &["where", "path", "answer"]);
    for [at, path, answer] in [
        [
            "--healthz-bind-address",
            "/healthz",
            "200 or 503 with kube-proxy 1.36's JSON: should a load balancer send traffic to this node? Not while changes \
             have been waiting for more than a minute, the Node is being deleted, or it has the cluster autoscaler's taint",
        ],
        ["", "/livez", "the same, whatever the Node says: does the agent work?"],
        ["", "/readyz", "200 once everything listed at the start is in the kernel"],
        ["--metrics-bind-address", "/metrics", "[metrics](#metrics) in Prometheus' text format"],
        ["", "/metrics/slis", "how often `/healthz` below was asked, as in every Kubernetes component"],
        ["", "/healthz", "ok"],
        ["", "/proxyMode", "`sheave`, a name of its own, so that nobody mistakes it for one of kube-proxy's modes"],
        ["", "/configz", "every setting and where its value came from, as JSON"],
        [
            "healthCheckNodePort",
            "any",
            "200 or 503, JSON and `X-Load-Balancing-Endpoint-Weight`: the number of ready endpoints that the Service has on this node",
        ],
    ] {
        row(p, &[&code(at), &code(path), answer]);
    }
    p.push_str(
        "\nA bind address of 0.0.0.0 or [::] answers on both families. If a port is taken, for instance by kube-proxy, the \
         agent\nwaits for it. A healthCheckNodePort is served on the addresses of `--nodeport-addresses`.\n",
    );
}

fn files(p: &mut String) {
    let paths = HostPaths::default();
    let pins = Pins::below(&paths.bpffs);
    section(p, "Files and directories", &["path", "what", "removed by"]);
    let mut file = |path: &Path, what: &str, goes: &str| row(p, &[&code(&path.display().to_string()), what, goes]);
    file(&paths.socket(), "the socket that `svc` and `status` talk to; root only", "the next agent, `sheave cleanup`");
    file(&paths.lock(), "locked while an agent runs; free when it dies", "`sheave cleanup`");
    file(&pins.maps(), "pinned maps, see [map-abi.md](map-abi.md); root only", "`sheave cleanup`, a reboot");
    file(&pins.links(), "pinned links, which keep the programs attached", "`sheave cleanup`, a reboot");
    p.push_str("\n`--run-dir` and `--bpffs` move them. Two agents on one host need different ones, like two nodes.\n");
}

fn flags(p: &mut String) {
    let mut cli = Cli::command();
    cli.build();
    let agent = cli.find_subcommand("agent").unwrap();
    let mut by_heading: Vec<(&str, Vec<&Arg>)> = Vec::new();
    for arg in agent.get_arguments().filter(|arg| !arg.is_hide_set() && arg.get_long() != Some("help")) {
        let heading = arg.get_help_heading().unwrap_or("Other");
        match by_heading.iter_mut().find(|(known, _)| *known == heading) {
            Some((_, args)) => args.push(arg),
            None => by_heading.push((heading, vec![arg])),
        }
    }
    p.push_str("\n## Flags of `sheave agent`\n\n");
    p.push_str(
        "A flag takes precedence over its environment variable, that over\n\
         [kube-proxy's flags](#kube-proxys-configuration), and those over `--config`. `--print-config` shows the result.\n",
    );
    for (heading, args) in by_heading {
        let _ = write!(p, "\n### {heading}\n\n| flag | default | environment | meaning |\n|---|---|---|---|\n");
        for arg in args {
            let names = arg.get_value_names().unwrap_or_default();
            let takes_value = arg.get_num_args().is_some_and(|n| n.takes_values());
            let value = if takes_value { format!(" {}", names.join(" ")) } else { String::new() };
            let defaults: Vec<_> = arg.get_default_values().iter().map(|v| v.to_string_lossy()).collect();
            let default = if takes_value { code(&defaults.join(",")) } else { String::new() };
            let variable = arg.get_env().map(|v| code(&v.to_string_lossy())).unwrap_or_default();
            let choices: Vec<_> = arg.get_possible_values().iter().map(|v| code(v.get_name())).collect();
            let choices = if takes_value && !choices.is_empty() && !names.iter().any(|n| *n == "true|false") {
                format!(": {}", choices.join(", "))
            } else {
                String::new()
            };
            let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
            let flag = code(&format!("--{}{value}", arg.get_long().unwrap_or_default()));
            row(p, &[&flag, &default, &variable, &format!("{help}{choices}")]);
        }
    }
}

fn kube_proxy(p: &mut String) {
    section(p, "kube-proxy's configuration", &["flag", "field of KubeProxyConfiguration", "here"]);
    for entry in ROWS {
        let flag = entry.flag.map(|(name, _)| code(&format!("{}{name}", if name == "v" { "-" } else { "--" })));
        let fields: Vec<_> = entry.fields.iter().map(|field| code(field)).collect();
        let here = match entry.answer {
            Answer::Becomes(flag) => code(&format!("--{flag}")),
            Answer::Means(_, what) => what.to_owned(),
            Answer::Nothing(sentence) => sentence.to_owned(),
            Answer::Instead(sentence) => format!("refused: {sentence}"),
        };
        row(p, &[&flag.unwrap_or_default(), &fields.join(", "), &here]);
    }
    p.push_str(
        "\nFlags that are spelt alike mean the same. A file of sheave's own has the flags as fields (`nodeName` for `--node-name`),\n\
         `apiVersion: sheave.io/v1alpha1` and `kind: AgentConfiguration`; `--print-config` prints one.\n",
    );
}

fn metrics(p: &mut String) {
    let text = full_page();
    let about = |what: &str| -> BTreeMap<&str, &str> {
        text.lines().filter_map(|line| line.strip_prefix(what)?.split_once(' ')).collect()
    };
    let (help, types) = (about("# HELP "), about("# TYPE "));
    section(p, "Metrics", &["name", "type", "labels", "meaning"]);
    for (name, kind) in types {
        let first = text.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        let labels = first.split_once('{').and_then(|(_, rest)| rest.rsplit_once('}')).unwrap_or_default().0;
        let labels: Vec<_> = labels
            .split("\",")
            .filter_map(|label| label.split_once('='))
            .map(|(label, _)| label)
            .filter(|label| *label != "le")
            .map(code)
            .collect();
        row(p, &[&code(name), kind, &labels.join(", "), help.get(name).copied().unwrap_or_default()]);
    }
    p.push_str(
        "\n`kubeproxy_…` metrics mean what they mean in kube-proxy. Both families are written together, so both show the same.\n\
         Those about iptables, ipvs, nftables or netfilter's connection tracking do not exist here.\n",
    );
}

fn section(p: &mut String, title: &str, columns: &[&str]) {
    let _ = write!(p, "\n## {title}\n\n| {} |\n|{}\n", columns.join(" | "), "---|".repeat(columns.len()));
}

fn row(p: &mut String, cells: &[&str]) {
    let cells: Vec<_> = cells.iter().map(|cell| cell.replace('|', "\\|").replace('\n', " ")).collect();
    let _ = writeln!(p, "| {} |", cells.join(" | "));
}

fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}
