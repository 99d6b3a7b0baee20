//! The packet programs against a model in plain Rust, packet by packet, with random and hostile ones, in random worlds.
//!
//! `SHEAVE_SEED` repeats a run, `SHEAVE_PACKETS` sets its length. A failure prints both and the packet.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, UdpSocket},
    process::Command,
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use sheave_ebpf::counter::Counter;
use sheave_tests::{
    packet::{self, ETH, ICMP, ICMPV6},
    packet_model::{
        Model,
        fate::{Came, Fate, Hook, Outcome, Verdict, Why},
        programs::Programs,
        traffic::{Random, Traffic},
        world::{NODE, Net, TAKEN, World},
    },
    say, skip,
};

/// Flows are forgotten after so many packets, so that the ports come back.
const EPOCH: usize = 250;
/// Pairs of worlds in one run.
const PAIRS: usize = 2;

#[test]
fn programs_and_model_agree() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skip("loading programs needs root");
        return Ok(());
    }
    // A thread, since it takes a network of its own.
    thread::spawn(compare).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn compare() -> Result<()> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64);
    let seed = number("SHEAVE_SEED").unwrap_or_else(clock) | 1;
    let packets = number("SHEAVE_PACKETS").unwrap_or(30_000) as usize;
    say(&format!("SHEAVE_SEED={seed} SHEAVE_PACKETS={packets}"));

    let sockets = host()?;
    let mut traffic = Traffic { random: Random(seed), recent: Vec::new(), dialled: Vec::new() };
    let mut tally = BTreeMap::new();
    for _ in 0..PAIRS {
        for mut world in World::draw_two(&mut traffic.random) {
            world.awaited =
                sockets.iter().map(|socket| Ok((socket.peer_addr()?, socket.local_addr()?))).collect::<Result<_>>()?;
            let settings = world.settings;
            run(world, &mut traffic, packets / (2 * PAIRS), &mut tally)
                .with_context(|| format!("SHEAVE_SEED={seed} SHEAVE_PACKETS={packets} {settings:?}"))?;
        }
    }
    println!("{tally:?}");
    for why in Why::ALL {
        assert!(tally.get(&why).is_some_and(|n| *n > 5), "hardly any packet was {why:?}: {tally:?}");
    }
    Ok(())
}

/// Packets in one world.
fn run(world: World, traffic: &mut Traffic, packets: usize, tally: &mut BTreeMap<Why, usize>) -> Result<()> {
    let mut programs = Programs::load(&world)?;
    let mut model = Model::new(world);
    for i in 0..packets {
        if i % EPOCH == 0 {
            let mut world = model.world.clone();
            world.is_pods_device = traffic.random.once_in(2);
            world.workload_programs = !traffic.random.once_in(3);
            programs.begin(&world)?;
            model = Model::new(world);
            traffic.begin(&model.world);
        }
        if traffic.random.once_in(20) {
            let n = model.world.turn_one(&mut traffic.random);
            programs.turn(n, &model.world.services[n])?;
        }
        let (masquerade, reply) = (1 << model.world.settings.mark_bit, 2 << model.world.settings.mark_bit);
        let packet = traffic.draw(&model.world);
        let hook = traffic.hook(&packet);
        let mark = [0, 0, 0, 0, masquerade, reply, 1, 1 | reply][traffic.random.below(8)];
        let did = step(&mut programs, &mut model, hook, (&packet, mark), tally)?;
        traffic.recent.extend([packet, did.bytes.clone()]);
        // What goes on comes past the next hook, as the kernel would send it.
        if matches!(hook, Hook::Ingress | Hook::PodIngress) && did.mark & (masquerade | reply) != 0 {
            let next = [Hook::Egress, Hook::PodEgress][traffic.random.below(2)];
            let did = step(&mut programs, &mut model, next, (&did.bytes, did.mark), tally)?;
            traffic.recent.push(did.bytes);
        }
    }
    Ok(())
}

/// One packet past one hook, in both worlds. What became of it.
fn step(
    programs: &mut Programs,
    model: &mut Model,
    hook: Hook,
    (packet, mark): (&[u8], u32),
    tally: &mut BTreeMap<Why, usize>,
) -> Result<Outcome> {
    let Some(did) = programs.pass(hook, packet, mark)? else {
        return Ok(Outcome { verdict: Verdict::Drop, bytes: packet.to_vec(), mark });
    };
    let fate = model.fate(hook, &Came { bytes: packet, mark, did: &did });
    let counted = programs.counted()?;
    if let Err(error) = agree(packet, &did, &fate, &counted) {
        return Err(error.context(format!(
            "{hook:?}, mark {mark:#x}\n{packet:02x?}\nbecame {did:02x?}, {counted:?}\nshould be {fate:02x?}"
        )));
    }
    *tally.entry(fate.why).or_insert(0) += 1;
    Ok(did)
}

fn agree(packet: &[u8], did: &Outcome, fate: &Fate, counted: &[Counter]) -> Result<()> {
    let expected = &fate.outcome;
    ensure!(did.verdict == expected.verdict, "the verdict is {:?}, not {:?}", did.verdict, expected.verdict);
    ensure!(fate.is_counted(counted), "{counted:?} was counted for {:?}", fate.why);
    if did.verdict == Verdict::Drop {
        return Ok(());
    }
    ensure!(did.mark == expected.mark, "the mark is {:#x}, not {:#x}", did.mark, expected.mark);
    ensure!(without_sums(&did.bytes) == without_sums(&expected.bytes), "the bytes differ");
    ensure!(expected.bytes != packet || did.bytes == packet, "a checksum changed");
    ensure!(!packet::is_sound(packet) || packet::is_sound(&did.bytes), "a checksum is wrong");
    ensure!(!is_quote_sound(packet) || is_quote_sound(&did.bytes), "a quoted checksum is wrong");
    Ok(())
}

/// The bytes with every checksum set to zero.
fn without_sums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let Some(v6) = packet::version(&bytes) else { return bytes };
    let Some(ip) = packet::ip(&bytes, ETH, v6) else { return bytes };
    let quoted = packet::ip(&bytes, ip.l4 + 8, v6).filter(|_| [ICMP, ICMPV6].contains(&ip.proto) && ip.fragment == 0);
    for header in [Some(ip), quoted].into_iter().flatten() {
        if !v6 {
            bytes[header.at + 10..header.at + 12].fill(0);
        }
        let at = packet::checksum_offset(header.proto).filter(|_| header.fragment == 0);
        if let Some(sum) = at.and_then(|at| bytes.get_mut(header.l4 + at..header.l4 + at + 2)) {
            sum.fill(0);
        }
    }
    bytes
}

/// Whether an ICMP error quotes a whole packet whose checksums are right.
fn is_quote_sound(bytes: &[u8]) -> bool {
    let Some(v6) = packet::version(bytes) else { return false };
    let Some(ip) = packet::ip(bytes, ETH, v6).filter(|ip| [ICMP, ICMPV6].contains(&ip.proto)) else { return false };
    let Some(quoted) = bytes.get(ip.l4 + 8..) else { return false };
    packet::is_sound(&[&bytes[..ETH], quoted].concat())
}

/// A network for this thread alone, that of a node: what the kernel is asked for looks as on one. Gives sockets that are
/// connected to clients from a NodePort's number.
fn host() -> Result<Vec<UdpSocket>> {
    unshare(CloneFlags::CLONE_NEWNET).context("a network of its own")?;
    for key in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
        fs::write(format!("/proc/sys/net/{key}"), "1").with_context(|| format!("sysctl net/{key}"))?;
    }
    let ip = |line: String| {
        let status = Command::new("ip").args(line.split(' ')).status().context("cannot start ip")?;
        ensure!(status.success(), "ip {line}: {status}");
        anyhow::Ok(())
    };
    ip("link add uplink type veth peer name wire".into())?;
    for device in ["lo", "wire", "uplink"] {
        ip(format!("link set {device} up"))?;
    }
    let mut sockets = Vec::new();
    for (is_v6, family, length) in [(false, "-4", 24), (true, "-6", 64)] {
        let node = Net::Nodes.ip(is_v6, NODE);
        let nodad = if is_v6 { " nodad" } else { "" };
        ip(format!("{family} address add {node}/{length} dev uplink{nodad}"))?;
        ip(format!("{family} address add {} dev uplink{nodad}", Net::Virtual.ip(is_v6, TAKEN)))?;
        ip(format!("{family} route add default dev uplink"))?;
        let socket = UdpSocket::bind((node, 30_001))?;
        socket.connect(SocketAddr::new(Net::Outside.ip(is_v6, 11), 1000))?;
        sockets.push(socket);
    }
    Ok(sockets)
}
