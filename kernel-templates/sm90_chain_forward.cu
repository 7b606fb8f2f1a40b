// sm90_chain_forward: the whole forward pass in one launch, for grids that run at once. Several blocks split each sequence and hand states over
// through the workspace:
//   1. every block but the last: the state its segment adds, and its decay, which it stores and then says so. The first block's has the decayed
//      initial state in it
//   2. every block but the first: waits for those before it, and adds up what they stored
//   3. every block: Y of its segment from the state at its start, as sm90_fused_forward
// A segment that fits the ring is copied once and stays there for both passes; of a longer one pass 1 takes the last chunk first, so that the sum
// is never scaled. A block waits for blocks of lower index only, and all run at once (a cooperative launch: crates/mamba2-cuda/src/module.rs), so
// there is no order in which the chain could stand still.
//
// Grid   chunks_per_row blocks per (sequence, HEADS_BLOCK heads), neighbours
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

// A block's place in its chain.
struct Chain {
  int blocks;  // that have tokens
  int later;   // of those, after this one
};

// The segment of block `rank` of a sequence. tokens -1: none, nothing to do.
__device__ __forceinline__ Segment locate_chain_segment(const ForwardArgs& args, unsigned work, int rank, Chain& chain) {
  Segment s;
  s.sequence = locate_group(args, work, s);
  s.row = PACKED ? 0 : s.sequence;
  int first = 0, tokens = args.seqlen;
  if (PACKED) {
    first = args.cu_seqlens[s.sequence];
    tokens = max(min(args.cu_seqlens[s.sequence + 1], args.seqlen) - first, 0);
  }
  const int chunks = static_cast<int>(args.chunks_per_row.divide((tokens + CHUNK - 1) / CHUNK + args.chunks_per_row.value - 1));  // of a segment
  const int length = chunks * CHUNK, left = tokens - rank * length;
  s.index = rank;
  s.first = first + rank * length;
  s.tokens = left > 0 ? min(left, length) : rank == 0 ? 0 : -1;
  s.slot = static_cast<int64>(s.sequence) * (args.chunks_per_row.value - 1) + rank - 1;
  s.last = left <= length;
  chain.later = s.last ? 0 : (left - 1) / length;
  chain.blocks = rank + 1 + chain.later;
  return s;
}

// Step 1: the state at the segment's end, and the whole decay, log2 units. FORWARD, the vectors of a resident segment serve step 3 as well; the
// state is that at the segment's start and is scaled every chunk, and the stages stay full. The ring is read from `at`.
template <bool FORWARD>
__device__ __forceinline__ void accumulate_segment(const Segment& s, const unsigned char* ring, const Barriers& barriers, int consumer,
                                                   RingPosition<STAGES>& at, float (&state)[STATE_REGISTERS], float& total) {
  total = 0.f;
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    FragmentA<X> a[4];
    const Vectors v = vectors_of(stage, consumer);
    load_transposed(a, stage + X_OFFSET + consumer * BOX_BYTES);
    weigh(a, a, v.w());
    total += v.g[CHUNK - 1];
    if (FORWARD) scale_state(state, v);
    wgmma_fence();
    start_state_update(state, a, stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // at once: copies take longer than products, and a stage that waits for the next chunk is missing to them
    if (!FORWARD) arrive_warp(barriers.empty(at.stage));
  }
}

// Adds the initial state, decayed, to what the first segment adds, part by part for the registers' sake.
__device__ __forceinline__ void add_initial_state(const ForwardArgs& args, const Segment& s, int head, float total, float (&state)[STATE_REGISTERS]) {
  if constexpr (INITIAL_DTYPE < 0) return;
  constexpr int PART = 32;
  const float decay = ex2_approx(fminf(total, 0.f));
#pragma unroll
  for (int part = 0; part < STATE_REGISTERS; part += PART) {
    float initial[PART];
    load_initial_state(args, s, head, 0, part * 2, initial);
#pragma unroll
    for (int i = 0; i < PART; ++i) state[part + i] += decay * initial[i];
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
__device__ __forceinline__ void wait_for_segments_before(const ForwardArgs& args, const Segment& s, const Chain& chain, int head, int barrier) {
  const int q = threadIdx.x % 128;
  if (q < s.index) {
    unsigned long long* flag = args.flags + (s.slot - s.index + 1 + q) * args.nheads + head;
    while ((load_acquire_grid(flag) & ~FLAG_READERS) != args.call) {
    }
    const int readers = chain.blocks - 1 - q;
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
  Chain chain;
  const unsigned work = args.chunks_per_row.divide(blockIdx.x);
  const Segment located = locate_chain_segment(args, work, blockIdx.x - work * args.chunks_per_row.value, chain);
  if (located.tokens < 0) return;
  const bool resident = located.tokens <= STAGES * CHUNK;
  const bool two_passes = chain.later > 0 && !resident;
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
    RingPosition<STAGES> at;
    if (two_passes) {
      Producer<true> producer(args, maps, located, ring, barriers, at);
      producer.run(false, 0, [](int) {});
      at = producer.at;
    }
    Producer<false>(args, maps, located, ring, barriers, at).run(true, two_passes, [&](int token) {
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
    if (chain.later > 0) {
      float total;
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
      if (resident) {
        accumulate_segment<true>(s, ring, barriers, consumer, at, state[0], total);
      } else {
        accumulate_segment<false>(s, ring, barriers, consumer, at, state[0], total);
      }
      if (s.index == 0) {
        if constexpr (HOLDS_INITIAL) {
          const float decay = ex2_approx(fminf(total, 0.f));
#pragma unroll
          for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] += decay * initial[i];
        } else {
          add_initial_state(args, s, head, total, state[0]);
        }
      }
      if (valid) {
        store_segment_state(args, s.slot + 1, head, 0, 0, state[0]);
        if (threadIdx.x % 128 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + head] = total;
        bar_sync(consumer + 1, 128);  // all of it is stored
        if (threadIdx.x % 128 == 0) store_release_grid(args.flags + (s.slot + 1) * args.nheads + head, args.call);
      }
    }
    if (s.index == 0) {
      if constexpr (HOLDS_INITIAL) {
#pragma unroll
        for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = initial[i];
      } else {
        load_initial_state(args, s, head, 0, 0, state[0]);
      }
    } else if (valid) {
      wait_for_segments_before(args, s, chain, head, consumer + 1);
      load_segment_state<SEGMENTS_WITHOUT_SCAN - 1>(args, s, head, 0, 0, state[0]);
    } else {
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
    }
    if (resident) at = {};
    forward_segment(args, maps, s, ring, smem + SCORES_OFFSET, smem + OUTPUT_OFFSET, barriers, score_barriers, output_barriers, consumer, d, at, state);
    if (s.last) store_final_state(args, s, head, 0, 0, state[0]);
  }
}
