//! A flow table of any size without any traffic: flows are written into it as the programs would have left them.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
    ops::Range,
    path::PathBuf,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData};
use sheave_agent::datapath::{
    Limits,
    programs::{
        attach,
        features::Features,
        load::{self, Switches},
    },
    tables::{clock, flows::Flows, pins::Pins},
};
use sheave_ebpf::{
    addr::Addr,
    conntrack::{
        FLAG_MASQUERADE, Flow, HOOK_EGRESS, HOOK_INGRESS, ROLE_DIAL, ROLE_MASQUERADE, ROLE_REPLY, ROLE_RETURN, Tuple,
        seen,
    },
    maps, proto,
};

use crate::{node::Node, wait::eventually};

/// As if every flow of a node had been made and seen so many seconds earlier.
///
/// # Errors
/// When there is no table, or it refuses.
pub fn age(node: &Node, seconds: u32) -> Result<()> {
    eventually("the machine is older than a flow becomes", Duration::from_secs(seconds.into()), || {
        ensure!(clock::seconds() > seconds, "it was just started");
        Ok(())
    })?;
    let map = MapData::from_pin(node.pins().map(maps::CONNTRACK))?;
    let mut table: HashMap<_, Tuple, Flow> = Map::LruHashMap(map).try_into()?;
    let entries = table.iter().collect::<Result<Vec<_>, _>>()?;
    for (tuple, flow) in entries {
        let then = |time: u32| time.saturating_sub(seconds);
        let seen = seen::word(seen::flags(flow.seen), then(seen::time(flow.seen)));
        table.insert(&tuple, Flow { seen, created: then(flow.created), ..flow }, 0)?;
    }
    Ok(())
}

/// The table; unpinned when dropped.
pub struct FlowTable {
    base: PathBuf,
    pins: Pins,
    entries: HashMap<MapData, Tuple, Flow>,
}

impl FlowTable {
    /// An empty one that holds so many entries.
    ///
    /// # Errors
    /// When there is no bpffs, or the kernel refuses.
    pub fn new(entries: u32) -> Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let base = PathBuf::from(format!("/sys/fs/bpf/sheave-{}-flows{number}", std::process::id()));
        fs::create_dir(&base).with_context(|| format!("is a bpffs mounted at /sys/fs/bpf? ({})", base.display()))?;
        let pins = Pins::below(&base);
        let limits = Limits { conntrack: entries, ..Limits::default() };
        load::load(&pins, &limits, Switches::default(), Features::default())?;
        let map = MapData::from_pin(pins.map(maps::CONNTRACK))?;
        Ok(Self { base, pins, entries: Map::LruHashMap(map).try_into()? })
    }

    /// Enters hidden TCP flows, four entries each: open and busy, or closed a minute ago. Flows are told apart by their
    /// numbers.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn fill(&mut self, numbers: Range<u32>, is_over: bool) -> Result<()> {
        self.fill_with(numbers, if is_over { (seen::ANY | seen::FIN, 60) } else { (seen::ANY, 0) })
    }

    /// The same of flows of which this was seen on both sides, so many seconds ago.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn fill_with(&mut self, mut numbers: Range<u32>, (seen, ago): (u32, u32)) -> Result<()> {
        let word = seen::word(seen, clock::seconds().saturating_sub(ago));
        numbers.try_for_each(|number| self.enter(number, word))
    }

    fn enter(&mut self, number: u32, seen: u64) -> Result<()> {
        let v4 = |a, b, c, d| Addr::from(IpAddr::V4(Ipv4Addr::new(a, b, c, d)));
        let [_, a, b, c] = number.to_be_bytes();
        let (client, frontend) = (v4(198, a, b, c), v4(192, 0, 2, 11));
        let (backend, node) = (v4(10, 244, 1, 10), v4(10, a, b, c));
        let port = |port: u16| port.to_be();
        let dial = Tuple {
            src: client,
            dst: frontend,
            src_port: port(40_000),
            dst_port: port(30_001),
            proto: proto::TCP,
            hook: HOOK_INGRESS,
            zero: 0,
        };
        let forward = dial.to(backend, port(8080)).at(HOOK_EGRESS);
        let back = forward.from(node, port(20_000)).reversed().at(HOOK_INGRESS);
        let flow = |to, to_port, other_port, flags| Flow {
            to,
            seen,
            service: 1,
            backend: 1,
            created: seen::time(seen),
            to_port,
            other_port,
            flags,
            zero: 0,
        };
        for (tuple, flow) in [
            (dial, flow(backend, port(8080), port(40_000), ROLE_DIAL | FLAG_MASQUERADE)),
            (forward.reversed(), flow(frontend, port(30_001), port(40_000), ROLE_REPLY)),
            (forward, flow(node, port(20_000), port(8080), ROLE_MASQUERADE)),
            (back, flow(client, port(40_000), port(8080), ROLE_RETURN)),
        ] {
            self.entries.insert(&tuple, &flow, 0)?;
        }
        Ok(())
    }

    /// What the agent's collector works on.
    ///
    /// # Errors
    /// When a pinned map is missing.
    pub fn flows(&self) -> Result<Flows> {
        Ok(Flows::open(&self.pins)?)
    }

    /// Entries that are there.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.keys().count()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Drop for FlowTable {
    fn drop(&mut self) {
        let _ = attach::cleanup(&self.pins, false);
        let _ = fs::remove_dir(&self.base);
    }
}
