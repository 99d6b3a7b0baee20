//! The network: a router (lan) with a bridge for the nodes and the control plane, and a client beyond it (out).

use std::process::Command;

use anyhow::Result;

use super::{
    lab::{self, Lab},
    process::said,
};

/// Namespaces of the cluster are called that, and no others.
const PREFIX: &str = "lab-";
/// Both ends of the way to the client outside: addresses and their prefix lengths.
const OUTSIDE: [(&str, &str, &str); 2] =
    [("172.20.0.1/24", "172.20.0.2/24", "172.20.0.1"), ("fd00:172:20::1/64", "fd00:172:20::2/64", "fd00:172:20::1")];
/// The router's addresses towards the nodes.
const ROUTER: [(&str, &str); 2] = [("172.18.0.1", "24"), ("fd00:172:18::1", "64")];
/// Nothing of the cluster relies on the reverse path filter, and every place but the outside forwards.
const SYSCTLS: [&str; 4] = [
    "net/ipv4/ip_forward=1",
    "net/ipv6/conf/all/forwarding=1",
    "net/ipv4/conf/all/rp_filter=0",
    "net/ipv4/conf/default/rp_filter=0",
];

/// All of it, with routes to the pods of every node.
pub fn create(lab: &Lab) -> Result<()> {
    namespace("lan")?;
    ip("lan", "link add br0 type bridge")?;
    ip("lan", "link set br0 up")?;
    for (address, length) in ROUTER {
        ip("lan", &format!("addr add {address}/{length} dev br0 nodad"))?;
    }
    namespace("out")?;
    ip("lan", "link add vout type veth peer name eth0 netns lab-out")?;
    ip("lan", "link set vout up")?;
    ip("out", "link set eth0 up")?;
    for (router, client, gateway) in OUTSIDE {
        ip("lan", &format!("addr add {router} dev vout nodad"))?;
        ip("out", &format!("addr add {client} dev eth0 nodad"))?;
        ip("out", &format!("route add default via {gateway}"))?;
    }
    member("cp", 0)?;
    for node in lab.numbers() {
        member(&format!("n{node}"), node)?;
    }
    sysctls("lan")?;
    for place in ["lan".to_owned(), "cp".to_owned()].into_iter().chain(lab.numbers().map(|node| format!("n{node}"))) {
        for node in lab.numbers().filter(|node| place != format!("n{node}")) {
            for (pods, via) in lab::pod_networks(node).into_iter().zip(lab::addresses(node)) {
                ip(&place, &format!("route add {pods} via {via}"))?;
            }
        }
    }
    Ok(())
}

/// A place on the nodes' network.
fn member(place: &str, number: u8) -> Result<()> {
    namespace(place)?;
    ip("lan", &format!("link add v{place} type veth peer name eth0 netns {PREFIX}{place}"))?;
    ip("lan", &format!("link set v{place} master br0 up"))?;
    ip(place, "link set eth0 up")?;
    for (address, (router, length)) in lab::addresses(number).iter().zip(ROUTER) {
        ip(place, &format!("addr add {address}/{length} dev eth0 nodad"))?;
        ip(place, &format!("route add default via {router}"))?;
    }
    sysctls(place)
}

fn namespace(place: &str) -> Result<()> {
    said(Command::new("ip").args(["netns", "add", &format!("{PREFIX}{place}")]))?;
    ip(place, "link set lo up")
}

fn sysctls(place: &str) -> Result<()> {
    let writes = SYSCTLS.map(|setting| setting.replacen('=', " ", 1)).map(|setting| {
        let (name, value) = setting.split_once(' ').unwrap_or_default();
        format!("echo {value} > /proc/sys/{name}")
    });
    // /proc/sys/net shows the namespace of whoever opens it.
    let namespace = format!("--net={}", lab::namespace(place));
    said(Command::new("nsenter").args([&namespace, "sh", "-c", &writes.join(" && ")])).map(drop)
}

/// ip, in a namespace; which family is meant is seen from the addresses.
fn ip(place: &str, words: &str) -> Result<()> {
    let mut command = Command::new("ip");
    command.args(["-netns", &format!("{PREFIX}{place}")]);
    if words.contains("::") {
        command.arg("-6");
    }
    said(command.args(words.split(' '))).map(drop)
}

/// Removes every namespace of the cluster; what is in them goes with them.
pub fn remove() -> Result<()> {
    let list = said(Command::new("ip").args(["netns", "list"]))?;
    for name in list.lines().filter_map(|line| line.split(' ').next()).filter(|name| name.starts_with(PREFIX)) {
        said(Command::new("ip").args(["netns", "delete", name]))?;
    }
    Ok(())
}
