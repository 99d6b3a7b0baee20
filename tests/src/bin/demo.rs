//! `cargo xtask demo`: the manifests of `docs/examples/`, two nodes, some pods, an outside client; shows what a reader of
//! the README would try first.

use std::{
    env, fs,
    io::{IsTerminal, stdout},
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use sheave_tests::{
    agent::Agent,
    client::{Client, Errno, Way},
    lab::Lab,
    leftovers,
    node::{Node, Pod},
    objects,
    place::Place,
    wait::{SOON, eventually},
};

/// Prefix of everything the demo makes; no test uses it, so no test sweeps it away.
const NAME: &str = "sheave-demo";

fn main() -> Result<()> {
    let args: Vec<_> = env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => show(false),
        ["--keep"] => show(true),
        ["--down"] => {
            leftovers::remove(NAME);
            println!("The demo is gone.");
            Ok(())
        }
        _ => bail!("usage: cargo xtask demo [--keep | --down]"),
    }
}

fn show(keep: bool) -> Result<()> {
    title("A network: two nodes, five pods, a client outside");
    let lab = Lab::named(NAME, 2, !keep)?;
    let (n1, n2) = (lab.n1(), lab.n2());
    println!(
        "  outside 198.51.100.10 ── router ─┬─ n1 192.0.2.11 ── web-a 10.244.1.10, dns 10.244.1.53, client 10.244.1.20
                                   └─ n2 192.0.2.12 ── web-b 10.244.2.10, web-c 10.244.2.11"
    );
    let pod = |node: &Node, number, name: &str, ports: &[&str]| -> Result<Pod> {
        let pod = node.pod(number)?;
        std::mem::forget(pod.place.echo(name, ports)?); // ends with the lab
        Ok(pod)
    };
    pod(n1, 10, "web-a", &["8080/TCP"])?;
    pod(n2, 10, "web-b", &["8080/TCP"])?;
    pod(n2, 11, "web-c", &["8080/TCP"])?;
    pod(n1, 53, "dns", &["5300/UDP", "5300/TCP"])?;
    let client_pod = n1.pod(20)?;

    title("The objects of docs/examples/ become the agents' manifests; an agent starts on each node");
    lab.delete(&[&objects::node(1), &objects::node(2)])?;
    for file in examples()? {
        fs::copy(&file, lab.manifests.join(file.file_name().context("no name")?))?;
    }
    let start = Instant::now();
    let mut agents = [n1.agent()?, n2.agent()?];
    println!("  both ready after {:.1} s", start.elapsed().as_secs_f64());

    title("What the agent of n1 wants, and what its kernel has");
    print(&agents[0], &["svc", "list", "-A"])?;
    println!();
    print(&agents[0], &["lb", "list", "-A"])?;

    let client = client_pod.place.client()?;
    let others = [("n1", n1.host.client()?), ("n2", n2.host.client()?)];
    title("A pod connects by IPv4, IPv6 and a v4-mapped address, by UDP, connected and not, and to an empty Service");
    dial("pod", &client, Way::Tcp, "10.96.0.20:80", 10)?;
    dial("pod", &client, Way::Tcp, "[2001:db8:f::20]:80", 10)?;
    dial("pod", &client, Way::Tcp, "[::ffff:10.96.0.20]:80", 10)?;
    dial("pod", &client, Way::Udp, "10.96.0.10:53", 3)?;
    dial("pod", &client, Way::UdpSendto, "10.96.0.10:53", 3)?;
    dial("pod", &client, Way::Tcp, "10.96.0.10:53", 3)?;
    dial("pod", &client, Way::Tcp, "10.96.0.30:80", 1)?;
    title("The nodes themselves connect, by ClusterIP and by NodePort");
    for (name, client) in &others {
        dial(name, client, Way::Tcp, "10.96.0.20:80", 10)?;
        dial(name, client, Way::Tcp, "127.0.0.1:30080", 10)?;
    }
    title("The client outside connects to NodePorts, and to a load-balancer address that the router sends to n1");
    lab.route("203.0.113.0/24", n1)?;
    let outside = lab.outside.client()?;
    for to in ["192.0.2.11:30080", "192.0.2.12:30080", "[2001:db8::11]:30080", "203.0.113.20:80"] {
        dial("outside", &outside, Way::Tcp, to, 10)?;
    }

    scale(&lab, &client)?;
    outlive(&mut agents[0], &client)?;
    if keep {
        title("Left running; to explore it, as root");
        explain(&lab, &client_pod.place, &agents[0])?;
    } else {
        title("Everything is removed again; `cargo xtask demo --keep` leaves it running");
    }
    Ok(())
}

/// One line of a manifest changes; connections follow.
fn scale(lab: &Lab, client: &Client) -> Result<()> {
    title("A third backend: one line of web.yaml changes");
    let file = lab.manifests.join("web.yaml");
    let before = fs::read_to_string(&file)?;
    let after = before.replace("#- {addresses: [10.244.2.11]", "- {addresses: [10.244.2.11]");
    ensure!(before != after, "docs/examples/web.yaml has no endpoint that is commented out");
    fs::write(&file, after)?;
    let start = Instant::now();
    eventually("web-c answers", SOON, || {
        let name = client.dial(Way::Tcp, "10.96.0.20:80")?.name;
        ensure!(name == "web-c", "{name} answers");
        Ok(())
    })?;
    println!("  web-c answered {} ms after the change", start.elapsed().as_millis());
    dial("pod", client, Way::Tcp, "10.96.0.20:80", 30)
}

/// The agent is killed; connections do not notice.
fn outlive(agent: &mut Agent, client: &Client) -> Result<()> {
    title("The agent of n1 is killed with -9: the kernel keeps forwarding, and the next agent adopts what it finds");
    agent.kill()?;
    dial("pod", client, Way::Tcp, "10.96.0.20:80", 30)?;
    let start = Instant::now();
    agent.restart()?;
    println!("  the next agent was ready after {} ms", start.elapsed().as_millis());
    dial("pod", client, Way::Tcp, "10.96.0.20:80", 30)
}

/// Dials some times and says who answered.
fn dial(from: &str, client: &Client, way: Way, to: &str, times: usize) -> Result<()> {
    let how = match way {
        Way::Tcp | Way::Mptcp => "TCP",
        Way::Udp => "UDP, connect and send",
        Way::UdpSendto => "UDP, sendto",
        Way::Ping => "ping",
    };
    let what = format!("{from} → {to} ({how})");
    match client.dial_many(way, to, times) {
        Ok(names) => {
            let names: Vec<_> = names.iter().map(|(name, times)| format!("{name} ×{times}")).collect();
            println!("  {what:<52} {}", names.join("  "));
        }
        Err(error) => match error.downcast_ref::<Errno>() {
            Some(errno) => println!("  {what:<52} {} after {} ms", errno.name, errno.after.as_millis()),
            None => return Err(error.context(what)),
        },
    }
    Ok(())
}

/// A command of the command line and what it prints.
fn print(agent: &Agent, args: &[&str]) -> Result<()> {
    println!("  $ sheave {}", args.join(" "));
    agent.sheave(args)?.lines().for_each(|line| println!("  {line}"));
    Ok(())
}

/// How to explore it.
fn explain(lab: &Lab, pod: &Place, agent: &Agent) -> Result<()> {
    let programs = env::current_exe()?.parent().context("no folder")?.display().to_string();
    println!(
        "  Change the cluster:       edit {manifests}/web.yaml
  Dial from the pod:        {pod} {programs}/sheave-client tcp 10.96.0.20:80 10
  What n1 wants:            {programs}/sheave svc list -A {flags}
  What its kernel has:      {programs}/sheave lb list -A {flags}
  What happens there:       {programs}/sheave monitor {flags}
  Stop it:                  cargo xtask demo --down",
        manifests = lab.manifests.display(),
        pod = enter(pod),
        flags = agent.flags(),
    );
    Ok(())
}

/// The command that enters a place from a shell: its cgroup, then its network namespace.
fn enter(place: &Place) -> String {
    format!(
        "sh -c 'echo $$ > {}/cgroup.procs && exec nsenter --net=/run/netns/{} \"$@\"' -",
        place.cgroup.display(),
        place.netns
    )
}

/// The manifests that come with the project.
fn examples() -> Result<Vec<PathBuf>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples");
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let files = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    Ok(files.into_iter().filter(|file| file.extension().is_some_and(|e| e == "yaml")).collect())
}

fn title(text: &str) {
    let (bold, plain) = if stdout().is_terminal() { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
    println!("\n{bold}{text}{plain}");
}
