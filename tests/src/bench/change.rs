//! From a changed slice to the first connection that follows it.

use std::time::Duration;

use anyhow::Result;

use super::{
    Effort,
    cluster::{CHANGE, Size},
    numbers::{Spread, quantile},
    report::{Row, Unit},
    stage::Stage,
    usage,
};
use crate::{agent::Agent, background::Background, fake_api::FakeApi, lab::Lab, node::Node};

/// How many services there are beside the one that changes.
pub const SCALES: [usize; 3] = [10, 1_000, 10_000];
/// A node for each scale and source.
pub const NODES: usize = 2 * SCALES.len();

/// Measures both sources; the changes of the scales take turns.
///
/// # Errors
/// When a change does not arrive.
pub fn measure(lab: &Lab, cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let (first, second) = lab.nodes.split_at(SCALES.len());
    let mut rows = watched(lab, first, cpu, effort)?;
    rows.extend(read(lab, second, cpu, effort)?);
    Ok(rows)
}

/// From an API server.
fn watched(lab: &Lab, nodes: &[Node], cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let group = "from a changed slice in the API to the first connect that follows it";
    let background = Background::start()?;
    let mut places = Vec::new();
    for (node, size) in nodes.iter().zip(sizes(effort)) {
        eprintln!("bench: changes among {} services in the API", size.services);
        let stage = Stage::new(lab, node, CHANGE, cpu)?;
        let api = FakeApi::start(&background, Some(&node.host), true)?;
        let agent = stage.agent_watching(&api, size)?;
        places.push((stage, api, agent));
    }
    let mut rounds = vec![Vec::new(); places.len()];
    for number in 0..effort.change_rounds {
        for ((stage, api, agent), rounds) in places.iter().zip(&mut rounds) {
            rounds.push(round(agent, number, effort, |turn| stage.change_in(api, turn))?);
        }
    }
    let bar = |row: Row| row.bar(0.2);
    Ok(sizes(effort).zip(rounds).flat_map(|(size, rounds)| rows(group, size, &rounds, bar)).collect())
}

/// From manifests. What of the CPU is not the engine's is reading YAML.
fn read(lab: &Lab, nodes: &[Node], cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let group = "from a changed slice among manifests to the first connect that follows it";
    let mut places = Vec::new();
    for (node, size) in nodes.iter().zip(sizes(effort)) {
        eprintln!("bench: changes among {} services in manifests", size.services);
        let stage = Stage::new(lab, node, CHANGE, cpu)?;
        let agent = stage.agent(size)?;
        places.push((stage, agent));
    }
    let mut rounds = vec![Vec::new(); places.len()];
    for number in 0..effort.change_rounds {
        for ((stage, agent), rounds) in places.iter().zip(&mut rounds) {
            rounds.push(round(agent, number, effort, |turn| stage.change(turn))?);
        }
    }
    Ok(sizes(effort).zip(rounds).flat_map(|(size, rounds)| rows(group, size, &rounds, |row| row)).collect())
}

fn sizes(effort: &Effort) -> impl Iterator<Item = Size> {
    SCALES.map(|services| Size { services: effort.scaled(services), endpoints: 10 }).into_iter()
}

fn round(agent: &Agent, number: usize, effort: &Effort, change: impl FnMut(usize) -> Result<f64>) -> Result<Round> {
    let times = || anyhow::Ok([usage::process_time(agent.pid())?, usage::thread_time(agent.pid(), "engine")?]);
    let [agent_before, engine_before] = times()?;
    let turns = number * effort.changes..(number + 1) * effort.changes;
    let mut took = turns.map(change).collect::<Result<Vec<_>>>()?;
    took.sort_by(f64::total_cmp);
    let [agent, engine] = times()?;
    let each = |time: Duration| time.as_secs_f64() * 1e3 / effort.changes as f64;
    Ok(Round {
        p50: quantile(&took, 0.5),
        p99: quantile(&took, 0.99),
        agent: each(agent - agent_before),
        engine: each(engine - engine_before),
    })
}

fn rows(group: &'static str, size: Size, rounds: &[Round], bar_of_cpu: fn(Row) -> Row) -> [Row; 4] {
    let row = |what: &str, of: fn(&Round) -> f64| {
        let what = format!("{} services, {what}", size.services);
        Row::new(group, what, Spread::of(rounds.iter().map(of)), Unit::Millis)
    };
    [
        row("p50", |round| round.p50).bar(5.0),
        row("p99", |round| round.p99).bar(20.0),
        bar_of_cpu(row("CPU of the agent for one change", |round| round.agent)),
        row("of that, planning and writing", |round| round.engine),
    ]
}

/// Changes at one scale, in ms.
#[derive(Clone, Copy)]
struct Round {
    p50: f64,
    p99: f64,
    /// CPU of one change, everything.
    agent: f64,
    /// Of that, in the engine; the rest is the source's.
    engine: f64,
}
