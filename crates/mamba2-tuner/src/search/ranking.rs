use mamba2_spec::KernelConfig;

use super::{Entry, Group};
use crate::space::{Assembly, Space};
use crate::{Candidate, Policy};

/// Whole passes in the order in which they should reach the finals.
///
/// The best of each assembly comes first if it is within the cut of the best of all (kernels timed alone do not show what
/// one leaves in the cache for the next), then everything by the sum of its parts.
pub fn ranking(space: &Space, groups: &[Group], policy: &Policy) -> Vec<Candidate> {
    const TOP: usize = 3;
    let mut groups = groups.iter();
    let mut all: Vec<(f64, Candidate)> = Vec::new();
    let mut firsts: Vec<(f64, Candidate)> = Vec::new();
    for assembly in &space.assemblies {
        let parts: Vec<Vec<&Entry>> = groups
            .by_ref()
            .take(assembly.parts.len())
            .map(|g| g.ranked().into_iter().take(TOP).collect())
            .collect();
        let mut sums = combinations(assembly, &parts);
        sums.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        firsts.extend(sums.first());
        all.extend(sums);
    }
    for group in groups {
        let ranked: Vec<(f64, Candidate)> = group
            .ranked()
            .iter()
            .filter_map(|e| Some((e.median_us()?, e.candidate)))
            .take(TOP * TOP)
            .collect();
        firsts.extend(ranked.first());
        all.extend(ranked);
    }
    let best = all.iter().map(|(us, _)| *us).fold(f64::INFINITY, f64::min);
    firsts.retain(|(us, _)| *us <= best * policy.cut_factor);
    for list in [&mut firsts, &mut all] {
        list.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    }
    let mut order: Vec<Candidate> = Vec::new();
    for (_, candidate) in firsts.into_iter().chain(all) {
        if !order.contains(&candidate) {
            order.push(candidate);
        }
    }
    order
}

/// Every combination of one entry of each part, with the sum of its times.
fn combinations(assembly: &Assembly, parts: &[Vec<&Entry>]) -> Vec<(f64, Candidate)> {
    let mut sums: Vec<(f64, Vec<KernelConfig>)> = vec![(0.0, Vec::new())];
    for part in parts {
        sums = sums
            .iter()
            .flat_map(|(sum, kernels)| {
                part.iter().filter_map(move |entry| {
                    let mut kernels = kernels.clone();
                    kernels.extend(entry.candidate.kernels());
                    Some((sum + entry.median_us()?, kernels))
                })
            })
            .collect();
    }
    sums.into_iter()
        .filter_map(|(sum, kernels)| Some((sum, Candidate::Strategy(assembly.assemble(&kernels)?))))
        .collect()
}
