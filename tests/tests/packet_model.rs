//! The packet programs against a model in plain Rust, packet by packet, with random and hostile ones.
//!
//! `SHEAVE_SEED` repeats a run, `SHEAVE_PACKETS` sets its length. A failure prints both and the packet.

use std::{
    collections::HashMap as Tally,
    net::{IpAddr, SocketAddr},
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    Ebpf, EbpfLoader, Pod, TestRun as _, TestRunOptions,
    maps::{Array, HashMap, LpmTrie, Map, MapData, PerCpuArray, lpm_trie},
    programs::SchedClassifier,
};
use sheave_agent::{
    OBJECT,
    datapath::tables::{guarded, words::Words},
};
use sheave_ebpf::{
    addr::Addr,
    backend::Backend,
    conntrack::{Flow, FragmentKey, HOOK_EGRESS, Ports, Tuple},
    counter::Counter,
    device::{ADDRESS_OWN, Device},
    frontend::{Frontend, FrontendKey, KIND_CLUSTER_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT, KIND_UNKNOWN_PORT},
    globals, maps, meta,
    service::{
        Config, FLAG_EXTERNAL_LOCAL, FLAG_SOURCE_RANGES, Scope, VERDICT_DROP, VERDICT_REJECT, Word, config_index,
        word_index,
    },
    source_range::{FULL_BITS, SourceRange},
};
use sheave_tests::{
    packet::{self, ACK, ETH, RST, SCTP, TCP, UDP},
    packet_model::{Fate, Hidden, MASQUERADE, Model, REPLY, Rule},
    packet_traffic::{Random, Traffic, socket},
    skip,
};

/// Few enough to run out of, and one of them is a node port.
const PORTS: (u16, u16) = (10_000, 10_004);
/// Flows are forgotten after so many packets, so that the ports come back.
const EPOCH: usize = 250;

const TCX_NEXT: u32 = u32::MAX;
const SHOT: u32 = 2;
const REDIRECT: u32 = 7;

#[test]
fn programs_and_model_agree() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        skip("loading programs needs root");
        return Ok(());
    }
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let clock = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |time| time.as_nanos() as u64);
    let seed = number("SHEAVE_SEED").unwrap_or_else(clock) | 1;
    let packets = number("SHEAVE_PACKETS").unwrap_or(30_000);
    println!("SHEAVE_SEED={seed} SHEAVE_PACKETS={packets}");

    let mut subject = Subject::new()?;
    let mut traffic = Traffic { random: Random(seed), recent: Vec::new() };
    let mut model = world();
    subject.program(&model)?;
    let mut tally = Tally::new();
    for i in 0..packets as usize {
        if i % EPOCH == 0 {
            subject.clear()?;
            model.clear();
            traffic.recent.clear();
        }
        let packet = traffic.draw(&model);
        let hook = HOOKS[traffic.random.below(HOOKS.len())];
        let mark = [0, 0, MASQUERADE, MASQUERADE, REPLY, 0x4001, 0x4000 | REPLY][traffic.random.below(7)];
        let (fate, output, out_mark) = match step(&mut subject, &mut model, hook, &packet, mark) {
            Ok(done) => done,
            Err(error) => {
                let counts = subject.counts()?;
                let what =
                    format!("packet {i} of SHEAVE_SEED={seed}: {hook:?}, mark {mark:#x}\n{packet:02x?}\n{counts:?}");
                return Err(error.context(what));
            }
        };
        *tally.entry(fate).or_insert(0_usize) += 1;
        traffic.recent.push(output.clone());
        // What goes on comes past the next hook, as the kernel would send it.
        if matches!(hook, Hook::Ingress | Hook::PodIngress) && out_mark & (MASQUERADE | REPLY) != 0 {
            let next = [Hook::Egress, Hook::PodEgress][traffic.random.below(2)];
            let (fate, output, _) = step(&mut subject, &mut model, next, &output, out_mark)
                .with_context(|| format!("behind packet {i} of SHEAVE_SEED={seed}: {next:?}\n{output:02x?}"))?;
            *tally.entry(fate).or_insert(0) += 1;
            traffic.recent.push(output);
        }
    }
    println!("{tally:?}");
    for fate in ["untouched", "changed", "hidden", "dropped", "reset"] {
        assert!(tally.get(fate).is_some_and(|n| *n > 20), "hardly any packet was {fate}: {tally:?}");
    }
    Ok(())
}

/// One packet past one hook, in both worlds. What became of it, its bytes and its mark.
fn step(
    subject: &mut Subject,
    model: &mut Model,
    hook: Hook,
    packet: &[u8],
    mark: u32,
) -> Result<(&'static str, Vec<u8>, u32)> {
    let Some((verdict, output, out_mark)) = subject.run(hook, packet, mark)? else {
        return Ok(("refused by test_run", packet.to_vec(), mark));
    };
    let (fate, expected_mark) = match hook {
        Hook::Ingress => model.ingress(packet, mark, false),
        Hook::PodIngress => model.ingress(packet, mark, true),
        Hook::Egress => model.egress(packet, mark, true),
        Hook::PodEgress => model.egress(packet, mark, false),
    };
    let goes_on = |expected: &[u8]| -> Result<()> {
        ensure!(verdict == TCX_NEXT, "verdict {verdict}, the model says {fate:02x?}");
        ensure!(out_mark == expected_mark, "mark {out_mark:#x}, the model says {expected_mark:#x}");
        ensure!(without_sums(&output) == without_sums(expected), "{output:02x?}, the model says {fate:02x?}");
        ensure!(!packet::is_sound(packet) || packet::is_sound(&output), "a checksum is wrong in {output:02x?}");
        ensure!(!is_quote_sound(packet) || is_quote_sound(&output), "a quoted checksum is wrong in {output:02x?}");
        Ok(())
    };
    let name = match &fate {
        Fate::Untouched => {
            goes_on(packet)?;
            ensure!(output == packet, "bytes changed: {output:02x?}");
            "untouched"
        }
        Fate::Changed(bytes) => {
            goes_on(bytes)?;
            "changed"
        }
        Fate::Hidden(hidden) => {
            let free = model.free_ports(hidden);
            // The last free one may escape 32 tries, though hardly ever.
            if free.is_empty() || (free.len() == 1 && verdict == SHOT) {
                ensure!(verdict == SHOT, "no port is free, but the verdict is {verdict}");
                return Ok(("dropped", output, out_mark));
            }
            ensure!(verdict == TCX_NEXT, "verdict {verdict} though {free:?} are free");
            let port = subject.hidden_behind(hidden).context("no entry hides the client")?;
            ensure!(free.contains(&port), "port {port} is not one of {free:?}");
            let Some(Fate::Changed(bytes)) = model.hide(packet, hidden, port) else { bail!("no packet") };
            goes_on(&bytes)?;
            "hidden"
        }
        Fate::Dropped => {
            ensure!(verdict == SHOT, "verdict {verdict}, the model drops it");
            "dropped"
        }
        Fate::Reset => {
            ensure!(verdict == REDIRECT, "verdict {verdict}, the model sends a RST");
            is_reset_of(packet, &output)?;
            "reset"
        }
    };
    Ok((name, output, out_mark))
}

/// The bytes with every checksum set to zero.
fn without_sums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let Some(v6) = packet::version(&bytes) else { return bytes };
    let Some(ip) = packet::ip(&bytes, ETH, v6) else { return bytes };
    let quoted = packet::ip(&bytes, ip.l4 + 8, v6).filter(|_| [1, 58].contains(&ip.proto) && ip.fragment == 0);
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
    let Some(ip) = packet::ip(bytes, ETH, v6).filter(|ip| [1, 58].contains(&ip.proto)) else { return false };
    let Some(quoted) = bytes.get(ip.l4 + 8..) else { return false };
    packet::is_sound(&[&bytes[..ETH], quoted].concat())
}

fn is_reset_of(packet: &[u8], answer: &[u8]) -> Result<()> {
    let read = |bytes: &[u8]| {
        let ip = packet::ip(bytes, ETH, packet::version(bytes)?)?;
        let (src, dst) = packet::ports(bytes, ip.l4)?;
        Some((SocketAddr::new(ip.src, src), SocketAddr::new(ip.dst, dst), bytes.get(ip.l4..)?.to_vec()))
    };
    let (src, dst, syn) = read(packet).context("the SYN")?;
    let (from, to, rst) = read(answer).context("the RST")?;
    ensure!((from, to) == (dst, src), "the RST goes from {from} to {to}");
    ensure!(rst[13] == RST | ACK, "its flags are {:#x}", rst[13]);
    let seq = u32::from_be_bytes([syn[4], syn[5], syn[6], syn[7]]);
    ensure!(rst[8..12] == seq.wrapping_add(1).to_be_bytes(), "it acknowledges {:?}", &rst[8..12]);
    ensure!(answer[..6] == packet[6..12] && answer[6..12] == packet[..6], "the link addresses are not swapped");
    ensure!(!packet::is_sound(packet) || packet::is_sound(answer), "a checksum is wrong in {answer:02x?}");
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Hook {
    Ingress,
    PodIngress,
    Egress,
    PodEgress,
}

const HOOKS: [Hook; 4] = [Hook::Ingress, Hook::PodIngress, Hook::Egress, Hook::PodEgress];

/// Every kind of frontend, in both families, several of them with one backend.
fn world() -> Model {
    let mut model = Model::new(PORTS);
    for (node, vip, cluster_ip, pods, client) in [
        ("192.0.2.11", "203.0.113.1", "10.96.0.1", "10.0.0.", "198.51.100.10"),
        ("[2001:db8::11]", "[2001:db8:203::1]", "[2001:db8:96::1]", "[2001:db8:1::", "2001:db8:100::10"),
    ] {
        let end = if pods.starts_with('[') { "]" } else { "" };
        let pod = |n: u8, port: u16| socket(&format!("{pods}{n}{end}:{port}"));
        let client: IpAddr = client.parse().expect("an address");
        let rules = [
            (format!("{node}:30001"), Rule::Forward { backend: pod(1, 8080), hidden: true }),
            (format!("{node}:30002"), Rule::Forward { backend: pod(1, 8080), hidden: true }),
            (format!("{node}:30003"), Rule::Forward { backend: pod(2, 53), hidden: false }),
            (format!("{node}:30004"), Rule::Reject),
            (format!("{node}:30005"), Rule::Drop),
            (format!("{node}:30006"), Rule::Forward { backend: socket(&format!("{node}:9090")), hidden: true }),
            (format!("{node}:10002"), Rule::Forward { backend: pod(2, 80), hidden: true }),
            (format!("{vip}:80"), Rule::Guarded { backend: pod(2, 80), client }),
            (format!("{cluster_ip}:8080"), Rule::Forward { backend: pod(1, 8080), hidden: true }),
            (format!("{cluster_ip}:80"), Rule::Forward { backend: pod(2, 8080), hidden: true }),
        ];
        for (frontend, rule) in rules {
            for proto in [TCP, UDP, SCTP] {
                model.rules.insert((proto, socket(&frontend)), rule);
            }
        }
        model.node.push(socket(&format!("{node}:0")).ip());
        model.guarded.push(socket(&format!("{cluster_ip}:0")).ip());
    }
    model
}

/// The programs and their maps.
struct Subject {
    ebpf: Ebpf,
}

impl Subject {
    fn new() -> Result<Self> {
        let (first, count) = (u32::from(PORTS.0), u32::from(PORTS.1 - PORTS.0) + 1);
        let mut loader = EbpfLoader::new();
        loader.override_global(globals::SNAT_FIRST, &first, true).override_global(globals::SNAT_COUNT, &count, true);
        loader.map_max_entries("CONNTRACK", 65_536);
        let mut ebpf = loader.load(OBJECT)?;
        for hook in HOOKS {
            program(&mut ebpf, hook)?.load()?;
        }
        Ok(Self { ebpf })
    }

    fn hash<K: Pod, V: Pod>(&mut self, name: &str) -> Result<HashMap<&mut MapData, K, V>> {
        Ok(self.ebpf.map_mut(name).context(name.to_owned())?.try_into()?)
    }

    fn insert<K: Pod, V: Pod>(&mut self, name: &str, key: &K, value: &V) -> Result<()> {
        Ok(self.hash::<K, V>(name)?.insert(key, value, 0)?)
    }

    fn set<V: Pod>(&mut self, name: &str, index: u32, value: V) -> Result<()> {
        let mut array: Array<&mut MapData, V> = self.ebpf.map_mut(name).context(name.to_owned())?.try_into()?;
        Ok(array.set(index, &value, 0)?)
    }

    /// Writes the model's rules.
    fn program(&mut self, model: &Model) -> Result<()> {
        for (id, ((proto, frontend), rule)) in (1..).zip(&model.rules) {
            let (word, flags, kind, backend) = match rule {
                Rule::Reject => (Word::verdict_only(VERDICT_REJECT), 0, KIND_NODE_PORT, None),
                Rule::Drop => (Word::verdict_only(VERDICT_DROP), 0, KIND_NODE_PORT, None),
                Rule::Guarded { backend, client } => {
                    let range = SourceRange { service: u32::to_be(id), addr: (*client).into() };
                    let map = self.ebpf.map_mut("SOURCE_RANGES").context("SOURCE_RANGES")?;
                    let mut ranges: LpmTrie<_, SourceRange, u32> = map.try_into()?;
                    ranges.insert(&lpm_trie::Key::new(FULL_BITS, range), 1, 0)?;
                    (Word::forward(id, 1, false), FLAG_SOURCE_RANGES, KIND_LOAD_BALANCER, Some(*backend))
                }
                Rule::Forward { backend, hidden } => {
                    let kind = if model.guarded.contains(&frontend.ip()) { KIND_CLUSTER_IP } else { KIND_NODE_PORT };
                    let flags = if *hidden { 0 } else { FLAG_EXTERNAL_LOCAL };
                    (Word::forward(id, 1, false), flags, kind, Some(*backend))
                }
            };
            for scope in [Scope::Cluster, Scope::Outside] {
                self.set("SERVICES", word_index(id, scope), word.0)?;
            }
            self.set("SERVICES", config_index(id), Config::new(0, flags, 0).0)?;
            self.set("TABLES", id, u64::from(id))?;
            if let Some(backend) = backend {
                let (addr, port) = (backend.ip().into(), backend.port().to_be());
                self.set("BACKENDS", id, Backend { addr, port, proto: *proto, flags: 0, service: id })?;
            }
            let key = FrontendKey { addr: frontend.ip().into(), port: frontend.port().to_be(), proto: *proto, zero: 0 };
            self.insert("FRONTENDS", &key, &Frontend { service: id, kind })?;
        }
        for ip in &model.guarded {
            let key = FrontendKey { addr: (*ip).into(), port: 0, proto: 0, zero: 0 };
            self.insert("FRONTENDS", &key, &Frontend { service: 0, kind: KIND_UNKNOWN_PORT })?;
            let Map::Array(meta) = self.ebpf.map("META").context("META")? else { bail!("META is no array") };
            guarded::widen(&Words::new(maps::META, meta)?, &key.addr)?;
        }
        let [v4, v6] = [model.node[0], model.node[1]].map(Addr::from);
        self.insert("DEVICES", &1_u32, &Device { v4, v6, flags: 0, zero: 0 })?;
        self.insert("NODE_ADDRESSES", &v4, &ADDRESS_OWN)?;
        self.insert("NODE_ADDRESSES", &v6, &ADDRESS_OWN)?;
        Ok(())
    }

    /// What the programs counted.
    fn counts(&mut self) -> Result<Vec<(&'static str, u64)>> {
        let map = self.ebpf.map_mut("COUNTERS").context("COUNTERS")?;
        let counters: PerCpuArray<_, u64> = map.try_into()?;
        let count = |c: &Counter| counters.get(&(*c as u32), 0).map_or(0, |cpus| cpus.iter().sum());
        Ok(Counter::ALL.iter().map(|c| (c.name(), count(c))).filter(|(_, n)| *n > 0).collect())
    }

    /// Forgets all flows.
    fn clear(&mut self) -> Result<()> {
        fn empty<K: Pod, V: Pod>(mut map: HashMap<&mut MapData, K, V>) {
            let keys: Vec<K> = map.keys().filter_map(Result::ok).collect();
            keys.iter().for_each(|key| {
                let _gone = map.remove(key);
            });
        }
        empty(self.hash::<Tuple, Flow>("CONNTRACK")?);
        empty(self.hash::<FragmentKey, Ports>("FRAGMENTS")?);
        for kind in [meta::MASQUERADED_FLOWS, meta::PLAIN_FLOWS] {
            self.set("META", kind, 0_u64)?;
        }
        self.set("META", meta::WORKLOAD_PROGRAMS, 1_u64)
    }

    /// Verdict, bytes and mark; `None` when the kernel does not let such a packet be tested.
    fn run(&mut self, hook: Hook, packet: &[u8], mark: u32) -> Result<Option<(u32, Vec<u8>, u32)>> {
        const MARK: std::ops::Range<usize> = 8..12; // of `__sk_buff`
        let mut output = vec![0; packet.len() + 64];
        let (mut ctx_in, mut ctx_out) = ([0; 184], [0; 192]);
        ctx_in[MARK].copy_from_slice(&mark.to_ne_bytes());
        let options = TestRunOptions {
            data_in: Some(packet),
            data_out: Some(&mut output),
            ctx_in: Some(&ctx_in),
            ctx_out: Some(&mut ctx_out),
            ..TestRunOptions::default()
        };
        let Ok(result) = program(&mut self.ebpf, hook)?.test_run(options) else { return Ok(None) };
        output.truncate(result.data_size_out as usize);
        let mark = u32::from_ne_bytes([ctx_out[8], ctx_out[9], ctx_out[10], ctx_out[11]]);
        Ok(Some((result.return_value, output, mark)))
    }

    /// The port that a client is hidden behind.
    fn hidden_behind(&mut self, hidden: &Hidden) -> Result<u16> {
        let key = Tuple {
            src: hidden.client.ip().into(),
            dst: hidden.backend.ip().into(),
            src_port: hidden.client.port().to_be(),
            dst_port: hidden.backend.port().to_be(),
            proto: hidden.proto,
            hook: HOOK_EGRESS,
            zero: 0,
        };
        let flow: Flow = self.hash("CONNTRACK")?.get(&key, 0)?;
        Ok(u16::from_be(flow.to_port))
    }
}

fn program(ebpf: &mut Ebpf, hook: Hook) -> Result<&mut SchedClassifier> {
    let name = match hook {
        Hook::Ingress => "tc_ingress",
        Hook::PodIngress => "tc_pod_ingress",
        Hook::Egress => "tc_egress",
        Hook::PodEgress => "tc_pod_egress",
    };
    Ok(ebpf.program_mut(name).context(name)?.try_into()?)
}
