//! What traffic costs, as ratios to the same traffic on a node without sheave, in the same round.

use std::net::SocketAddr;

use anyhow::Result;

use super::{
    Effort,
    cluster::{Size, TRAFFIC},
    report::{Row, Unit},
    rounds::Rounds,
    stage::{Batch, Stage, vip},
    worker::{ECHO_PORT, Order, PORT},
};
use crate::lab::Lab;

/// How many services there are on the nodes with an agent.
pub const SCALES: [usize; 3] = [1, 1_000, 50_000];

/// Bare, bare again, and one for each scale.
pub const NODES: usize = 2 + SCALES.len();

/// Which node, and whether through the Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Arm {
    node: usize,
    vip: bool,
}

const BARE: Arm = Arm { node: 0, vip: false };
const BARE_AGAIN: Arm = Arm { node: 1, vip: false };

/// Measures on the lab's first [`NODES`] nodes.
///
/// # Errors
/// When an operation fails.
pub fn measure(lab: &Lab, cpu: usize, effort: &Effort) -> Result<Vec<Row>> {
    let stages =
        lab.nodes.iter().take(NODES).map(|node| Stage::new(lab, node, TRAFFIC, cpu)).collect::<Result<Vec<_>>>()?;
    let mut agents = Vec::new();
    for (stage, services) in stages[2..].iter().zip(SCALES) {
        let services = effort.scaled(services);
        eprintln!("bench: {services} services");
        agents.push(stage.agent(Size { services, endpoints: 2 })?);
    }
    let mut rows = Vec::new();
    rows.extend(connects(&stages, effort)?);
    rows.extend(conversations(&stages, effort)?);
    Ok(rows)
}

/// Connect and close, directly and through a ClusterIP.
fn connects(stages: &[Stage<'_>], effort: &Effort) -> Result<Vec<Row>> {
    eprintln!("bench: connect and close");
    let mut arms = vec![BARE, BARE_AGAIN];
    arms.extend((2..NODES).flat_map(|node| [Arm { node, vip: false }, Arm { node, vip: true }]));
    let rounds = rounds(stages, &arms, effort, |to, times| Order::Connect(to(PORT), times))?;
    let ratio = |arm: Arm, of: fn(&Batch) -> f64| rounds.ratio(arm, BARE, of);
    let mut rows = Vec::new();

    let group = "CPU of a connection, from connect to close, client and server, × bare";
    let row = |what: String, arm| Row::new(group, what, ratio(arm, |batch| batch.cpu), Unit::TimesBare);
    let noise = row("bare node against bare node: the noise".to_owned(), BARE_AGAIN);
    let bar = |row: Row, bar| row.bar_with_noise(bar, (noise.spread.median - 1.0).abs());
    rows.push(noise.clone());
    for (node, services) in (2..).zip(SCALES.map(|s| effort.scaled(s))) {
        rows.push(bar(row(format!("ClusterIP, {services} services"), Arm { node, vip: true }), 1.05));
        rows.push(bar(row(format!("direct beside it, {services} services"), Arm { node, vip: false }), 1.03));
    }

    let group = "connect(), client alone, × bare";
    let row = |what: String, arm, of| Row::new(group, what, ratio(arm, of), Unit::TimesBare);
    rows.push(row("bare against bare, p50: the noise".to_owned(), BARE_AGAIN, |batch| batch.took.p50));
    for (node, services) in (2..).zip(SCALES.map(|s| effort.scaled(s))) {
        let arm = Arm { node, vip: true };
        rows.push(row(format!("ClusterIP, {services} services, p50"), arm, |batch| batch.took.p50));
        rows.push(row(format!("ClusterIP, {services} services, p99"), arm, |batch| batch.took.p99));
    }
    let (p50, p99) = (rounds.plain(BARE, |batch| batch.took.p50), rounds.plain(BARE, |batch| batch.took.p99));
    rows.push(Row::new(group, "bare, p50", p50, Unit::Micros));
    rows.push(Row::new(group, "bare, p99", p99, Unit::Micros));
    Ok(rows)
}

/// Requests on an established connection, and datagrams, at the largest scale.
fn conversations(stages: &[Stage<'_>], effort: &Effort) -> Result<Vec<Row>> {
    let node = NODES - 1;
    let [direct, through] = [false, true].map(|vip| Arm { node, vip });
    let services = effort.scaled(SCALES[SCALES.len() - 1]);
    let arms = [BARE, BARE_AGAIN, direct, through];
    let mut rows = Vec::new();

    eprintln!("bench: requests on an established connection");
    let rounds_of = rounds(stages, &arms, effort, |to, times| Order::Ask(to(ECHO_PORT), times))?;
    let group = "CPU of a request and its answer on an established connection, × bare";
    let row = |what: String, arm| Row::new(group, what, rounds_of.ratio(arm, BARE, |batch| batch.cpu), Unit::TimesBare);
    let noise = row("bare node against bare node: the noise".to_owned(), BARE_AGAIN);
    let bar = |row: Row, bar| row.bar_with_noise(bar, (noise.spread.median - 1.0).abs());
    rows.push(noise.clone());
    rows.push(bar(row(format!("ClusterIP, {services} services"), through), 1.00));
    rows.push(bar(row(format!("direct beside it, {services} services"), direct), 1.00));

    eprintln!("bench: datagrams");
    let rounds_of = rounds(stages, &arms, effort, |to, times| Order::Datagrams(to(PORT), times))?;
    let group = "CPU of sendto and its echo, unconnected UDP, × bare";
    let row = |what: String, arm| Row::new(group, what, rounds_of.ratio(arm, BARE, |batch| batch.cpu), Unit::TimesBare);
    let noise = row("bare node against bare node: the noise".to_owned(), BARE_AGAIN);
    let bar = |row: Row, bar| row.bar_with_noise(bar, (noise.spread.median - 1.0).abs());
    rows.push(noise.clone());
    rows.push(row(format!("ClusterIP, {services} services"), through));
    rows.push(bar(row(format!("direct beside it, {services} services"), direct), 1.03));
    Ok(rows)
}

/// Rounds of an order, with its address and its number of operations still to be filled in.
fn rounds(
    stages: &[Stage<'_>],
    arms: &[Arm],
    effort: &Effort,
    order: impl Fn(&dyn Fn(u16) -> SocketAddr, u32) -> Order,
) -> Result<Rounds<Arm>> {
    Rounds::run(arms, effort.rounds, |arm| {
        let stage = &stages[arm.node];
        let to = |port| if arm.vip { vip(port) } else { stage.direct(port) };
        stage.measure(&order(&to, effort.batch))
    })
}
