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
use crate::lab::Lab;

const GROUP: &str = "from a changed slice to the first connect that follows it";

/// How many services there are beside the one that changes.
pub const SCALES: [usize; 3] = [10, 1_000, 10_000];

/// Measures on a node for each scale; the changes of the scales take turns.
///
/// # Errors
/// When a change does not arrive.
pub fn measure(lab: &Lab, cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let scales = SCALES.map(|services| effort.scaled(services));
    let mut stages = Vec::new();
    for (node, services) in lab.nodes.iter().zip(scales) {
        eprintln!("bench: changes among {services} services");
        let stage = Stage::new(lab, node, CHANGE, cpu)?;
        let agent = stage.agent(Size { services, endpoints: 10 })?;
        stages.push((stage, agent));
    }
    let mut rounds = vec![Vec::new(); stages.len()];
    for number in 0..effort.change_rounds {
        for ((stage, agent), rounds) in stages.iter().zip(&mut rounds) {
            let times = || anyhow::Ok([usage::process_time(agent.pid())?, usage::thread_time(agent.pid(), "engine")?]);
            let [agent_before, engine_before] = times()?;
            let turns = number * effort.changes..(number + 1) * effort.changes;
            let mut took = turns.map(|turn| stage.change(turn)).collect::<Result<Vec<_>>>()?;
            took.sort_by(f64::total_cmp);
            let [agent, engine] = times()?;
            let each = |time: Duration| time.as_secs_f64() * 1e3 / effort.changes as f64;
            rounds.push(Round {
                p50: quantile(&took, 0.5),
                p99: quantile(&took, 0.99),
                agent: each(agent - agent_before),
                engine: each(engine - engine_before),
            });
        }
    }
    let mut rows = Vec::new();
    for (services, rounds) in scales.into_iter().zip(rounds) {
        let row = |what: &str, of: fn(&Round) -> f64| {
            let what = format!("{services} services, {what}");
            Row::new(GROUP, what, Spread::of(rounds.iter().map(of)), Unit::Millis)
        };
        rows.push(row("p50", |round| round.p50).bar(5.0));
        rows.push(row("p99", |round| round.p99).bar(20.0));
        rows.push(row("CPU of the agent for one change", |round| round.agent).bar(0.2));
        rows.push(row("of that, planning and writing", |round| round.engine));
    }
    Ok(rows)
}

/// Changes at one scale, in ms.
#[derive(Clone, Copy)]
struct Round {
    p50: f64,
    p99: f64,
    /// CPU of one change, everything.
    agent: f64,
    /// Of that, in the engine; the rest is reading manifests.
    engine: f64,
}
