use crate::{Candidate, Summary};

/// Index of the candidate to use.
///
/// Among those whose times tie with the fastest, the default wins; without it, the first in the fixed order. So two clean
/// runs agree unless a difference is real.
pub fn choose(
    finalists: &[(Candidate, Summary)],
    default: &Candidate,
    noise_floor: f64,
) -> Option<usize> {
    let tied = ties_with_best(finalists, noise_floor);
    let of_default = tied.iter().copied().find(|i| finalists[*i].0 == *default);
    of_default.or_else(|| tied.into_iter().min_by_key(|i| finalists[*i].0))
}

/// Indices of the fastest and of all that tie with it.
pub fn ties_with_best(finalists: &[(Candidate, Summary)], noise_floor: f64) -> Vec<usize> {
    let Some((_, best)) = finalists
        .iter()
        .min_by(|a, b| a.1.median_us.total_cmp(&b.1.median_us))
    else {
        return Vec::new();
    };
    (0..finalists.len())
        .filter(|i| finalists[*i].1.ties_with(best, noise_floor))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mamba2_spec::parameters::StateUpdate;

    fn finalists(medians: &[f64]) -> Vec<(Candidate, Summary)> {
        let candidate = |i: usize| {
            Candidate::Step(StateUpdate {
                block_head: [4, 8, 16, 32][i],
                ..Default::default()
            })
        };
        medians
            .iter()
            .enumerate()
            .map(|(i, us)| (candidate(i), Summary::of(&[*us; 9]).unwrap()))
            .collect()
    }

    #[test]
    fn the_fastest_wins_by_more_than_the_noise() {
        let list = finalists(&[100.0, 90.0, 95.0]);
        assert_eq!(choose(&list, &list[0].0, 0.01), Some(1));
    }

    #[test]
    fn the_default_wins_inside_the_noise() {
        let list = finalists(&[99.5, 99.0, 99.9]);
        assert_eq!(choose(&list, &list[2].0, 0.01), Some(2));
    }

    #[test]
    fn t15_ties_without_the_default_fall_to_the_fixed_order_whatever_the_order_of_measurement() {
        let mut list = finalists(&[99.5, 99.0, 150.0]);
        let default = list[2].0;
        assert_eq!(list[choose(&list, &default, 0.01).unwrap()].0, list[0].0);
        let first = list[0].0;
        list.reverse();
        assert_eq!(list[choose(&list, &default, 0.01).unwrap()].0, first);
    }
}
