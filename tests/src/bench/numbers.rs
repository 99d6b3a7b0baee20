//! Samples and what is said about them.

use serde::Serialize;

/// Median and range of samples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the samples are below.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// The largest.
    pub most: f64,
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
        let [least, .., most] = samples[..] else {
            let only = *samples.first().expect("a spread needs a sample");
            return Self { median: only, least: only, most: only };
        };
        Self { median: quantile(&samples, 0.5), least, most }
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
            (vec![3.0, 1.0, 2.0], Spread { median: 2.0, least: 1.0, most: 3.0 }),
            (vec![5.0], Spread { median: 5.0, least: 5.0, most: 5.0 }),
        ] {
            assert_eq!(Spread::of(samples), expected);
        }
    }
}
