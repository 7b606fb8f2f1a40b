// sm90_chain_forward: the whole forward pass in one launch, for grids that run at once. SEGMENTS blocks split each sequence and hand states over
// through the workspace:
//   1. every block but the last: the state its segment adds (the first block: starting from the initial state), and its decay, which it stores and
//      then says so
//   2. every block but the first: waits for those before it, and adds up what they stored
//   3. every block: Y of its segment from the state at its start, as sm90_fused_forward
// A segment that fits the ring is copied once and stays there for both passes. A block waits for blocks of lower index only, and all run at once
// (a cooperative launch: crates/mamba2-cuda/src/module.rs), so there is no order in which the chain could stand still.
//
// Grid   SEGMENTS blocks per (sequence, HEADS_BLOCK heads), neighbours
// Block  a producer warpgroup, WARPGROUPS consumers of one head each, a score warpgroup
// Shared barriers, then the ring (common/sm90_pipeline.cuh), then S [WARPGROUPS][SCORE_SLOTS boxes] and Y [WARPGROUPS][OUTPUT_SLOTS boxes]
// Tail   as in common/sm90_pipeline.cuh; blocks past a short sequence have no tokens and nobody waits for them
// Source Dao and Gu 2024, section 6, all steps in one launch
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;
constexpr int HEADS = 1;    // a warpgroup; two spill

#include "common/sm90_forward.cuh"
#include "ptx/grid_flag.cuh"

constexpr int SCORES_OFFSET = BARRIERS_BYTES + STAGES * STAGE_BYTES;
constexpr int OUTPUT_OFFSET = SCORES_OFFSET + SCORES_BYTES;
static_assert(OUTPUT_OFFSET + OUTPUT_BYTES == SMEM_BYTES, "launch.rs carves the same shared memory");

// The first block has the initial state beside the sum, if there are registers for both: nobody waits for it longer than for the others.
constexpr bool HOLDS_INITIAL = INITIAL_DTYPE >= 0 && 2 * STATE_REGISTERS + 60 <= CONSUMER_REGISTERS;

// The segment of block `rank` of the SEGMENTS of a sequence, and how many blocks start from what it adds. tokens -1: none, nothing to do.
__device__ __forceinline__ Segment locate_chain_segment(const ForwardArgs& args, unsigned work, int rank, int& later) {
  Segment s;
  s.sequence = locate_group(args, work, s);
  s.row = PACKED ? 0 : s.sequence;
  int first = 0, tokens = args.seqlen;
  if (PACKED) {
    first = args.cu_seqlens[s.sequence];
    tokens = max(min(args.cu_seqlens[s.sequence + 1], args.seqlen) - first, 0);
  }
  const int length = (tokens + SEGMENTS * CHUNK - 1) / (SEGMENTS * CHUNK) * CHUNK;
  const int left = tokens - rank * length;
  s.index = rank;
  s.first = first + rank * length;
  s.tokens = left > 0 ? min(left, length) : rank == 0 ? 0 : -1;
  s.slot = static_cast<int64>(s.sequence) * (SEGMENTS - 1) + rank - 1;
  s.last = left <= length;
  later = s.last ? 0 : (left - 1) / length;
  return s;
}

// Step 1: the state at the segment's end from that at its start, and the whole decay, log2 units. Forward, because the vectors of a
// resident segment serve step 3 as well. The ring is read from `at`; with `release` unset the stages stay full.
__device__ __forceinline__ void accumulate_segment(const Segment& s, const unsigned char* ring, const Barriers& barriers, int consumer,
                                                   RingPosition<STAGES>& at, bool release, float (&state)[HEADS][STATE_REGISTERS], float (&total)[HEADS]) {
#pragma unroll
  for (int h = 0; h < HEADS; ++h) total[h] = 0.f;
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    FragmentA<X> a[HEADS][4];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const Vectors v = vectors_of(stage, consumer * HEADS + h);
      load_transposed(a[h], stage + X_OFFSET + (consumer * HEADS + h) * BOX_BYTES);
      weigh(a[h], a[h], v.w());
      total[h] += v.g[CHUNK - 1];
      scale_state(state[h], v);
    }
    wgmma_fence();
#pragma unroll
    for (int h = 0; h < HEADS; ++h) start_state_update(state[h], a[h], stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // at once: copies take longer than products, and a stage that waits for the next chunk is missing to them
    if (release) arrive_warp(barriers.empty(at.stage));
  }
}

// Lets the chunks of step 1 pass, which are not the score warpgroup's.
__device__ __forceinline__ void skip_segment(const Segment& s, const Barriers& barriers, RingPosition<STAGES>& at) {
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    arrive_warp(barriers.empty(at.stage));
  }
}

// Step 2: returns when the segments before this one have stored what they add for `head`. The last of those that waited for a segment takes
// its flag down, so that the same call can be replayed from a CUDA graph. The consumer's warpgroup.
__device__ __forceinline__ void wait_for_segments_before(const ForwardArgs& args, const Segment& s, int segments, int head, int barrier) {
  const int q = threadIdx.x % 128;
  if (q < s.index) {
    unsigned long long* flag = args.flags + (s.slot - s.index + 1 + q) * args.nheads + head;
    while ((load_acquire_grid(flag) & ~FLAG_READERS) != args.call) {
    }
    const int readers = segments - 1 - q;
    if ((add_grid(flag, 1) & FLAG_READERS) + 1 == readers) store_relaxed_grid(flag, 0);
  }
  bar_sync(barrier, 128);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm90_chain_forward(const __grid_constant__ ForwardArgs args,
    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  call_maps(maps);
  unsigned char* ring = smem + BARRIERS_BYTES;
  const Barriers barriers{smem_address(smem)};
  const ScoreBarriers score_barriers{smem_address(smem) + SCORE_BARRIERS_OFFSET};
  const OutputBarriers output_barriers{smem_address(smem) + OUTPUT_BARRIERS_OFFSET};
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  int later;
  const Segment located = locate_chain_segment(args, blockIdx.x / SEGMENTS, blockIdx.x % SEGMENTS, later);
  if (located.tokens < 0) return;
  const bool resident = located.tokens <= STAGES * CHUNK;
  const bool two_passes = later > 0 && !resident;
  if (threadIdx.x == 0) {
    s = located;
    score_barriers.init();
    if (STORES_APART) output_barriers.init();
  }
  one_thread_if(copies(), [&] { barriers.init(); });
  __syncthreads();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    OutputStore output{args, maps, s, smem + OUTPUT_OFFSET, output_barriers};
    Producer<false> producer(args, maps, located, ring, barriers);
#pragma unroll 1
    for (int pass = 0; pass <= two_passes; ++pass, producer.rewind())
      producer.run(pass == two_passes, pass, [&](int token) {
        if (OutputStore::is_here()) output.store(token);
      });
  } else if (threadIdx.x >= PRODUCER_THREADS + 128 * WARPGROUPS) {
    setmaxnreg_dec<SCORE_REGISTERS>();
    RingPosition<STAGES> at;
    if (two_passes) skip_segment(s, barriers, at);
    make_scores(s, ring, smem + SCORES_OFFSET, barriers, score_barriers, at);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    const int head = first_head(s) + consumer;
    const bool valid = head < end_head(s);
    const HeadD d[HEADS] = {HeadD(args, s, head)};
    float state[HEADS][STATE_REGISTERS];
    RingPosition<STAGES> at;
    float initial[STATE_REGISTERS];
    if (HOLDS_INITIAL && s.index == 0) load_initial_state(args, s, head, 0, 0, initial);
    if (later > 0) {
      float total[HEADS];
      if (!HOLDS_INITIAL && s.index == 0) {
        load_initial_state(args, s, head, 0, 0, state[0]);
      } else {
#pragma unroll
        for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
      }
      accumulate_segment(s, ring, barriers, consumer, at, !resident, state, total);
      if (HOLDS_INITIAL && s.index == 0) {
        const float decay = ex2_approx(fminf(total[0], 0.f));
#pragma unroll
        for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] += decay * initial[i];
      }
      if (valid) {
        store_segment_state(args, s.slot + 1, head, 0, 0, state[0]);
        if (threadIdx.x % 128 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + head] = total[0];
      }
      bar_sync(consumer + 1, 128);  // all of it is stored
      if (valid && threadIdx.x % 128 == 0) store_release_grid(args.flags + (s.slot + 1) * args.nheads + head, args.call);
    }
    if (HOLDS_INITIAL && s.index == 0) {
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = initial[i];
    } else if (s.index == 0) {
      load_initial_state(args, s, head, 0, 0, state[0]);
    } else if (valid) {
      wait_for_segments_before(args, s, s.index + 1 + later, head, consumer + 1);
      load_segment_state<SEGMENTS - 1>(args, s, head, 0, 0, state[0]);
    } else {
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
    }
    if (resident) at = {};
    forward_segment(args, maps, s, ring, smem + SCORES_OFFSET, smem + OUTPUT_OFFSET, barriers, score_barriers, output_barriers, consumer, d, at, state);
    if (s.last) store_final_state(args, s, head, 0, 0, state[0]);
  }
}
