use super::numbers::Stream;

/// Uneven offsets for `sequences` packed sequences in `seqlen` tokens: of every five, the second is empty and the fourth
/// has one token (tokens allowing); one token in sixteen is left as a padded tail.
///
/// # Panics
/// If `seqlen` does not fit an i32.
pub fn default_cu_seqlens(seqlen: usize, sequences: usize, seed: u64) -> Vec<i32> {
    let stream = Stream::new(seed, 100);
    let total = if sequences == 0 {
        0
    } else {
        seqlen - seqlen / 16
    };
    let weight = |i: usize| match i % 5 {
        1 | 3 => 0,
        _ => 1 + stream.bits(i) % 1000,
    };
    let singles = (0..sequences).filter(|i| i % 5 == 3).count().min(total);
    let weights: u64 = (0..sequences).map(weight).sum();
    let shared = total - singles;
    let mut cu = vec![0i32];
    let (mut before, mut singles_left, mut singles_done) = (0u64, singles, 0);
    for i in 0..sequences {
        before += weight(i);
        if i % 5 == 3 && singles_left > 0 {
            singles_left -= 1;
            singles_done += 1;
        }
        let of_weights =
            (u128::from(before) * shared as u128 / u128::from(weights.max(1))) as usize;
        cu.push(i32::try_from(of_weights + singles_done).expect("seqlen should fit an i32"));
    }
    cu
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_valid_and_uneven() {
        for (seqlen, sequences) in [
            (0, 0),
            (0, 3),
            (1, 1),
            (3, 7),
            (200, 5),
            (4096, 100),
            (10, 1000),
        ] {
            let cu = default_cu_seqlens(seqlen, sequences, 3);
            assert_eq!(cu.len(), sequences + 1);
            mamba2_spec::check_cu_seqlens(&cu, seqlen).unwrap();
        }
        let lens: Vec<i32> = default_cu_seqlens(200, 5, 3)
            .windows(2)
            .map(|w| w[1] - w[0])
            .collect();
        assert_eq!((lens[1], lens[3]), (0, 1));
        assert_eq!(lens.iter().sum::<i32>(), 200 - 200 / 16);
    }
}
