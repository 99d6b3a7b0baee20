//! The Helm chart: what it renders, what it refuses, and that it knows every flag of the agent.
//!
//! What is rendered is kept in `testdata/helm`; after a wanted change, `SHEAVE_BLESS=1` writes it anew.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, Result, bail, ensure};
use clap::{CommandFactory, Parser};
use serde_json::Value;
use sheave_agent::cli::Cli;
use sheave_tests::{api_server::programs, skip};

/// A cluster that has everything the chart makes a difference for.
const KUBERNETES: &str = "1.36.3";

/// A set of values, and which templates of it are compared; none = all.
struct Golden {
    name: &'static str,
    kubernetes: &'static str,
    templates: &'static [&'static str],
}

const DAEMON_SET: &[&str] = &["daemonset"];
const GOLDEN: [Golden; 6] = [
    Golden { name: "minimal", kubernetes: KUBERNETES, templates: &[] },
    Golden { name: "everything", kubernetes: KUBERNETES, templates: &["daemonset", "serviceaccount", "rbac"] },
    // Before 1.30 AppArmor's profile is an annotation.
    Golden { name: "old-kubernetes", kubernetes: "1.29.0", templates: DAEMON_SET },
    Golden { name: "external-accounts", kubernetes: KUBERNETES, templates: &[] },
    Golden { name: "cleanup", kubernetes: KUBERNETES, templates: DAEMON_SET },
    Golden {
        name: "monitoring",
        kubernetes: KUBERNETES,
        templates: &["service", "servicemonitor", "podmonitor", "prometheusrule"],
    },
];

/// The program and the chart.
struct Helm {
    program: PathBuf,
    chart: PathBuf,
    data: PathBuf,
}

impl Helm {
    /// `None` when Helm is not there; the running test is then skipped.
    fn find() -> Result<Option<Self>> {
        let program = programs()?.join("helm");
        if !program.exists() {
            skip(&format!("{} is missing: run `cargo xtask kubernetes helm`", program.display()));
            return Ok(None);
        }
        let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
        Ok(Some(Self { program, chart: tests.join("../helm"), data: tests.join("testdata/helm") }))
    }

    fn run(&self, command: &[&str], args: &[String]) -> Result<Output> {
        let mut helm = Command::new(&self.program);
        helm.args(command).arg(&self.chart).args(args);
        // Nobody's own configuration.
        let home = env::temp_dir().join("sheave-helm");
        helm.env("HELM_CACHE_HOME", &home).env("HELM_CONFIG_HOME", &home).env("HELM_DATA_HOME", &home);
        helm.output().with_context(|| format!("cannot start {}", self.program.display()))
    }

    /// What is rendered, or the message of the refusal.
    fn template(&self, kubernetes: &str, args: &[String]) -> Result<Result<String, String>> {
        let kubernetes = format!("--kube-version={kubernetes}");
        let output = self.run(&["template", "sheave", "--namespace=kube-system", &kubernetes], args)?;
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        Ok(if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) })
    }

    /// The arguments of the container, rendered.
    fn command_line(&self, args: &[String]) -> Result<Vec<String>> {
        let only = ["--show-only=templates/daemonset.yaml".to_owned()];
        let rendered = self.template(KUBERNETES, &[args, &only].concat())?.map_err(anyhow::Error::msg)?;
        let daemon_set: Value = serde_saphyr::from_str(&rendered)?;
        let words = &daemon_set["spec"]["template"]["spec"]["containers"][0]["args"];
        Ok(serde_json::from_value(words.clone())?)
    }

    fn values(&self, name: &str) -> String {
        format!("--values={}", self.data.join(format!("{name}.values.yaml")).display())
    }
}

/// `--set` for each.
fn set(values: &[&str]) -> Vec<String> {
    values.iter().map(|value| format!("--set={value}")).collect()
}

fn yaml(path: &Path) -> Result<Value> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    serde_saphyr::from_str(&text).with_context(|| path.display().to_string())
}

fn keys(object: &Value) -> BTreeSet<String> {
    object.as_object().into_iter().flatten().map(|(key, _)| key.clone()).collect()
}

#[test]
fn what_is_rendered_is_what_was_agreed_on() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    for Golden { name, kubernetes, templates } in GOLDEN {
        let mut args = vec![helm.values(name)];
        args.extend(templates.iter().map(|template| format!("--show-only=templates/{template}.yaml")));
        let rendered = helm.template(kubernetes, &args)?.map_err(anyhow::Error::msg).context(name)?;
        let path = helm.data.join(format!("{name}.golden.yaml"));
        if env::var_os("SHEAVE_BLESS").is_some() {
            fs::write(&path, &rendered)?;
        }
        let agreed = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let differs = rendered.lines().zip(agreed.lines()).position(|(rendered, agreed)| rendered != agreed);
        let line = differs.unwrap_or_else(|| rendered.lines().count().min(agreed.lines().count()));
        ensure!(
            rendered == agreed,
            "{}:{}: rendered is {:?}; if that is wanted, run the test with SHEAVE_BLESS=1",
            path.display(),
            line + 1,
            rendered.lines().nth(line).unwrap_or("nothing more"),
        );
    }
    Ok(())
}

#[test]
fn what_cannot_work_is_refused_with_a_reason() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let cases: &[(&str, &[&str], &str)] = &[
        ("39a: no address of the API server", &[], "The address of the API server is missing"),
        ("a port alone is no address", &["apiServer.port=443"], "The address of the API server is missing"),
        ("two answers", &["apiServer.host=a", "apiServer.urls={https://b}"], "Only one of apiServer.host and"),
        ("manifests and a cluster", &["apiServer.host=a", "agent.manifests=/m"], "Only one of"),
        ("a host with a scheme", &["apiServer.host=https://a"], "/apiServer/host"),
        ("a host with a port", &["apiServer.host=a:6443"], "/apiServer/host"),
        ("a URL without a scheme", &["apiServer.urls={a:6443}"], "/apiServer/urls/0"),
        ("a URL with a path", &["apiServer.urls={https://a/api}"], "/apiServer/urls/0"),
        ("no port of TCP", &["apiServer.port=65536"], "/apiServer/port"),
        ("an unknown flag", &["agent.maxFrontend=1"], "additional properties 'maxFrontend'"),
        ("an unknown value", &["tolerate=all"], "additional properties 'tolerate'"),
        ("a word for a number", &["agent.maxFrontends=many"], "/agent/maxFrontends"),
        ("an empty map", &["agent.maxPeers=0"], "/agent/maxPeers"),
        ("a map beyond the agent's limit", &["agent.maxAffinity=16777217"], "/agent/maxAffinity"),
        ("no such algorithm", &["agent.lbAlgorithm=rr"], "/agent/lbAlgorithm"),
        ("a word for a boolean", &["agent.closeTcp=yes-please"], "/agent/closeTcp"),
        ("a relative path", &["agent.bpffs=bpf"], "/agent/bpffs"),
        ("no network", &["agent.externalIpCidrs={203.0.113.7}"], "/agent/externalIpCidrs/0"),
        ("neither word nor network", &["agent.nodeportAddresses={eth0}"], "/agent/nodeportAddresses/0"),
        ("no address to bind", &["agent.healthzBindAddress=everywhere"], "/agent/healthzBindAddress"),
        ("no range of ports", &["agent.snatPorts=10000"], "/agent/snatPorts"),
        ("a bit that a mark does not have", &["agent.markBit=32"], "/agent/markBit"),
        ("a Service without namespace", &["agent.skipServices={web}"], "/agent/skipServices/0"),
        ("a capability too much", &["capabilities={BPF,NET_ADMIN,SYS_MODULE}"], "/capabilities/2"),
        ("a capability too few", &["capabilities={BPF}"], "/capabilities"),
        (
            "a name for a capability that the API does not know",
            &["capabilities={CAP_BPF,NET_ADMIN}"],
            "/capabilities/0",
        ),
        ("two agents on a node", &["updateStrategy.rollingUpdate.maxSurge=1"], "/rollingUpdate/maxSurge"),
        ("an update that never begins", &["updateStrategy.rollingUpdate.maxUnavailable=0%"], "/maxUnavailable"),
        ("a profile without name", &["seccompProfile.type=Localhost"], "/seccompProfile"),
        ("half a digest", &["image.digest=sha256:0123"], "/image/digest"),
        ("a monitor of metrics on loopback", &["apiServer.host=a", "podMonitor.enabled=true"], "cannot reach metrics"),
        (
            "a monitor of metrics on IPv6 loopback",
            &["apiServer.host=a", "serviceMonitor.enabled=true", "agent.metricsBindAddress=[::1]:10249"],
            "cannot reach metrics",
        ),
        ("no configuration of kube-proxy", &["apiServer.host=a", "kubeProxyConfig=kind: Pod"], "its kind is \"Pod\""),
        (
            "a cgroup of the node's own, elsewhere",
            &["apiServer.host=a", "agent.cgroupRoot=/cgroups/$(NODE_NAME)"],
            "it cannot differ from node to node",
        ),
        ("an empty file for one", &["apiServer.host=a", "kubeProxyConfig="], "kubeProxyConfig is given but empty"),
        ("no YAML", &["apiServer.host=a", "kubeProxyConfig=: :"], "is not a KubeProxyConfiguration"),
    ];
    for (name, values, reason) in cases {
        match helm.template(KUBERNETES, &set(values))? {
            Err(message) => ensure!(message.contains(reason), "{name}: {message}"),
            Ok(_) => bail!("{name}: it was rendered"),
        }
    }
    Ok(())
}

#[test]
fn the_api_server_is_named_by_urls() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let cases: &[(&[&str], &str)] = &[
        (&["apiServer.host=192.0.2.1"], "--api-server=https://192.0.2.1:6443"),
        (&["apiServer.host=api.example.com", "apiServer.port=443"], "--api-server=https://api.example.com:443"),
        (&["apiServer.host=2001:db8::1"], "--api-server=https://[2001:db8::1]:6443"),
        (&["apiServer.urls={https://a:1,https://b:2}"], "--api-server=https://a:1,https://b:2"),
        (&["apiServer.inCluster=true"], ""),
        (&["agent.kubeconfig=/k"], ""),
        (&["agent.manifests=/m"], ""),
    ];
    for (values, expected) in cases {
        let words = helm.command_line(&set(values))?;
        let found = words.iter().find(|word| word.starts_with("--api-server")).map_or("", String::as_str);
        ensure!(found == *expected, "{values:?}: {found}");
    }
    Ok(())
}

/// Given by other means than a value of the same name: `apiServer`, `kubeProxyConfig`, the pod's node.
const ELSEWHERE: [&str; 5] = ["help", "print-config", "api-server", "config", "node-name"];

#[test]
fn every_flag_of_the_agent_is_a_value_and_every_value_a_flag() -> Result<()> {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../helm");
    let cli = Cli::command();
    let agent = cli.find_subcommand("agent").context("there is no command `agent`")?;
    let flags = agent.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(clap::Arg::get_long);
    let flags = flags.filter(|flag| !ELSEWHERE.contains(flag));
    let flags: BTreeSet<String> = flags.map(camel_case).collect();
    ensure!(flags.len() > 20, "only {} flags were found", flags.len());

    let values = yaml(&chart.join("values.yaml"))?;
    assert_eq!(keys(&values["agent"]), flags, "`agent` in values.yaml, and the flags");
    let schema = yaml(&chart.join("values.schema.json"))?;
    assert_eq!(keys(&schema["properties"]["agent"]["properties"]), flags, "the schema, and the flags");
    let mut known = keys(&schema["properties"]);
    known.remove("global"); // Helm's own
    assert_eq!(keys(&values), known, "values.yaml and its schema");
    Ok(())
}

fn camel_case(flag: &str) -> String {
    let mut words = flag.split('-');
    let first = words.next().unwrap_or_default().to_owned();
    let capital = |word: &str| word[..1].to_uppercase() + &word[1..];
    first + &words.map(capital).collect::<String>()
}

#[test]
fn the_agent_understands_what_the_chart_says() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let name = "everything";
    let set_there = yaml(&helm.data.join(format!("{name}.values.yaml")))?;
    let all = keys(&yaml(&helm.chart.join("values.yaml"))?["agent"]);
    let set_there = keys(&set_there["agent"]);
    let left_out: Vec<_> = all.difference(&set_there).collect();
    assert_eq!(left_out, ["manifests"], "{name} sets every flag that can stand beside the others");
    for args in [vec![helm.values(name), "--set=extraArgs=null".to_owned()], set(&["agent.manifests=/m"])] {
        let words = helm.command_line(&args)?;
        let line = ["sheave"].into_iter().chain(words.iter().map(String::as_str));
        Cli::try_parse_from(line).with_context(|| format!("{words:?}"))?;
    }
    let words = helm.command_line(&[helm.values("cleanup")])?;
    Cli::try_parse_from(["sheave"].into_iter().chain(words.iter().map(String::as_str)))?;
    Ok(())
}

#[test]
fn kube_proxys_configuration_is_handed_to_the_agent_without_its_credentials() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    let file = env::temp_dir().join(format!("sheave-helm-{}.conf", std::process::id()));
    let config = "kind: KubeProxyConfiguration\nmode: ipvs\nhealthzBindAddress: '[::]:1'\nmetricsBindAddress: ''\n\
                  clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}\n";
    fs::write(&file, config)?;
    let mut args = set(&["apiServer.inCluster=true", "agent.metricsBindAddress=0.0.0.0:2", "podMonitor.enabled=true"]);
    args.push(format!("--set-file=kubeProxyConfig={}", file.display()));
    let rendered = helm.template(KUBERNETES, &args);
    let words = helm.command_line(&args);
    fs::remove_file(&file)?;
    let documents = serde_saphyr::from_multiple::<Value>(&rendered?.map_err(anyhow::Error::msg)?)?;
    let of_kind = |kind| documents.iter().find(|d| d["kind"] == kind).with_context(|| format!("no {kind}"));

    assert_eq!(words?, ["agent", "--config=/etc/kube-proxy/config.conf", "--metrics-bind-address=0.0.0.0:2"]);
    let text = of_kind("ConfigMap")?["data"]["config.conf"].as_str().context("no text")?;
    let expected = "healthzBindAddress: '[::]:1'\nkind: KubeProxyConfiguration\nmetricsBindAddress: \"\"\nmode: ipvs\n";
    assert_eq!(text, expected);
    let pod = &of_kind("DaemonSet")?["spec"]["template"];
    let container = &pod["spec"]["containers"][0];
    let ports: Vec<_> = container["ports"].as_array().into_iter().flatten().map(|p| &p["containerPort"]).collect();
    assert_eq!(ports, [1, 2], "of the configuration, and of the value that wins over it");
    ensure!(pod["metadata"]["annotations"]["checksum/config"].is_string(), "a change starts the agents anew");
    let name = &of_kind("ConfigMap")?["metadata"]["name"];
    let volumes = pod["spec"]["volumes"].as_array().context("no volumes")?;
    let volume = volumes.iter().find(|v| v["configMap"]["name"] == *name).context("the ConfigMap is not mounted")?;
    let mounts = container["volumeMounts"].as_array().context("no mounts")?;
    let mount = mounts.iter().find(|m| m["name"] == volume["name"]).context("the volume is not mounted")?;
    assert_eq!(mount["mountPath"], "/etc/kube-proxy");
    Ok(())
}

#[test]
fn no_values_ask_for_more_than_is_needed() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    // The last is an extra volume.
    let paths =
        ["/sys/fs/bpf", "/sys/fs/cgroup", "/run/sheave", "/var/run/netns", "/proc/sys/net/netfilter", "/etc/sheave"];
    let right = |group: &str, resources: &[&str], verbs: &[&str]| serde_json::json!({"apiGroups": [group], "resources": resources, "verbs": verbs});
    let rights = [
        right("", &["services", "nodes"], &["list", "watch"]),
        right("discovery.k8s.io", &["endpointslices"], &["list", "watch"]),
        right("networking.k8s.io", &["servicecidrs"], &["list", "watch"]),
    ];
    let events = right("events.k8s.io", &["events"], &["create", "patch"]);
    // With rbac.events=services; else in the namespace of Nodes' events.
    let on_services = [right("", &["services"], &["get"]), events.clone()];
    // docs/security.md says what for. The last is asked of by values of kernels before 5.11.
    let capabilities = ["BPF", "NET_ADMIN", "PERFMON", "SYS_ADMIN", "SYS_RESOURCE"];
    for Golden { name, kubernetes, .. } in GOLDEN {
        let rendered = helm.template(kubernetes, &[helm.values(name)])?.map_err(anyhow::Error::msg).context(name)?;
        for document in serde_saphyr::from_multiple::<Value>(&rendered).context(name)? {
            for rule in document["rules"].as_array().into_iter().flatten() {
                let is_about_nodes = document["kind"] == "Role" && document["metadata"]["namespace"] == "default";
                let may = rights.contains(rule)
                    || (is_about_nodes && *rule == events)
                    || (name == "everything" && on_services.contains(rule));
                ensure!(may, "{name}: {rule}");
            }
            if document["kind"] != "DaemonSet" {
                continue;
            }
            let pod = &document["spec"]["template"]["spec"];
            ensure!(pod["hostPID"].is_null() && pod["hostIPC"].is_null(), "{name}: {pod}");
            for container in ["initContainers", "containers"].iter().filter_map(|of| pod[of].as_array()).flatten() {
                let context = &container["securityContext"];
                ensure!(
                    context["privileged"] == false && context["allowPrivilegeEscalation"] == false,
                    "{name}: {context}"
                );
                ensure!(context["readOnlyRootFilesystem"] == true, "{name}: {context}");
                ensure!(context["capabilities"]["drop"] == serde_json::json!(["ALL"]), "{name}: {context}");
                let added: Vec<String> = serde_json::from_value(context["capabilities"]["add"].clone())?;
                ensure!(added.iter().all(|one| capabilities.contains(&one.as_str())), "{name}: {context}");
            }
            for volume in pod["volumes"].as_array().into_iter().flatten() {
                let path = volume["hostPath"]["path"].as_str().with_context(|| format!("{name}: {volume}"))?;
                ensure!(paths.iter().any(|p| Path::new(path).starts_with(p)), "{name}: {path} is mounted");
            }
        }
    }
    Ok(())
}

#[test]
fn helm_has_nothing_to_complain_about() -> Result<()> {
    let Some(helm) = Helm::find()? else { return Ok(()) };
    for Golden { name, kubernetes, .. } in GOLDEN {
        let args = [helm.values(name), format!("--kube-version={kubernetes}"), "--strict".into(), "--quiet".into()];
        let output = helm.run(&["lint"], &args)?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.success() && !said.contains("[WARNING]"), "{name}: {said}");
    }
    Ok(())
}
