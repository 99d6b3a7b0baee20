//! Rounds of arms that take turns, so that what disturbs the machine meets all of them.

use anyhow::Result;

use super::{numbers::Spread, stage::Batch};

/// What every arm took in every round.
#[derive(Debug)]
pub struct Rounds<A> {
    arms: Vec<A>,
    rounds: Vec<Vec<Batch>>,
}

impl<A: Copy + PartialEq> Rounds<A> {
    /// Runs every arm once to warm it, then once a round, beginning with another one each time, so that no arm always
    /// follows the same one.
    ///
    /// # Errors
    /// The first of an arm.
    pub fn run(arms: &[A], rounds: usize, run: impl Fn(A) -> Result<Batch>) -> Result<Self> {
        for arm in arms {
            run(*arm)?;
        }
        let mut all = Vec::new();
        for number in 0..rounds {
            let mut round = vec![None; arms.len()];
            for turn in 0..arms.len() {
                let turn = (turn + number) % arms.len();
                round[turn] = Some(run(arms[turn])?);
            }
            all.push(round.into_iter().flatten().collect());
        }
        Ok(Self { arms: arms.to_vec(), rounds: all })
    }

    fn samples(&self, arm: A, of: fn(&Batch) -> f64) -> impl Iterator<Item = f64> {
        let index = self.arms.iter().position(|other| *other == arm).unwrap_or_default();
        self.rounds.iter().filter_map(move |round| round.get(index)).map(of)
    }

    /// A number as it is.
    #[must_use]
    pub fn plain(&self, arm: A, of: fn(&Batch) -> f64) -> Spread {
        Spread::of(self.samples(arm, of))
    }

    /// A number by that of another arm in the same round.
    #[must_use]
    pub fn ratio(&self, arm: A, to: A, of: fn(&Batch) -> f64) -> Spread {
        Spread::of(self.samples(arm, of).zip(self.samples(to, of)).map(|(number, base)| number / base))
    }
}
