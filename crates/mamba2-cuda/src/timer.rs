use crate::{CudaError, Device, DeviceBuffer, Event, Graph, Stream};

/// How often and in which state of the cache a candidate is timed. Stored beside every result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerPolicy {
    /// Untimed replays of each candidate first.
    pub warmup: usize,
    /// Timed replays of each candidate. Candidates take turns, so that clock ramps and throttling hit all alike.
    pub samples: usize,
    /// Calls in one replay, for calls of a few microseconds. The call is told its number, so that it can rotate over a ring of
    /// inputs larger than the cache.
    pub calls_per_replay: usize,
    /// True: the L2 cache is overwritten before each timed replay. False: an untimed replay comes between, and leaves in the cache
    /// what it leaves.
    pub cold: bool,
}

impl Default for TimerPolicy {
    fn default() -> TimerPolicy {
        TimerPolicy {
            warmup: 3,
            samples: 20,
            calls_per_replay: 1,
            cold: true,
        }
    }
}

/// Timings of one candidate. Unit: microseconds a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Samples {
    /// Every sample, in the order taken.
    pub us: Vec<f64>,
}

impl Samples {
    fn sorted(&self) -> Vec<f64> {
        let mut us = self.us.clone();
        us.sort_by(f64::total_cmp);
        us
    }

    /// The middle sample (mean of the two in the middle).
    pub fn median_us(&self) -> f64 {
        let us = self.sorted();
        match us.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => us[n / 2],
            n => (us[n / 2 - 1] + us[n / 2]) / 2.0,
        }
    }

    /// The smallest sample.
    pub fn min_us(&self) -> f64 {
        self.us.iter().copied().fold(f64::NAN, f64::min)
    }

    /// Distance of the quartiles over the median: a tenth means that the middle half of the samples lies within 10 %.
    pub fn spread(&self) -> f64 {
        let us = self.sorted();
        if us.is_empty() {
            return f64::NAN;
        }
        let at = |quarter: usize| us[(us.len() - 1) * quarter / 4];
        (at(3) - at(1)) / self.median_us()
    }
}

/// A call to be timed: enqueues call number `n` on the stream, with nothing that a graph cannot hold.
pub type Call<'a> = dyn FnMut(&Stream, usize) -> Result<(), CudaError> + 'a;

/// The one timer: CUDA graphs of the calls, replayed in turns, between events, with the L2 cache flushed in between.
pub struct Timer {
    stream: Stream,
    start: Event,
    end: Event,
    flush: DeviceBuffer,
}

/// More than twice the L2 cache of any GPU so far; and long enough to overwrite (60 us on an H200) that the host has enqueued
/// the replay before it starts, so that launch cost is not in the sample.
const MIN_FLUSH_BYTES: usize = 256 << 20;

impl Timer {
    /// A timer on `device`; allocates the flush buffer (256 MiB, or four times the L2 cache if that is more).
    ///
    /// # Errors
    /// A driver error.
    pub fn new(device: &Device) -> Result<Timer, CudaError> {
        let flush = device.alloc(MIN_FLUSH_BYTES.max(4 * device.facts().l2_bytes))?;
        Ok(Timer {
            stream: device.stream()?,
            start: device.event()?,
            end: device.event()?,
            flush,
        })
    }

    /// The stream on which everything is timed.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Times one call.
    ///
    /// # Errors
    /// As [`Timer::compare`].
    pub fn time(&self, policy: TimerPolicy, call: &mut Call<'_>) -> Result<Samples, CudaError> {
        let mut all = self.compare(policy, &mut [call])?;
        Ok(all.pop().expect("one call should give one list of samples"))
    }

    /// Median of one call. Unit: microseconds.
    ///
    /// # Errors
    /// As [`Timer::compare`].
    pub fn median_us(&self, policy: TimerPolicy, call: &mut Call<'_>) -> Result<f64, CudaError> {
        Ok(self.time(policy, call)?.median_us())
    }

    /// Times several calls, interleaved: one sample of each, then the next of each, in an order that turns round every time.
    ///
    /// # Errors
    /// [`CudaError::Timer`] for a policy without samples or calls, whatever a call returns, or a driver error.
    pub fn compare(
        &self,
        policy: TimerPolicy,
        calls: &mut [&mut Call<'_>],
    ) -> Result<Vec<Samples>, CudaError> {
        if policy.samples == 0 || policy.calls_per_replay == 0 {
            return Err(CudaError::Timer {
                expected: "at least one sample of at least one call",
                got: format!("{policy:?}"),
            });
        }
        let mut graphs = Vec::with_capacity(calls.len());
        for call in calls.iter_mut() {
            graphs.push(self.stream.capture(|stream| {
                (0..policy.calls_per_replay).try_for_each(|n| call(stream, n))
            })?);
        }
        for graph in &graphs {
            for _ in 0..policy.warmup {
                self.replay(policy, graph)?;
            }
        }
        let mut all: Vec<Samples> = graphs
            .iter()
            .map(|_| Samples {
                us: Vec::with_capacity(policy.samples),
            })
            .collect();
        for round in 0..policy.samples {
            for i in turn(graphs.len(), round) {
                all[i].us.push(self.replay(policy, &graphs[i])?);
            }
        }
        Ok(all)
    }

    fn replay(&self, policy: TimerPolicy, graph: &Graph) -> Result<f64, CudaError> {
        // While the fill runs, the host enqueues all that follows, so that no launch cost is between the events.
        self.flush.fill(&self.stream, 0)?;
        if !policy.cold {
            graph.launch(&self.stream)?;
        }
        self.stream.record(&self.start)?;
        graph.launch(&self.stream)?;
        self.stream.record(&self.end)?;
        self.end.synchronize()?;
        Ok(self.end.us_since(&self.start)? / policy.calls_per_replay as f64)
    }
}

/// Order of `n` candidates in a round: rotated by one each time, and backwards in every other, so that none always follows another.
fn turn(n: usize, round: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    if n > 0 {
        order.rotate_left(round / 2 % n);
    }
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_minimum_and_spread_of_known_samples() {
        let samples = Samples {
            us: vec![4.0, 1.0, 3.0, 2.0, 100.0],
        };
        assert_eq!(samples.median_us(), 3.0);
        assert_eq!(samples.min_us(), 1.0);
        assert_eq!(samples.spread(), (4.0 - 2.0) / 3.0);
        assert_eq!(Samples { us: vec![4.0, 2.0] }.median_us(), 3.0);
        assert!(Samples { us: vec![] }.median_us().is_nan());
    }

    #[test]
    fn every_round_has_every_candidate_once_and_the_first_place_goes_round() {
        let mut firsts = std::collections::BTreeSet::new();
        for round in 0..12 {
            let mut order = turn(5, round);
            firsts.insert(order[0]);
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2, 3, 4]);
        }
        assert_eq!(firsts.len(), 5);
        assert!(turn(0, 3).is_empty());
    }
}
