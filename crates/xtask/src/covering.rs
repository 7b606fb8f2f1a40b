//! Covering sets: few rows in which every pair of values of any two factors occurs at least once.
//!
//! Faults of a kernel template hang on one or two of its constants far more often than on three at once, so a set of pairs
//! finds nearly all of them for a few dozen compilations instead of millions.

use std::collections::BTreeSet;

/// One row: the index of the chosen value of each factor.
pub type Row = Vec<usize>;

/// (factor, value, later factor, value)
type Pair = (usize, usize, usize, usize);

/// What a search gave.
pub struct Covering {
    /// The rows.
    pub rows: Vec<Row>,
    /// Pairs for which no allowed row was found.
    pub not_covered: usize,
}

/// Covers every pair of values with rows that `allowed` takes. `sizes[f]` is the number of values of factor `f`.
///
/// Deterministic: the same arguments give the same rows. A pair counts as not coverable after `tries` random completions.
pub fn pairs(sizes: &[usize], tries: usize, allowed: impl Fn(&[usize]) -> bool) -> Covering {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let all: Vec<Vec<usize>> = sizes.iter().map(|n| (0..*n).collect()).collect();
    // A value that occurs in no allowed row would otherwise cost `tries` for each of its pairs.
    let values: Vec<Vec<usize>> = (0..sizes.len())
        .map(|f| {
            let occurs =
                |v: &usize| (0..tries).any(|_| allowed(&random_row(&all, (f, *v), &mut random)));
            (0..sizes[f]).filter(occurs).collect()
        })
        .collect();
    let mut open: BTreeSet<Pair> = BTreeSet::new();
    let mut pairs_in_all = 0;
    for a in 0..sizes.len() {
        for b in a + 1..sizes.len() {
            pairs_in_all += sizes[a] * sizes[b];
            open.extend(
                values[a]
                    .iter()
                    .flat_map(|v| values[b].iter().map(move |w| (a, *v, b, *w))),
            );
        }
    }
    let mut covering = Covering {
        rows: Vec::new(),
        not_covered: pairs_in_all - open.len(),
    };
    while let Some(seed) = open.first().copied() {
        match best_row(&values, seed, &open, tries, &mut random, &allowed) {
            Some(row) => {
                for a in 0..row.len() {
                    for b in a + 1..row.len() {
                        open.remove(&(a, row[a], b, row[b]));
                    }
                }
                covering.rows.push(row);
            }
            None => {
                open.remove(&seed);
                covering.not_covered += 1;
            }
        }
    }
    covering
}

/// A few of `rows` in which every value occurs that occurs in any of them.
pub fn every_value(rows: &[Row]) -> Vec<Row> {
    let mut open: BTreeSet<(usize, usize)> = rows
        .iter()
        .flat_map(|r| r.iter().copied().enumerate())
        .collect();
    let mut chosen = Vec::new();
    while !open.is_empty() {
        let gain = |row: &&Row| {
            row.iter()
                .copied()
                .enumerate()
                .filter(|fv| open.contains(fv))
                .count()
        };
        let Some(best) = rows.iter().max_by_key(gain) else {
            break;
        };
        best.iter().copied().enumerate().for_each(|fv| {
            open.remove(&fv);
        });
        chosen.push(best.clone());
    }
    chosen
}

/// The allowed row with the seed pair, out of a few, that covers most open pairs.
fn best_row(
    values: &[Vec<usize>],
    seed: Pair,
    open: &BTreeSet<Pair>,
    tries: usize,
    random: &mut Random,
    allowed: &impl Fn(&[usize]) -> bool,
) -> Option<Row> {
    const CANDIDATES: usize = 12;
    let mut best: Option<(usize, Row)> = None;
    let mut found = 0;
    for attempt in 0..tries {
        // Greedy completions cover much but may all break one rule; later attempts are more and more random.
        let greedy = random.below(tries) >= attempt;
        let row = complete(values, seed, open, greedy, random);
        if !allowed(&row) {
            continue;
        }
        let gain = gain(&row, open);
        if best.as_ref().is_none_or(|(g, _)| gain > *g) {
            best = Some((gain, row));
        }
        found += 1;
        if found == CANDIDATES {
            break;
        }
    }
    best.map(|(_, row)| row)
}

fn gain(row: &[usize], open: &BTreeSet<Pair>) -> usize {
    (0..row.len())
        .flat_map(|a| (a + 1..row.len()).map(move |b| (a, b)))
        .filter(|(a, b)| open.contains(&(*a, row[*a], *b, row[*b])))
        .count()
}

/// A random row with one value given.
fn random_row(values: &[Vec<usize>], given: (usize, usize), random: &mut Random) -> Row {
    (0..values.len())
        .map(|f| {
            if f == given.0 {
                given.1
            } else {
                values[f][random.below(values[f].len())]
            }
        })
        .collect()
}

fn complete(
    values: &[Vec<usize>],
    seed: Pair,
    open: &BTreeSet<Pair>,
    greedy: bool,
    random: &mut Random,
) -> Row {
    let mut row: Vec<Option<usize>> = vec![None; values.len()];
    row[seed.0] = Some(seed.1);
    row[seed.2] = Some(seed.3);
    let mut order: Vec<usize> = (0..values.len()).filter(|f| row[*f].is_none()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    for factor in order {
        let n = values[factor].len();
        let start = random.below(n);
        let choices = (0..n).map(|v| values[factor][(v + start) % n]);
        let value = if greedy {
            choices.max_by_key(|v| {
                row.iter()
                    .enumerate()
                    .filter_map(|(f, w)| {
                        w.map(|w| {
                            if f < factor {
                                (f, w, factor, *v)
                            } else {
                                (factor, *v, f, w)
                            }
                        })
                    })
                    .filter(|pair| open.contains(pair))
                    .count()
            })
        } else {
            choices.into_iter().next()
        };
        row[factor] = Some(value.expect("every factor should have a value"));
    }
    row.into_iter().flatten().collect()
}

/// splitmix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uncovered(sizes: &[usize], rows: &[Row]) -> Vec<Pair> {
        let mut missing = Vec::new();
        for a in 0..sizes.len() {
            for b in a + 1..sizes.len() {
                for v in 0..sizes[a] {
                    for w in 0..sizes[b] {
                        if !rows.iter().any(|r| r[a] == v && r[b] == w) {
                            missing.push((a, v, b, w));
                        }
                    }
                }
            }
        }
        missing
    }

    #[test]
    fn every_pair_occurs_in_few_rows() {
        let sizes = [3, 2, 4, 3, 2, 2, 5, 3];
        let covering = pairs(&sizes, 100, |_| true);
        assert_eq!(uncovered(&sizes, &covering.rows), []);
        assert_eq!(covering.not_covered, 0);
        assert!(
            covering.rows.len() <= 32,
            "20 rows are the least possible, got {}",
            covering.rows.len()
        );
    }

    #[test]
    fn forbidden_rows_never_occur_and_only_forbidden_pairs_are_missing() {
        let sizes = [3, 3, 3];
        let covering = pairs(&sizes, 400, |row| row[0] + row[1] < 4);
        assert!(covering.rows.iter().all(|row| row[0] + row[1] < 4));
        assert_eq!(uncovered(&sizes, &covering.rows), [(0, 2, 1, 2)]);
        assert_eq!(covering.not_covered, 1);
    }

    #[test]
    fn the_rows_are_the_same_each_time() {
        let rows = || pairs(&[4, 3, 5, 2], 50, |row| row[0] != row[1]).rows;
        assert_eq!(rows(), rows());
    }
}
