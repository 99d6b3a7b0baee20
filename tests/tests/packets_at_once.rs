//! Packets on two CPUs at the same time.

use std::net::SocketAddr;

use anyhow::{Result, ensure};
use nix::unistd::geteuid;
use sheave_tests::{
    packet::{self, Draft, ETH, SYN, TCP, UDP},
    packet_model::{
        fate::{Outcome, Verdict},
        programs::Programs,
        world::{Detection, Endpoint, Kind, NODE, Net, PORT, Service, Settings, World},
    },
    skip,
};

/// Clients in each round, after which all flows are forgotten: each has one port and, where it is given another one, no
/// second flow that this could be in the way of.
const CLIENTS: std::ops::RangeInclusive<u8> = 1..=250;
const ROUNDS: usize = 4;
const OWN: u16 = 2000;

/// A Service of each protocol with one endpoint, at two addresses.
fn world() -> (World, [SocketAddr; 2]) {
    let addresses =
        [SocketAddr::new(Net::Nodes.ip(false, NODE), 30_001), SocketAddr::new(Net::Virtual.ip(false, 1), PORT)];
    let settings = Settings {
        masquerade_all: false,
        keep_client: true,
        inside_only: false,
        answer_pings: false,
        detection: Detection::Nobody,
        mark_bit: 11,
    };
    let service = |proto| Service {
        proto,
        frontends: vec![(Kind::NodePort, addresses[0]), (Kind::ExternalIp, addresses[1])],
        endpoints: vec![Endpoint {
            at: SocketAddr::new(Net::OwnPods.ip(false, 1), PORT),
            is_local: true,
            serves: true,
        }],
        internal_local: false,
        external_local: false,
        is_sticky: false,
        admits: None,
        algorithm: 0,
    };
    let services = [TCP, UDP].map(service).into();
    (World { settings, services, is_pods_device: false, workload_programs: true, awaited: Vec::new() }, addresses)
}

/// The source port of a packet that goes on to the endpoint.
fn port(outcome: &Outcome) -> Result<u16> {
    ensure!(outcome.verdict == Verdict::Next, "{outcome:02x?}");
    let (from, to) = packet::ports(&outcome.bytes, ETH + 20).unwrap_or_default();
    ensure!(to == PORT, "{outcome:02x?}");
    Ok(from)
}

/// Two flows that would be the same packets behind ingress are told apart, even if both are opened at once; two packets
/// that open the same flow are not.
#[test]
fn one_of_two_flows_gets_another_port_and_one_flow_does_not() -> Result<()> {
    if !geteuid().is_root() {
        skip("loading programs needs root");
        return Ok(());
    }
    let (world, [one, other]) = world();
    let mut programs = Programs::load(&world)?;
    for proto in [TCP, UDP].repeat(ROUNDS) {
        programs.begin(&world)?;
        for number in CLIENTS {
            let client = SocketAddr::new(Net::Outside.ip(false, number), OWN);
            let opening = |to| Draft { tcp: SYN, ..Draft::new(proto, client, to) }.bytes();
            let is_one_flow = number % 2 == 0;
            let packets = [opening(one), opening(if is_one_flow { one } else { other })];
            let outcomes = programs.pass_both([&packets[0], &packets[1]])?;
            let ports = [port(&outcomes[0])?, port(&outcomes[1])?];
            let kept = ports.iter().filter(|port| **port == OWN).count();
            let expected = if is_one_flow { 2 } else { 1 };
            ensure!(kept == expected, "protocol {proto}, client {number}: the ports became {ports:?}");
        }
    }
    Ok(())
}
