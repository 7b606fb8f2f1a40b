// sm90_fused_forward, for every segment and head, chunk after chunk of 64 tokens, the state H in registers:
//   Y[i, p]  = exp2(G_i) sum_n C[i, n] H[p, n] + sum_{j <= i} exp2(G_i - G_j) dt_j (C B^T)[i, j] x[j, p] + D x[i, p],  then Y * silu(z)
//   H[p, n]  = exp2(G_last) H[p, n] + sum_l w[l] x[l, p] B[l, n]
// States never touch device memory but at segment boundaries. C B^T is made once for all heads of a block.
//
// Products (M = 64) of the score warpgroup: C B^T, both in shared memory. Of a consumer, which makes Y^T: H C^T, x^T S^T, (w x)^T B; the
// left ones in registers, where H is already, so that shared memory carries one operand of each.
//
// Grid   one block per (sequence, segment, HEADS_BLOCK heads)
// Block  a producer warpgroup, WARPGROUPS consumers of HEADS heads or a slice of one each, a score warpgroup
// Shared barriers, then the ring (common/sm90_pipeline.cuh), then S [SETS][SCORE_SLOTS boxes], Y [SETS][OUTPUT_SLOTS boxes], and what slices exchange
// Tail   as in common/sm90_pipeline.cuh; rows past the segment are not stored
// Source Dao and Gu 2024, section 6, all steps in one pass
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;
constexpr int HALVES = 1;    // of a segment, a consumer each

#include "common/sm90_forward.cuh"

static_assert(BARRIERS_BYTES + STAGES * STAGE_BYTES + SCORES_BYTES + OUTPUT_BYTES + EXCHANGE_BYTES == SMEM_BYTES, "launch.rs carves the same shared memory");

// The states of a consumer's heads from `head` on at the segment's start, or their slices from dstate n0 on. What does not wait for other kernels
// comes first.
constexpr bool MAY_ADD = HEADS * STATE_REGISTERS <= 64;  // launch.rs, needs_scan
constexpr bool CROWDED = WARPGROUPS > 1 && (PACKED || (INITIAL_DTYPE >= 0 && INITIAL_DTYPE != 2) || (HAS_Z && D_KIND != 1));  // ptxas spills else
constexpr int AT_ONCE = CROWDED ? 1 : SEGMENTS_WITHOUT_SCAN - 1, VECTORS_AT_ONCE = CROWDED || WARPGROUPS == 1 ? 8 : 4;
__device__ __forceinline__ void load_start_states(const ForwardArgs& args, const Segment& s, int head, int n0, float (&state)[HEADS][STATE_REGISTERS]) {
  if (s.index == 0 || (MAY_ADD && !args.scanned)) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) load_initial_state(args, s, head + h, 0, n0, state[h]);
  }
  wait_for_states(s);
  if (s.index == 0) return;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    if (!MAY_ADD || args.scanned) {
      load_segment_state(args, s, head + h, 0, n0 / 8, state[h]);
    } else {
      add_segment_states<AT_ONCE, VECTORS_AT_ONCE>(args, s, head + h, 0, n0 / 8, state[h], [] {});
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm90_fused_forward(const __grid_constant__ ForwardArgs args,
    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  call_maps(maps);
  unsigned char* ring = smem + BARRIERS_BYTES;
  unsigned char* tiles = ring + STAGES * STAGE_BYTES;
  const Barriers barriers{smem_address(smem)};
  const ScoreBarriers score_barriers{smem_address(smem) + SCORE_BARRIERS_OFFSET};
  const OutputBarriers output_barriers{smem_address(smem) + OUTPUT_BARRIERS_OFFSET};
  const Segment located = locate_segment(args, blockIdx.x);
  if (located.tokens < 0) return;
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  if (threadIdx.x == 0) s = located;
  if (threadIdx.x == 32) score_barriers.init();
  if (STORES_APART && threadIdx.x == 64) output_barriers.init();
  one_thread_if(copies(), [&] { barriers.init(); });
  __syncthreads();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    OutputStore output{args, maps, s, tiles + SCORES_BYTES, output_barriers};
    Producer<false>(args, maps, located, ring, barriers).run(true, 0, [&](int token) {
      if (OutputStore::is_here()) output.store(token);
    });
  } else if (threadIdx.x >= PRODUCER_THREADS + 128 * WARPGROUPS) {
    setmaxnreg_dec<SCORE_REGISTERS>();
    RingPosition<STAGES> at;
    make_scores(s, ring, tiles, barriers, score_barriers, at);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    const int head = first_head(s) + heads_of(consumer) * HEADS, n0 = first_dstate(slice_of(consumer));
    HeadD d[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) d[h] = HeadD(args, s, head + h);
    float state[HEADS][STATE_REGISTERS];
    load_start_states(args, s, head, n0, state);

    RingPosition<STAGES> at;
    forward_segment(args, maps, s, ring, tiles, tiles + SCORES_BYTES, barriers, score_barriers, output_barriers, consumer, d, at, state);
    if (s.last) {
#pragma unroll
      for (int h = 0; h < HEADS; ++h) store_final_state(args, s, head + h, 0, n0, state[h]);
    }
    wait_at_the_end(s);
  }
}
