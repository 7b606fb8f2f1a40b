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
    let mut open: BTreeSet<Pair> = BTreeSet::new();
    for a in 0..sizes.len() {
        for b in a + 1..sizes.len() {
            open.extend((0..sizes[a]).flat_map(|v| (0..sizes[b]).map(move |w| (a, v, b, w))));
        }
    }
    let mut covering = Covering { rows: Vec::new(), not_covered: 0 };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    while let Some(seed) = open.first().copied() {
        match best_row(sizes, seed, &open, tries, &mut random, &allowed) {
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

/// The allowed row with the seed pair, out of a few, that covers most open pairs.
fn best_row(
    sizes: &[usize],
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
        let row = complete(sizes, seed, open, greedy, random);
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
    (0..row.len()).flat_map(|a| (a + 1..row.len()).map(move |b| (a, b))).filter(|(a, b)| open.contains(&(*a, row[*a], *b, row[*b]))).count()
}

fn complete(sizes: &[usize], seed: Pair, open: &BTreeSet<Pair>, greedy: bool, random: &mut Random) -> Row {
    let mut row: Vec<Option<usize>> = vec![None; sizes.len()];
    row[seed.0] = Some(seed.1);
    row[seed.2] = Some(seed.3);
    let mut order: Vec<usize> = (0..sizes.len()).filter(|f| row[*f].is_none()).collect();
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i + 1));
    }
    for factor in order {
        let start = random.below(sizes[factor]);
        let values = (0..sizes[factor]).map(|v| (v + start) % sizes[factor]);
        let value = if greedy {
            values.max_by_key(|v| {
                row.iter()
                    .enumerate()
                    .filter_map(|(f, w)| w.map(|w| if f < factor { (f, w, factor, *v) } else { (factor, *v, f, w) }))
                    .filter(|pair| open.contains(pair))
                    .count()
            })
        } else {
            values.into_iter().next()
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
        assert!(covering.rows.len() <= 32, "20 rows are the least possible, got {}", covering.rows.len());
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
