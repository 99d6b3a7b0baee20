//! From a changed slice to the first connection that follows it.

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
    for number in 0..effort.rounds {
        for ((stage, agent), rounds) in stages.iter().zip(&mut rounds) {
            let begin = usage::process_time(agent.pid())?;
            let turns = number * effort.changes..(number + 1) * effort.changes;
            let mut took = turns.map(|turn| stage.change(turn)).collect::<Result<Vec<_>>>()?;
            took.sort_by(f64::total_cmp);
            let cpu = (usage::process_time(agent.pid())? - begin).as_secs_f64() * 1e3 / effort.changes as f64;
            rounds.push((quantile(&took, 0.5), quantile(&took, 0.99), cpu));
        }
    }
    let mut rows = Vec::new();
    for (services, rounds) in scales.into_iter().zip(rounds) {
        let row = |what: &str, of: fn(&(f64, f64, f64)) -> f64| {
            let what = format!("{services} services, {what}");
            Row::new(GROUP, what, Spread::of(rounds.iter().map(of)), Unit::Millis)
        };
        rows.push(row("p50", |(p50, _, _)| *p50).bar(5.0));
        rows.push(row("p99", |(_, p99, _)| *p99).bar(20.0));
        rows.push(row("CPU of the agent for one change", |(_, _, cpu)| *cpu).bar(0.2));
    }
    Ok(rows)
}
