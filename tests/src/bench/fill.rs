//! From nothing to a whole cluster in the kernel: how long, and how much memory.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::{
    Effort,
    cluster::{CHANGE, Size},
    numbers::Spread,
    report::{Row, Unit},
    stage::Stage,
    usage::{self, Memory},
};
use crate::{lab::Lab, wait::eventually};

const GROUP: &str = "programming a cluster from nothing";
/// How long that may take before something is wrong.
const PATIENCE: Duration = Duration::from_secs(120);

/// Measures on one node.
///
/// # Errors
/// When the agent does not get there.
pub fn measure(lab: &Lab, cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let stage = Stage::new(lab, lab.n1(), CHANGE, cpu)?;
    let size = Size { services: effort.scaled(10_000), endpoints: 10 };
    let Size { services, endpoints } = size;
    eprintln!("bench: programming {services} services with {endpoints} endpoints each");
    let (mut idle, mut full) = (Vec::new(), Vec::new());
    for _ in 0..effort.fills {
        idle.push(fill(&stage, Size { services: 1, endpoints: 0 })?);
        full.push(fill(&stage, size)?);
    }
    let what = format!("{services} services, {} endpoints", services * endpoints);
    let row =
        |what: String, of: &dyn Fn(&Filled) -> f64, unit| Row::new(GROUP, what, Spread::of(full.iter().map(of)), unit);
    let idle = |of: fn(&Memory) -> f64| Spread::of(idle.iter().map(|filled| of(&filled.memory)));
    Ok(vec![
        row(format!("{what}: from start to all programmed"), &|f| f.millis, Unit::Millis),
        row(format!("{what}: from the lists to all programmed"), &|f| f.programming, Unit::Millis).bar(1_000.0),
        row(format!("{what}: CPU of the agent"), &|f| f.cpu, Unit::Millis),
        row(format!("{what}: resident"), &|f| f.memory.resident, Unit::Mebibytes).bar(100.0),
        row(format!("{what}: heap and stacks"), &|f| f.memory.own, Unit::Mebibytes),
        row("kernel maps, at any scale".to_owned(), &|f| f.maps, Unit::Mebibytes),
        Row::new(GROUP, "one service: resident", idle(|m| m.resident), Unit::Mebibytes).bar(20.0),
        Row::new(GROUP, "one service: heap and stacks", idle(|m| m.own), Unit::Mebibytes),
    ])
}

/// What it took.
struct Filled {
    /// From the start of the process to everything in the kernel, in ms.
    millis: f64,
    /// Of that, after the lists were complete, in ms.
    programming: f64,
    /// CPU time of the agent, in ms.
    cpu: f64,
    memory: Memory,
    /// Of the kernel's maps, in MiB.
    maps: f64,
}

fn fill(stage: &Stage<'_>, size: Size) -> Result<Filled> {
    stage.write(size)?;
    let begin = Instant::now();
    let mut agent = stage.begin()?;
    let mut waiting = begin; // until when it had not got all lists, as far as we know
    let status = eventually("everything is programmed", PATIENCE, || {
        if !agent.is_running()? {
            return Ok(None);
        }
        let status = agent.status()?;
        if !status.synced {
            waiting = Instant::now();
        }
        ensure!(status.synced && status.frontends == status.frontends_programmed, "it says {status:?}");
        Ok(Some(status))
    })?;
    let (millis, programming) = (in_millis(begin.elapsed()), in_millis(waiting.elapsed()));
    let status = status.with_context(|| format!("the agent ended:\n{}", agent.log()))?;
    ensure!(status.services == size.services, "{} services were written, it knows {}", size.services, status.services);
    let filled = Filled {
        millis,
        programming,
        cpu: in_millis(usage::process_time(agent.pid())?),
        memory: usage::memory(agent.pid())?,
        maps: usage::maps(&stage.paths().bpffs)?,
    };
    drop(agent);
    stage.clear()?;
    Ok(filled)
}

fn in_millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
