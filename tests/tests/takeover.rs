//! Taking over from a real kube-proxy on a running node, and the way back.

use std::{collections::BTreeSet, fs, net::IpAddr, path::Path, process::Command, time::Duration};

use anyhow::{Context, Result, ensure};
use sheave_agent::{
    datapath::host::{
        addresses, devices,
        ipvs::Ipvs,
        netlink::{NESTED, attribute, string},
    },
    lifecycle::{
        check::{Finding, Grade},
        takeover::MAY_HIDE,
    },
    view::Items,
};
use sheave_tests::{
    agent::Agent,
    api_server::ApiServer,
    client::{LoadKind, Way},
    kube_proxy::{self, KubeProxy, Mode},
    lab::Lab,
    node::Node,
    objects::{Slice, Svc, node},
    place::program,
    skip,
    wait::{SOON, eventually},
};

const SERVICE: &str = "10.96.0.20:80";
const NODE_PORT: &str = "192.0.2.11:30020";

/// What kubelet, a CNI and an administrator have on a node beside kube-proxy.
const OTHERS: [&str; 12] = [
    "-t mangle -N KUBE-IPTABLES-HINT",
    "-t mangle -N KUBE-KUBELET-CANARY",
    "-t nat -N KUBE-KUBELET-CANARY",
    "-t filter -N KUBE-FIREWALL",
    "-t filter -A KUBE-FIREWALL ! -s 127.0.0.0/8 -d 127.0.0.0/8 -m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT -j DROP",
    "-t filter -I OUTPUT -j KUBE-FIREWALL",
    "-t filter -I INPUT -j KUBE-FIREWALL",
    "-t nat -N CNI-OUT",
    "-t nat -A CNI-OUT -d 10.244.0.0/16 -j ACCEPT",
    "-t nat -A POSTROUTING -s 10.244.1.0/24 -m comment --comment \"cni -j KUBE-SERVICES\" -j CNI-OUT",
    "-t filter -A FORWARD -s 203.0.113.9 -j DROP",
    "-t nat -A PREROUTING -d 203.0.113.1 -j DNAT --to-destination 203.0.113.2",
];

#[test]
fn nftables() -> Result<()> {
    takes_over(Mode::Nftables)
}

#[test]
fn iptables() -> Result<()> {
    takes_over(Mode::Iptables)
}

#[test]
fn iptables_legacy() -> Result<()> {
    takes_over(Mode::IptablesLegacy)
}

#[test]
fn ipvs() -> Result<()> {
    takes_over(Mode::Ipvs)
}

/// Its rules are not taken from it while it runs, wherever it answers.
#[test]
fn a_running_kube_proxy_is_found_wherever_it_listens() -> Result<()> {
    if !kube_proxy::is_available(Mode::Nftables)? {
        return Ok(());
    }
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node1 = lab.n1();
    let Some(api) = ApiServer::start(Some(&node1.host))? else { return Ok(()) };
    let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP");
    let slice = Slice::new("web-1", "web").port("t", 8080, "TCP").ready("10.244.1.10", "n1");
    api.apply(&[&node(1), &web, &slice])?;
    for (metrics, health, words) in [
        ("[::1]:10249", "[::]:10256", "runs, in nftables mode: it answers at [::1]:10249"),
        ("192.0.2.11:10249", "127.0.0.1:9998", "runs, in nftables mode: it answers at 192.0.2.11:10249"),
        ("127.0.0.1:9999", "0.0.0.0:10256", "runs: it answers at 127.0.0.1:10256"),
        ("127.0.0.1:9999", "192.0.2.11:10256", "runs: it answers at 192.0.2.11:10256"),
        ("127.0.0.1:9999", "127.0.0.1:9998", "runs: process "),
    ] {
        let proxy = KubeProxy::start_at(node1, Mode::Nftables, &api.kubeconfig(), metrics, health)?;
        let before = rules(node1)?;
        ensure!(before.iter().any(|rule| rule.contains("10.244.1.10")), "{metrics}: it has rules: {before:#?}");
        let refused = cleanup(node1).err().map(|error| format!("{error:#}")).unwrap_or_default();
        ensure!(refused.contains(words) && refused.contains("stop it first"), "{metrics}, {health}: {refused}");
        ensure!(rules(node1)?.is_superset(&before), "{metrics}, {health}: its rules stay, and may become more");
        proxy.stop()?;
    }
    let unclear = node1.host.echo("unclear", &["10249/TCP"])?;
    let refused = cleanup(node1).err().map(|error| format!("{error:#}")).unwrap_or_default();
    ensure!(refused.contains("127.0.0.1:10249 does not say what it is; stop that first"), "{refused}");
    drop(unclear);
    ensure!(cleanup(node1)?.contains("removed table ip kube-proxy"), "nobody answers any more");
    Ok(())
}

/// `sheave cleanup --kube-proxy` on a node without an agent.
fn cleanup(node: &Node) -> Result<String> {
    let paths = node.paths();
    let mut command = node.host.command(program("sheave")?)?;
    command.args(["cleanup", "--kube-proxy", "--run-dir"]).arg(&paths.run).arg("--bpffs").arg(&paths.bpffs);
    let output = command.output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// Where sheave has both ports and no process is seen, as in the chart's pods, nobody can tell: that is said, not guessed.
#[test]
fn it_is_said_where_a_running_kube_proxy_could_not_be_seen() -> Result<()> {
    if Command::new("nft").arg("--version").output().is_err() {
        skip("the program nft is missing (package nftables)");
        return Ok(());
    }
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let node1 = lab.n1();
    let sheave = |wrapper: &[&str], words: &[&str]| -> Result<String> {
        let sheave = program("sheave")?.display().to_string();
        let line = [wrapper, &[sheave.as_str()], words].concat();
        let output = node1.host.command(line[0])?.args(&line[1..]).args(agent.flags().split(' ')).output()?;
        Ok(String::from_utf8(output.stdout)?)
    };
    for (place, wrapper, is_said) in
        [("on the host", &[][..], false), ("in a pod", &["unshare", "--pid", "--fork", "--mount-proc"], true)]
    {
        node1.host.run("nft", &["add table ip kube-proxy"])?;
        for words in [&["check", "-o", "json"][..], &["cleanup", "--kube-proxy"]] {
            let said = sheave(wrapper, words)?;
            ensure!(said.contains("table ip kube-proxy of nf_tables"), "{place}, {words:?}: {said}");
            ensure!(said.contains(MAY_HIDE) == is_said, "{place}, {words:?}: {said}");
        }
        let said = sheave(wrapper, &["cleanup", "--kube-proxy"])?;
        ensure!(said == "nothing to clean up\n", "{place}, nothing is left: {said}");
    }
    Ok(())
}

/// Legacy iptables is in use and its program is missing, as in the image: the answer is not "nothing".
#[test]
fn what_could_not_be_looked_at_is_not_called_clean() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node1 = lab.n1();
    if node1.host.run("iptables-legacy", &["-t", "nat", "-N", "KUBE-SERVICES"]).is_err() {
        skip("legacy iptables is missing (package iptables), or the kernel's part of it");
        return Ok(());
    }
    let paths = node1.paths();
    for arguments in [&["cleanup", "--kube-proxy"][..], &["cleanup", "--kube-proxy", "--dry-run"]] {
        let mut command = node1.host.command(program("sheave")?)?;
        command.args(arguments).arg("--run-dir").arg(&paths.run).arg("--bpffs").arg(&paths.bpffs);
        let output = command.env("PATH", "/nonexistent").output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(1), "{arguments:?}: {output:?}");
        ensure!(said.starts_with("legacy iptables is in use and iptables-legacy-save is not here"), "{said}");
    }
    ensure!(cleanup(node1)?.contains("removed 1 chains of legacy table nat"));
    Ok(())
}

/// Of some thousand Services with three chains each.
#[test]
fn thousands_of_chains_go_in_one_step() -> Result<()> {
    const RESTORE: &str = "/usr/sbin/iptables-nft-restore";
    if !Path::new(RESTORE).exists() {
        skip("iptables-nft-restore is missing (package iptables)");
        return Ok(());
    }
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let names: Vec<_> = (0..3000).map(|number| format!("KUBE-SVC-{number:016}")).collect();
    let chains: String = names.iter().map(|name| format!(":{name} - [0:0]\n")).collect();
    let jumps: String = names.iter().map(|name| format!("-A KUBE-SERVICES -d 10.96.0.1/32 -j {name}\n")).collect();
    let file = node.paths().run.join("rules");
    let first = ":KUBE-SERVICES - [0:0]";
    fs::write(&file, format!("*nat\n{first}\n{chains}-A PREROUTING -j KUBE-SERVICES\n{jumps}COMMIT\n"))?;
    node.host.run(RESTORE, &[&file.display().to_string()])?;
    ensure!(rules(node)?.len() > 2 * names.len());
    let removed = cleanup(node)?;
    ensure!(removed.contains("3001 chains of table ip nat and 1 jumps"), "{removed}");
    ensure!(rules(node)?.is_empty() && cleanup(node)?.starts_with("nothing to clean up"));
    Ok(())
}

/// In ipvs mode it puts the address of every Service on a device. What kind it is does not matter, and not every kernel
/// has dummies.
#[test]
fn addresses_on_its_device_are_not_the_nodes() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let host = &lab.n1().host;
    let seen = || -> Result<(BTreeSet<IpAddr>, BTreeSet<IpAddr>)> {
        host.enter(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let (addresses, devices) = (addresses::follow().await?, devices::follow().await?);
                let of_devices = devices.borrow().iter().flat_map(|device| device.addresses.clone()).collect();
                Ok((addresses.borrow().iter().copied().collect(), of_devices))
            })
        })?
    };
    let before = seen()?;
    host.ip("link add kube-ipvs0 type bridge
         address add 10.96.0.20/32 dev kube-ipvs0
         address add fd00:96::20/128 dev kube-ipvs0 nodad
         link add mine type bridge
         address add 203.0.113.7/32 dev mine")?;
    let mine: IpAddr = "203.0.113.7".parse()?;
    let with_mine = |set: &BTreeSet<IpAddr>| set | &BTreeSet::from([mine]);
    ensure!(seen()? == (with_mine(&before.0), with_mine(&before.1)), "{:?}, before: {before:?}", seen()?);
    Ok(())
}

/// IPVS leaves no owner on its virtual servers: they go with kube-proxy's device, and stay without it.
#[test]
fn virtual_servers_go_where_the_device_is() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let (node, host) = (lab.n1(), &lab.n1().host);
    let Some(()) = host.enter(virtual_server)?? else {
        skip("this kernel has no IPVS");
        return Ok(());
    };
    let servers = || -> Result<Option<usize>> {
        Ok(host.enter(|| Ipvs::open()?.map(|ipvs| ipvs.virtual_servers()).transpose())??)
    };
    ensure!(
        cleanup(node)?.starts_with("nothing to clean up") && servers()? == Some(1),
        "without the device it is not kube-proxy's"
    );
    host.ip("link add kube-ipvs0 type dummy")?;
    let removed = cleanup(node)?;
    for line in ["device kube-ipvs0", "every virtual server of IPVS (1)"] {
        ensure!(removed.contains(line), "{removed}");
    }
    ensure!(servers()? == Some(0), "{removed}");
    ensure!(cleanup(node)?.starts_with("nothing to clean up"));
    Ok(())
}

/// Makes 10.96.0.20:80/TCP, round robin; `None` where the kernel cannot.
fn virtual_server() -> Result<Option<()>> {
    const NEW_SERVICE: u8 = 1;
    const SERVICE: u16 = 1;
    let Some(ipvs) = Ipvs::open()? else { return Ok(None) };
    let address = [[10, 96, 0, 20].as_slice(), &[0; 12]].concat();
    let service = [
        attribute(1, &2_u16.to_ne_bytes()), // AF_INET
        attribute(2, &6_u16.to_ne_bytes()), // TCP
        attribute(3, &address),
        attribute(4, &80_u16.to_be_bytes()),
        string(6, "rr"),
        attribute(7, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), // no flag, of all
        attribute(8, &[0; 4]),                               // no timeout
        attribute(9, &[0xff; 4]),                            // netmask
    ];
    ipvs.change(NEW_SERVICE, attribute(SERVICE | NESTED, &service.concat())).context("cannot make a virtual server")?;
    Ok(Some(()))
}

fn takes_over(mode: Mode) -> Result<()> {
    if !kube_proxy::is_available(mode)? {
        return Ok(());
    }
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node1 = lab.n1();
    let Some(api) = ApiServer::start(Some(&node1.host))? else { return Ok(()) };
    let _servers = [node1.server(10, "A")?, node1.server(11, "B")?];
    let (pod, outside) = (node1.pod(20)?, lab.outside.client()?);
    let client = pod.place.client()?;
    let web = Svc::new("web").ip("10.96.0.20").port("t", 80, "TCP").node_port(30_020);
    let web = web.port("u", 80, "UDP").node_port(30_020);
    let slice = |address: &str| {
        let slice = Slice::new("web-1", "web").port("t", 8080, "TCP").port("u", 8080, "UDP");
        slice.ready(address, "n1")
    };
    api.apply(&[&node(1), &web, &slice("10.244.1.10")])?;

    let iptables = if mode == Mode::IptablesLegacy { "iptables-legacy" } else { "iptables-nft" };
    for rule in OTHERS {
        node1.host.run("sh", &["-c", &format!("{iptables} {rule}")])?;
    }
    node1.host.run("nft", &["add table inet mine; add chain inet mine c; add rule inet mine c tcp dport 9 drop"])?;
    let before = rules(node1)?;

    let proxy = KubeProxy::start(node1, mode, &api.kubeconfig())?;
    eventually("kube-proxy serves", SOON, || {
        ensure!(client.dial(Way::Tcp, SERVICE)?.name == "A" && outside.dial(Way::Tcp, NODE_PORT)?.name == "A");
        Ok(())
    })?;
    let open = client.connect(Way::Tcp, SERVICE)?;
    let from_outside = outside.connect(Way::Tcp, NODE_PORT)?;
    let datagrams = client.connect(Way::Udp, SERVICE)?;
    ensure!([&open, &from_outside, &datagrams].iter().all(|socket| socket.ask().is_ok()));

    // Beside it, sheave serves new connections, and says who else is there.
    let mut agent = node1.agent_of(&api.kubeconfig())?;
    agent.expect(
        "web",
        &[
            "10.96.0.20:80/TCP → 10.244.1.10:8080",
            "10.96.0.20:80/UDP → 10.244.1.10:8080",
            "192.0.2.11:30020/TCP → 10.244.1.10:8080",
            "192.0.2.11:30020/UDP → 10.244.1.10:8080",
        ],
    )?;
    let word = if mode == Mode::IptablesLegacy { "iptables".to_owned() } else { format!("{mode:?}").to_lowercase() };
    says(&agent, Grade::Warn, &format!("runs, in {word} mode"))?;
    let refused = agent.sheave(&["cleanup", "--kube-proxy"]).map_err(|error| format!("{error:#}"));
    ensure!(refused.as_ref().is_err_and(|error| error.contains("stop it first")), "{refused:?}");

    let load = client.load(Way::Tcp, LoadKind::Dial, SERVICE, Duration::from_millis(2))?;
    let outside_load = outside.load(Way::Tcp, LoadKind::Dial, NODE_PORT, Duration::from_millis(2))?;
    proxy.stop()?;
    says(&agent, Grade::Warn, "left")?;
    // Nobody tells kube-proxy's UDP flows any more that their backend is gone.
    api.apply(&[&slice("10.244.1.11")])?;
    eventually("sheave follows", SOON, || {
        ensure!(client.dial(Way::Udp, SERVICE)?.name == "B");
        Ok(())
    })?;
    ensure!(flows(node1, "udp")? > 0, "the flow is still there");

    let full = rules(node1)?;
    let would = agent.sheave(&["cleanup", "--kube-proxy", "--dry-run"])?;
    ensure!(would.contains("would remove") && rules(node1)? == full, "a dry run changes nothing: {would}");
    let removed = agent.sheave(&["cleanup", "--kube-proxy"])?;
    ensure!(removed.replace("removed", "would remove") == would, "{removed}");
    let after = rules(node1)?;
    let differ: Vec<_> = after.symmetric_difference(&before).collect();
    ensure!(differ.is_empty(), "others' rules are as they were, but for {differ:#?}");
    ensure!(flows(node1, "udp")? == 0, "stale flows are gone");
    ensure!(agent.sheave(&["cleanup", "--kube-proxy"])?.starts_with("nothing to clean up"));
    says(&agent, Grade::Ok, "not a trace")?;
    for (name, socket) in [("inside", &open), ("outside", &from_outside)] {
        let answer =
            socket.ask().with_context(|| format!("{name}: a connection of kube-proxy's outlives its rules"))?;
        ensure!(answer.answer.name == "A", "{name}: {answer:?}");
    }
    for load in [load, outside_load] {
        let report = load.stop()?;
        ensure!(report.failed == 0 && report.answered > 0, "{report:?}");
    }

    // And back: the kernel serves without the agent until kube-proxy has its rules.
    agent.terminate()?;
    let _proxy = KubeProxy::start(node1, mode, &api.kubeconfig())?;
    agent.sheave(&["cleanup"])?;
    for (name, client, to) in [("inside", &client, SERVICE), ("outside", &outside, NODE_PORT)] {
        let dialled = client.dial(Way::Tcp, to).with_context(|| format!("{name}, on the way back"))?;
        ensure!(dialled.name == "B", "{name}: kube-proxy serves again");
    }
    Ok(())
}

/// Every rule of the node and every chain that is not one of the kernel's: a line each, without counters. What stays of
/// kube-proxy's is kubelet's jump for IPv6, which both make and neither removes.
fn rules(node: &Node) -> Result<BTreeSet<String>> {
    let text = node.host.run("nft", &["-s", "list", "ruleset"])?;
    let (mut table, mut chain, mut found) = ("", "", BTreeSet::new());
    for line in text.lines().map(str::trim) {
        match line.split_once(' ') {
            Some(("table", name)) => table = name,
            Some(("chain", name)) => {
                chain = name;
                found.insert(format!("{table} {chain}"));
            }
            Some(("type", _)) => drop(found.remove(&format!("{table} {chain}"))),
            Some(_) => drop(found.insert(format!("{table} {chain} {line}"))),
            None => {}
        }
    }
    for (names, save) in [("ip_tables_names", "iptables-legacy-save"), ("ip6_tables_names", "ip6tables-legacy-save")] {
        let saved = node.host.run("sh", &["-c", &format!("test ! -s /proc/net/{names} || {save}")])?;
        let lines = saved.lines().filter(|line| line.starts_with("-A") || line.contains(" - ["));
        found.extend(lines.map(|line| format!("{save} {}", line.split(" [").next().unwrap_or_default())));
    }
    found.retain(|rule| !(rule.contains("6") && rule.contains("KUBE-FIREWALL") && !rule.contains("127.0.0.0")));
    Ok(found)
}

/// Conntrack entries of a protocol that lead to the Service.
fn flows(node: &Node, protocol: &str) -> Result<usize> {
    let list = node.host.run("conntrack", &["-L", "-p", protocol, "-d", "10.96.0.20"])?;
    Ok(list.lines().filter(|line| line.contains("src=10.244.1.10 ")).count())
}

/// Waits until `sheave check` says so of kube-proxy.
fn says(agent: &Agent, grade: Grade, words: &str) -> Result<()> {
    eventually("sheave check says so", SOON, || {
        // Not by `Agent::sheave`: what is missing on this host makes the command fail.
        let mut command = agent.place().command(program("sheave")?)?;
        let output = command.args(["check", "-o", "json"]).args(agent.flags().split(' ')).output()?;
        let findings: Items<Finding> = serde_json::from_slice(&output.stdout)?;
        let finding = findings.items.iter().find(|finding| finding.name == "kube-proxy");
        ensure!(finding.is_some_and(|f| f.status == grade && f.found.contains(words)), "{finding:?}");
        Ok(())
    })
}
