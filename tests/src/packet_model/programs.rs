//! The packet programs as the kernel runs them, with their maps filled from a [`World`].

use std::{
    collections::BTreeMap,
    net::IpAddr,
    sync::atomic::{AtomicU32, Ordering},
    thread,
};

use anyhow::{Context, Result, bail};
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
    affinity::AffinityKey,
    backend::{Backend, FLAG_LOCAL, RETIRED},
    conntrack::{Flow, FragmentKey, Ports, Tuple},
    counter::Counter,
    device::{ADDRESS_OWN, DEVICE_OF_PODS, Device, FULL_BITS, RANGE_OWN_PODS, RANGE_PODS},
    frontend::{
        FROM_OUTSIDE, Frontend, FrontendKey, KIND_CLUSTER_IP, KIND_EXTERNAL_IP, KIND_LOAD_BALANCER, KIND_NODE_PORT,
        KIND_UNKNOWN_PORT,
    },
    globals, maps, meta, proto,
    service::{
        ALGORITHM_MAGLEV, Config, FLAG_EXTERNAL_LOCAL, FLAG_SOURCE_RANGES, Scope as Place, VERDICT_DROP,
        VERDICT_REJECT, Word, config_index, word_index,
    },
    source_range::{self, SourceRange},
};

use super::{
    fate::{HOOKS, Hook, Outcome, Verdict},
    world::{Kind, Net, PORTS, Scope, Service, Without, World},
};

/// Seconds for which a client stays with its backend: longer than any test.
const AFFINITY: u32 = 10_800;
/// Backend ids, and slots of a run, that each Service has for itself.
const EACH: u32 = 16;

/// The programs and their maps.
#[derive(Debug)]
pub struct Programs {
    ebpf: Ebpf,
    /// What they had counted when somebody last looked.
    counts: BTreeMap<Counter, u64>,
}

impl Programs {
    /// Loads them for a world.
    ///
    /// # Errors
    /// When the kernel refuses a program or an entry.
    pub fn load(world: &World) -> Result<Self> {
        let settings = &world.settings;
        let (first, count) = (u32::from(PORTS.0), u32::from(PORTS.1 - PORTS.0) + 1);
        let constants = [
            (globals::SNAT_FIRST, first),
            (globals::SNAT_COUNT, count),
            (globals::MARK, 1 << settings.mark_bit),
            (globals::MASQUERADE_ALL, settings.masquerade_all.into()),
            (globals::KEEP_CLIENT, settings.keep_client.into()),
            (globals::CLUSTER_IPS_INSIDE_ONLY, settings.inside_only.into()),
            (globals::ANSWER_PINGS, settings.answer_pings.into()),
            (globals::DETECT_PODS, settings.detection as u32),
        ];
        let mut loader = EbpfLoader::new();
        for (name, value) in &constants {
            loader.override_global(name, value, true);
        }
        loader.map_max_entries("CONNTRACK", 65_536);
        let mut programs = Self { ebpf: loader.load(OBJECT)?, counts: BTreeMap::new() };
        for hook in HOOKS {
            programs.program(hook)?.load()?;
        }
        for (n, service) in world.services.iter().enumerate() {
            programs.add(n, service)?;
        }
        for is_v6 in [false, true] {
            let node = Addr::from(World::node(is_v6));
            programs.insert("NODE_ADDRESSES", &node, &ADDRESS_OWN)?;
            for (net, range) in [(Net::OwnPods, RANGE_OWN_PODS), (Net::OtherPods, RANGE_PODS)] {
                programs.insert_net("POD_RANGES", net.ip(is_v6, 0), range)?;
            }
            programs.insert_net("SERVICE_CIDRS", Net::Services.ip(is_v6, 0), 1)?;
            for n in [0, u8::MAX] {
                programs.guard(|words| guarded::widen(words, &Net::Services.ip(is_v6, n).into()))?;
            }
        }
        Ok(programs)
    }

    /// Writes what of a Service never changes, and its endpoints.
    fn add(&mut self, n: usize, service: &Service) -> Result<()> {
        let id = id_of(n);
        let key = |ip: IpAddr, port: u16, proto| FrontendKey { addr: ip.into(), port: port.to_be(), proto, zero: 0 };
        for (kind, at) in &service.frontends {
            let (kind, guards): (_, &[u8]) = match kind {
                Kind::ClusterIp if at.is_ipv4() => (KIND_CLUSTER_IP, &[0, proto::ICMP]),
                Kind::ClusterIp => (KIND_CLUSTER_IP, &[0, proto::ICMPV6]),
                Kind::NodePort => (KIND_NODE_PORT, &[]),
                Kind::LoadBalancer => (KIND_LOAD_BALANCER, &[FROM_OUTSIDE]),
                Kind::ExternalIp => (KIND_EXTERNAL_IP, &[FROM_OUTSIDE]),
            };
            self.insert("FRONTENDS", &key(at.ip(), at.port(), service.proto), &Frontend { service: id, kind })?;
            for what in guards {
                let key = key(at.ip(), 0, *what);
                self.insert("FRONTENDS", &key, &Frontend { service: 0, kind: KIND_UNKNOWN_PORT })?;
                self.guard(|words| guarded::widen_for(words, &key))?;
            }
        }
        if let Some(client) = service.admits {
            let range = SourceRange { service: id.to_be(), addr: client.into() };
            self.trie("SOURCE_RANGES")?.insert(&lpm_trie::Key::new(source_range::FULL_BITS, range), 1_u32, 0)?;
        }
        let local = if service.external_local { FLAG_EXTERNAL_LOCAL } else { 0 };
        let ranges = if service.admits.is_some() { FLAG_SOURCE_RANGES } else { 0 };
        let affinity = if service.is_sticky { AFFINITY } else { 0 };
        self.set("SERVICES", config_index(id), Config::new(service.algorithm, local | ranges, affinity).0)?;
        for (backend, endpoint) in (id * EACH..).zip(&service.endpoints) {
            let (addr, port) = (endpoint.at.ip().into(), endpoint.at.port().to_be());
            let flags = if endpoint.is_local { FLAG_LOCAL } else { 0 };
            self.set("BACKENDS", backend, Backend { addr, port, proto: service.proto, flags, service: id })?;
        }
        self.turn(n, service)
    }

    /// Writes which endpoints of a Service serve.
    ///
    /// # Errors
    /// When the kernel refuses an entry.
    pub fn turn(&mut self, n: usize, service: &Service) -> Result<()> {
        let id = id_of(n);
        for (backend, endpoint) in (id * EACH..).zip(&service.endpoints) {
            self.set("CONNECTIONS", backend, if endpoint.serves { 0 } else { RETIRED })?;
        }
        for (scope, place) in
            [(Scope::Cluster, Place::Cluster), (Scope::Inside, Place::Inside), (Scope::Outside, Place::Outside)]
        {
            let word = match service.endpoints(scope) {
                Err(Without::Any) => Word::verdict_only(VERDICT_REJECT),
                Err(Without::Local) => Word::verdict_only(VERDICT_DROP),
                Ok(chosen) => {
                    let all = (id * EACH..).zip(&service.endpoints);
                    let ids: Vec<_> = all.filter(|(_, e)| chosen.contains(e)).map(|(backend, _)| backend).collect();
                    self.run(word_index(id, place) * EACH, &ids, service.algorithm == ALGORITHM_MAGLEV)?
                }
            };
            self.set("SERVICES", word_index(id, place), word.0)?;
        }
        Ok(())
    }

    /// Writes a run; behind one of Maglev's, its members.
    fn run(&mut self, offset: u32, ids: &[u32], is_maglev: bool) -> Result<Word> {
        let length = u32::try_from(ids.len())?;
        let members = if is_maglev { [&[length], ids].concat() } else { Vec::new() };
        for (slot, value) in (offset..).zip(ids.iter().chain(&members)) {
            self.set("TABLES", slot, u64::from(*value))?;
        }
        Ok(Word::forward(offset, length, is_maglev))
    }

    /// Forgets all flows, and tells who is behind the device and what workloads' devices have.
    ///
    /// # Errors
    /// When the kernel refuses an entry.
    pub fn begin(&mut self, world: &World) -> Result<()> {
        empty::<Tuple, Flow>(self.hash("CONNTRACK")?);
        empty::<FragmentKey, Ports>(self.hash("FRAGMENTS")?);
        empty::<AffinityKey, u64>(self.hash("AFFINITY")?);
        for kind in [meta::MASQUERADED_FLOWS, meta::PLAIN_FLOWS] {
            self.set("META", kind, 0_u64)?;
        }
        self.set("META", meta::WORKLOAD_PROGRAMS, u64::from(world.workload_programs))?;
        let flags = if world.is_pods_device { DEVICE_OF_PODS } else { 0 };
        let [v4, v6] = [false, true].map(|is_v6| World::node(is_v6).into());
        self.insert("DEVICES", &LOOPBACK, &Device { v4, v6, flags, zero: 0 })
    }

    /// A packet past a program; `None` when the kernel does not let such a one be tested.
    ///
    /// # Errors
    /// When a program is missing or gives a verdict that it must not.
    pub fn pass(&mut self, hook: Hook, packet: &[u8], mark: u32) -> Result<Option<Outcome>> {
        pass(self.program(hook)?, packet, mark).with_context(|| format!("{hook:?}"))
    }

    /// Two packets past ingress at once, on two CPUs where there are.
    ///
    /// # Errors
    /// As [`Self::pass`], and when the kernel does not let such packets be tested.
    pub fn pass_both(&mut self, packets: [&[u8]; 2]) -> Result<[Outcome; 2]> {
        let program: &SchedClassifier = self.program(Hook::Ingress)?;
        let ready = AtomicU32::new(0);
        let pass_in_step = |packet| {
            ready.fetch_add(1, Ordering::Relaxed);
            while ready.load(Ordering::Relaxed) < 2 {
                thread::yield_now(); // to be woken takes longer than a program runs
            }
            pass(program, packet, 0)?.context("this packet cannot be tested")
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| pass_in_step(packets[1]));
            let one = pass_in_step(packets[0])?;
            Ok([one, other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?])
        })
    }

    /// What the packet programs have counted since the last call, in order.
    ///
    /// # Errors
    /// When the counters cannot be read.
    pub fn counted(&mut self) -> Result<Vec<Counter>> {
        let map = self.ebpf.map_mut("COUNTERS").context("no COUNTERS")?;
        let counters: PerCpuArray<_, u64> = map.try_into()?;
        let mut moved = Vec::new();
        for counter in Counter::ALL.iter().filter(|counter| **counter >= Counter::PacketForward) {
            let count = counters.get(&(*counter as u32), 0)?.iter().sum();
            if self.counts.insert(*counter, count).unwrap_or(0) != count {
                moved.push(*counter);
            }
        }
        Ok(moved)
    }

    fn program(&mut self, hook: Hook) -> Result<&mut SchedClassifier> {
        let name = match hook {
            Hook::Ingress => "tc_ingress",
            Hook::PodIngress => "tc_pod_ingress",
            Hook::Egress => "tc_egress",
            Hook::PodEgress => "tc_pod_egress",
        };
        Ok(self.ebpf.program_mut(name).context(name)?.try_into()?)
    }

    fn hash<K: Pod, V: Pod>(&mut self, name: &str) -> Result<HashMap<&mut MapData, K, V>> {
        Ok(self.ebpf.map_mut(name).with_context(|| format!("no {name}"))?.try_into()?)
    }

    fn trie<K: Pod>(&mut self, name: &str) -> Result<LpmTrie<&mut MapData, K, u32>> {
        Ok(self.ebpf.map_mut(name).with_context(|| format!("no {name}"))?.try_into()?)
    }

    fn insert<K: Pod, V: Pod>(&mut self, name: &str, key: &K, value: &V) -> Result<()> {
        Ok(self.hash::<K, V>(name)?.insert(key, value, 0)?)
    }

    /// One of the networks of [`Net`].
    fn insert_net(&mut self, name: &str, net: IpAddr, value: u32) -> Result<()> {
        let prefix = if net.is_ipv4() { FULL_BITS - 8 } else { 64 };
        Ok(self.trie(name)?.insert(&lpm_trie::Key::new(prefix, Addr::from(net)), value, 0)?)
    }

    fn set<V: Pod>(&mut self, name: &str, index: u32, value: V) -> Result<()> {
        let map = self.ebpf.map_mut(name).with_context(|| format!("no {name}"))?;
        let mut array: Array<&mut MapData, V> = map.try_into()?;
        Ok(array.set(index, &value, 0)?)
    }

    fn guard<E>(&self, widen: impl FnOnce(&Words) -> Result<(), E>) -> Result<()>
    where
        anyhow::Error: From<E>,
    {
        let Map::Array(meta) = self.ebpf.map("META").context("no META")? else { bail!("META is no array") };
        Ok(widen(&Words::new(maps::META, meta)?)?)
    }
}

/// A packet past a program; `None` when the kernel does not let such a one be tested.
fn pass(program: &SchedClassifier, packet: &[u8], mark: u32) -> Result<Option<Outcome>> {
    const MARK: std::ops::Range<usize> = 8..12; // of `__sk_buff`
    let mut bytes = vec![0; packet.len() + 64];
    let (mut ctx_in, mut ctx_out) = ([0; 184], [0; 192]);
    ctx_in[MARK].copy_from_slice(&mark.to_ne_bytes());
    let options = TestRunOptions {
        data_in: Some(packet),
        data_out: Some(&mut bytes),
        ctx_in: Some(&ctx_in),
        ctx_out: Some(&mut ctx_out),
        ..TestRunOptions::default()
    };
    let Ok(result) = program.test_run(options) else { return Ok(None) };
    bytes.truncate(result.data_size_out as usize);
    let mark = u32::from_ne_bytes([ctx_out[8], ctx_out[9], ctx_out[10], ctx_out[11]]);
    let verdict = match result.return_value.cast_signed() {
        -1 => Verdict::Next,
        2 => Verdict::Drop,
        7 => Verdict::Back,
        other => bail!("the program said {other}"),
    };
    Ok(Some(Outcome { verdict, bytes, mark }))
}

/// The index of the device that packets of a test run come through.
const LOOPBACK: u32 = 1;

/// The id of the Service in place `n`.
fn id_of(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(0) + 1
}

fn empty<K: Pod, V: Pod>(mut map: HashMap<&mut MapData, K, V>) {
    let keys: Vec<K> = map.keys().filter_map(Result::ok).collect();
    keys.iter().for_each(|key| {
        let _gone = map.remove(key);
    });
}
