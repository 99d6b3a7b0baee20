//! Samples and what is said about them.

use serde::Serialize;

/// Median of samples, and how sure it is.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the samples are below.
    pub median: f64,
    /// Lower end of the interval that holds the true median in 95 of 100 runs; of fewer than six samples the least.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

impl Spread {
    /// Of at least one sample.
    ///
    /// # Panics
    /// Without any.
    #[must_use]
    pub fn of(samples: impl IntoIterator<Item = f64>) -> Self {
        let mut samples: Vec<f64> = samples.into_iter().collect();
        samples.sort_by(f64::total_cmp);
        assert!(!samples.is_empty(), "a spread needs a sample");
        // Order statistics: no assumption about how samples are distributed.
        let count = samples.len() as f64;
        let reach = 0.98 * count.sqrt();
        let at = |rank: f64| samples[(rank.max(1.0) as usize).min(samples.len()) - 1];
        Self {
            median: quantile(&samples, 0.5),
            low: at((count / 2.0 - reach).floor()),
            high: at((count / 2.0 + 1.0 + reach).ceil()),
        }
    }
}

/// The sample below which that part of all lies; of sorted samples, interpolated between two.
#[must_use]
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = part * (sorted.len().saturating_sub(1)) as f64;
    let at = |index: usize| sorted.get(index).or(sorted.last()).copied().unwrap_or(f64::NAN);
    let below = place.floor() as usize;
    at(below) + (at(below + 1) - at(below)) * place.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_samples() {
        for (samples, part, expected) in [
            (&[7.0][..], 0.5, 7.0),
            (&[1.0, 2.0], 0.5, 1.5),
            (&[1.0, 2.0, 3.0], 0.5, 2.0),
            (&[0.0, 10.0], 0.99, 9.9),
            (&[1.0, 2.0, 3.0], 1.0, 3.0),
        ] {
            assert!((quantile(samples, part) - expected).abs() < 1e-9, "{part} of {samples:?}");
        }
    }

    #[test]
    fn a_spread_needs_no_order() {
        for (samples, expected) in [
            (vec![3.0, 1.0, 2.0], Spread { median: 2.0, low: 1.0, high: 3.0 }),
            (vec![5.0], Spread { median: 5.0, low: 5.0, high: 5.0 }),
            // The ranks that tables of the sign test give for 100 samples: 40 and 61.
            ((1..=100).rev().map(f64::from).collect(), Spread { median: 50.5, low: 40.0, high: 61.0 }),
        ] {
            assert_eq!(Spread::of(samples), expected);
        }
    }
}
