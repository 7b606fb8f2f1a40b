//! Median, spread, and when two medians are equal.

use serde::{Deserialize, Serialize};

/// Summary of repeated timings of one candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Median. Unit: microseconds.
    pub median_us: f64,
    /// Interquartile range. Unit: microseconds.
    pub spread_us: f64,
    /// Number of samples.
    pub samples: u32,
}

impl Summary {
    /// Summarises samples in microseconds; `None` if there are none or one is not a positive finite number.
    pub fn of(samples_us: &[f64]) -> Option<Summary> {
        if samples_us.is_empty() || samples_us.iter().any(|s| !s.is_finite() || *s <= 0.0) {
            return None;
        }
        let mut sorted = samples_us.to_vec();
        sorted.sort_by(f64::total_cmp);
        Some(Summary {
            median_us: to_ns(quantile(&sorted, 0.5)),
            spread_us: to_ns(quantile(&sorted, 0.75) - quantile(&sorted, 0.25)),
            samples: sorted.len() as u32,
        })
    }

    /// Spread relative to the median.
    pub fn relative_spread(&self) -> f64 {
        self.spread_us / self.median_us
    }

    /// Standard error of the median, for samples that scatter normally: 1.25 sigma / sqrt(n), sigma = IQR / 1.35.
    fn median_error_us(&self) -> f64 {
        0.93 * self.spread_us / f64::from(self.samples).sqrt()
    }

    /// True if the difference to `other` is within the noise: under `floor` of the faster, or under twice the standard errors.
    pub fn ties_with(&self, other: &Summary, floor: f64) -> bool {
        let noise = 2.0 * (self.median_error_us() + other.median_error_us());
        let difference = (self.median_us - other.median_us).abs();
        difference <= noise.max(floor * self.median_us.min(other.median_us))
    }
}

/// Rounds to nanoseconds: no timer knows more, and short numbers survive being written and read as text.
fn to_ns(us: f64) -> f64 {
    (us * 1e3).round() / 1e3
}

/// Rounds an error to four digits, for the same reason.
pub(crate) fn four_digits(error: f64) -> f64 {
    format!("{error:.3e}").parse().unwrap_or(error)
}

/// Linear interpolation between the sorted samples.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = q * (sorted.len() - 1) as f64;
    let (low, high) = (at.floor() as usize, at.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (at - low as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_spread_are_the_textbook_ones() {
        let s = Summary::of(&[4.0, 1.0, 3.0, 2.0]).unwrap();
        assert_eq!((s.median_us, s.samples), (2.5, 4));
        assert!((s.spread_us - 1.5).abs() < 1e-12);
    }

    #[test]
    fn numbers_survive_being_written_as_text() {
        let s = Summary::of(&[100.825_122_632_576_76, 100.925_122_632_576_76]).unwrap();
        let back: Summary = serde_json::from_str(&serde_json::to_string(&s).unwrap()).unwrap();
        assert_eq!(back, s);
        let error = four_digits(1.234_567_8e-3);
        assert_eq!(error, 1.235e-3);
        assert_eq!(
            serde_json::from_str::<f64>(&serde_json::to_string(&error).unwrap()).unwrap(),
            error
        );
    }

    #[test]
    fn a_sample_that_is_no_time_makes_no_summary() {
        for bad in [f64::NAN, f64::INFINITY, 0.0, -1.0] {
            assert_eq!(Summary::of(&[1.0, bad]), None);
        }
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn noise_is_the_floor_or_the_scatter_whichever_is_larger() {
        let quiet = |us: f64| Summary::of(&[us; 9]).unwrap();
        assert!(quiet(100.0).ties_with(&quiet(100.9), 0.01));
        assert!(!quiet(100.0).ties_with(&quiet(101.5), 0.01));
        let noisy = Summary::of(&[90.0, 95.0, 105.0, 110.0]).unwrap();
        assert!(noisy.ties_with(&quiet(105.0), 0.01));
    }
}
