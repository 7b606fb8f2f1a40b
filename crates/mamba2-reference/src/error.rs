use std::fmt;

use rayon::prelude::*;

/// Distance between a result and the right answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ErrorReport {
    /// `|got - want| / |want|` over all elements (2-norms); infinite if any element is not finite, or if `want` is all
    /// zero and `got` is not.
    pub relative_frobenius: f64,
    /// Largest absolute error of a finite element.
    pub max_abs: f64,
    /// 99.9th percentile of the absolute errors.
    pub p999_abs: f64,
    /// Mean of the absolute errors.
    pub mean_abs: f64,
    /// Mean of `|want|`: the scale to read the absolute errors by.
    pub want_mean_abs: f64,
    /// Flat index of the worst element: the first that is not finite if there is one, else that of `max_abs`.
    pub worst_index: usize,
    /// Elements that are NaN or infinite in `got`.
    pub non_finite: usize,
    /// Elements compared.
    pub elems: usize,
}

impl ErrorReport {
    /// Compares `got` with `want`, element by element.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn compare(got: &[f64], want: &[f64]) -> ErrorReport {
        assert_eq!(
            got.len(),
            want.len(),
            "results of different lengths cannot be compared"
        );
        let mut errors = Vec::with_capacity(got.len());
        let (mut square_error, mut square_want, mut sum_want) = (0.0f64, 0.0f64, 0.0f64);
        let (mut max_abs, mut worst, mut first_non_finite, mut non_finite) = (0.0f64, 0, None, 0);
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            square_want += want * want;
            sum_want += want.abs();
            let error = (got - want).abs();
            if !error.is_finite() {
                non_finite += 1;
                first_non_finite.get_or_insert(i);
                continue;
            }
            square_error += error * error;
            errors.push(error);
            if error > max_abs {
                (max_abs, worst) = (error, i);
            }
        }
        let relative_frobenius = if non_finite > 0 {
            f64::INFINITY
        } else {
            relative(square_error, square_want)
        };
        let mean = |sum: f64| {
            if got.is_empty() {
                0.0
            } else {
                sum / got.len() as f64
            }
        };
        ErrorReport {
            relative_frobenius,
            max_abs,
            mean_abs: mean(errors.iter().sum()),
            p999_abs: percentile_999(&mut errors),
            want_mean_abs: mean(sum_want),
            worst_index: first_non_finite.unwrap_or(worst),
            non_finite,
            elems: got.len(),
        }
    }

    /// True if every element is finite and the relative error is at most `bound`.
    pub fn within(&self, bound: f64) -> bool {
        self.non_finite == 0 && self.relative_frobenius <= bound
    }
}

/// `|got - want| / |want|` of finite sums of squares.
fn relative(square_error: f64, square_want: f64) -> f64 {
    if square_error == 0.0 {
        return 0.0;
    }
    (square_error / square_want).sqrt()
}

/// Elements that one thread takes at a time. Fixed, so that sums are made in the same order on every machine.
const PIECE: usize = 1 << 14;

/// [`ErrorReport::relative_frobenius`] and nothing else, in parallel, of elements that `got` makes as they are needed. The last digits may
/// differ from the report's: the sums are made in another order.
pub fn relative_frobenius(want: &[f64], got: impl Fn(usize) -> f64 + Sync) -> f64 {
    let sums = |(piece, want): (usize, &[f64])| {
        let first = piece * PIECE;
        let add = |(error, norm): (f64, f64), (i, want): (usize, &f64)| {
            let off = got(first + i) - want;
            (error + off * off, norm + want * want)
        };
        want.iter().enumerate().fold((0.0, 0.0), add)
    };
    let pieces: Vec<(f64, f64)> = want.par_chunks(PIECE).enumerate().map(sums).collect();
    let total = |(a, b): (f64, f64), (c, d): &(f64, f64)| (a + c, b + d);
    match pieces.iter().fold((0.0, 0.0), total) {
        (error, _) if !error.is_finite() => f64::INFINITY,
        (error, norm) => relative(error, norm),
    }
}

fn percentile_999(errors: &mut [f64]) -> f64 {
    if errors.is_empty() {
        return 0.0;
    }
    let at = (errors.len() * 999).div_ceil(1000) - 1;
    *errors.select_nth_unstable_by(at, f64::total_cmp).1
}

impl fmt::Display for ErrorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "relative {:.2e}, max {:.2e} at {}, p99.9 {:.2e}, mean {:.2e} (of mean magnitude {:.2e}), {} elements",
            self.relative_frobenius,
            self.max_abs,
            self.worst_index,
            self.p999_abs,
            self.mean_abs,
            self.want_mean_abs,
            self.elems
        )?;
        if self.non_finite > 0 {
            write!(f, ", {} NOT FINITE", self.non_finite)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_results_have_no_error() {
        let report = ErrorReport::compare(&[1.0, -2.0], &[1.0, -2.0]);
        assert_eq!(
            (report.relative_frobenius, report.max_abs, report.non_finite),
            (0.0, 0.0, 0)
        );
        assert!(ErrorReport::compare(&[], &[]).within(0.0));
    }

    #[test]
    fn the_worst_element_is_named() {
        let report = ErrorReport::compare(&[3.0, 4.5, 0.0], &[3.0, 4.0, 0.0]);
        assert_eq!((report.worst_index, report.max_abs), (1, 0.5));
        assert!((report.relative_frobenius - 0.1).abs() < 1e-15);
    }

    #[test]
    fn a_nan_is_never_within_any_bound() {
        for bad in [f64::NAN, f64::INFINITY] {
            let report = ErrorReport::compare(&[0.0, bad], &[0.0, 1.0]);
            assert_eq!((report.non_finite, report.worst_index), (1, 1));
            assert!(!report.within(f64::INFINITY));
        }
    }

    #[test]
    fn the_relative_error_alone_is_that_of_the_report() {
        let want: Vec<f64> = (0..40_000).map(|i| f64::from(i % 97) - 40.0).collect();
        let got: Vec<f64> = want.iter().map(|w| w * 1.001 + 1e-3).collect();
        let report = ErrorReport::compare(&got, &want);
        let alone = relative_frobenius(&want, |i| got[i]);
        assert!((alone / report.relative_frobenius - 1.0).abs() < 1e-12);
        assert_eq!(relative_frobenius(&want, |i| want[i]), 0.0);
        assert_eq!(relative_frobenius(&[0.0], |_| 1e-9), f64::INFINITY);
        assert_eq!(relative_frobenius(&[], |_| 0.0), 0.0);
        for bad in [f64::NAN, f64::INFINITY] {
            let one = |i| if i == 20_000 { bad } else { got[i] };
            assert_eq!(relative_frobenius(&want, one), f64::INFINITY);
        }
    }

    #[test]
    fn a_result_that_should_be_zero_but_is_not_is_infinitely_wrong() {
        assert_eq!(
            ErrorReport::compare(&[1e-9], &[0.0]).relative_frobenius,
            f64::INFINITY
        );
    }

    #[test]
    fn the_percentile_leaves_out_one_in_a_thousand() {
        let mut got = vec![1.0; 2000];
        got[5] = 100.0;
        got[6] = 50.0;
        let report = ErrorReport::compare(&got, &vec![0.0; 2000]);
        assert_eq!((report.p999_abs, report.max_abs), (1.0, 100.0));
    }
}
