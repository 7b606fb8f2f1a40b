use ndarray::Ix3;

use crate::views::Strided;

/// The outputs of one sequence (or one row of a decode step).
pub(crate) struct Sequence<'a> {
    /// Index among the sequences: the row of the state tensors.
    pub index: usize,
    /// Batch row it lies in, and its first token there.
    pub row: usize,
    pub first_token: usize,
    pub len: usize,
    /// `[len, heads left, headdim]`.
    pub out: Strided<'a, Ix3>,
    /// `[heads left, headdim, dstate]`.
    pub states: Option<Strided<'a, Ix3>>,
}

/// A task: neighbouring heads of one group, in one sequence.
pub(crate) struct HeadBlock<'a> {
    pub index: usize,
    pub row: usize,
    pub first_token: usize,
    pub len: usize,
    pub first_head: usize,
    pub heads: usize,
    /// `[len, heads, headdim]`.
    pub out: Strided<'a, Ix3>,
    /// `[heads, headdim, dstate]`.
    pub states: Option<Strided<'a, Ix3>>,
}

/// Cuts sequences into blocks of at most `block` heads that never straddle two groups.
pub(crate) struct HeadBlocks<'a, S> {
    sequences: S,
    /// The sequence being cut, and its next head.
    current: Option<(Sequence<'a>, usize)>,
    nheads: usize,
    heads_per_group: usize,
    block: usize,
}

impl<'a, S: Iterator<Item = Sequence<'a>>> HeadBlocks<'a, S> {
    pub(crate) fn new(sequences: S, nheads: usize, heads_per_group: usize, block: usize) -> Self {
        HeadBlocks {
            sequences,
            current: None,
            nheads,
            heads_per_group,
            block,
        }
    }
}

impl<'a, S: Iterator<Item = Sequence<'a>>> Iterator for HeadBlocks<'a, S> {
    type Item = HeadBlock<'a>;

    fn next(&mut self) -> Option<HeadBlock<'a>> {
        let (sequence, head) = match self.current.take() {
            Some(current) => current,
            None => (self.sequences.next()?, 0),
        };
        let heads = self
            .block
            .min(self.heads_per_group - head % self.heads_per_group);
        let (out, out_rest) = sequence.out.split_at(1, heads);
        let (states, states_rest) = match sequence.states {
            Some(states) => {
                let (states, rest) = states.split_at(0, heads);
                (Some(states), Some(rest))
            }
            None => (None, None),
        };
        let Sequence {
            index,
            row,
            first_token,
            len,
            ..
        } = sequence;
        if head + heads < self.nheads {
            let rest = Sequence {
                index,
                row,
                first_token,
                len,
                out: out_rest,
                states: states_rest,
            };
            self.current = Some((rest, head + heads));
        }
        Some(HeadBlock {
            index,
            row,
            first_token,
            len,
            first_head: head,
            heads,
            out,
            states,
        })
    }
}
