// sm90_chain_forward: the whole forward pass in one launch, for grids that run at once. Several blocks split each sequence and hand states over
// through the workspace:
//   1. every block but the last: the state its segment adds, and its decay, which it stores and then says so
//   2. every block but the first: waits for those before it, and adds what they stored to the initial state
//   3. every block: Y of its segment from the state at its start, as sm90_fused_forward
// Step 1 takes the last chunk first, so that the sum is never scaled. A block waits for blocks of lower index only, and all run at once (a
// cooperative launch: crates/mamba2-cuda/src/module.rs), so there is no order in which the chain could stand still.
//
// With HALVES 2 a short segment stays in shared memory, and two consumers share its tokens (common/sm90_halves.cuh); step 1 goes forward then.
//
// Grid   chunks_per_row blocks per (sequence, HEADS_BLOCK heads), neighbours
// Block  a producer warpgroup, WARPGROUPS consumers of one head or a slice of it or half of its segment each, a score warpgroup
// Shared as sm90_fused_forward, or as common/sm90_halves.cuh says
// Tail   as in common/sm90_pipeline.cuh; blocks past a short sequence have no tokens and nobody waits for them
// Source Dao and Gu 2024, section 6, all steps in one launch
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;
constexpr int HEADS = 1;    // a warpgroup; two spill

#include "common/sm90_forward.cuh"
#include "common/sm90_halves.cuh"
#include "ptx/grid_flag.cuh"

constexpr int SCORES_OFFSET = BARRIERS_BYTES + STAGES * STAGE_BYTES;
constexpr int OUTPUT_OFFSET = SCORES_OFFSET + SCORES_BYTES;
static_assert((HALVES == 2 ? HALVES_BYTES : OUTPUT_OFFSET + OUTPUT_BYTES + EXCHANGE_BYTES) == SMEM_BYTES, "launch.rs carves the same shared memory");
constexpr int PARTS = HALVES == 2 ? 2 : SLICES;  // of a head's state that blocks hand over by themselves

MAMBA2_REQUIRE(K05, HALVES == 1 || (WARPGROUPS == 2 && DSTATE_BOXES <= 2), "two consumers of one head");

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
  chain.later = 0;
#pragma unroll
  for (int later = 1; later < SEGMENTS_WITHOUT_SCAN; ++later) chain.later += left > later * length;
  chain.blocks = rank + 1 + chain.later;
  return s;
}

// Step 1: the state that the segment adds, and the whole decay, log2 units. The ring is read from `at`.
__device__ __forceinline__ void accumulate_segment(const Segment& s, const unsigned char* ring, const Barriers& barriers, int consumer,
                                                   RingPosition<STAGES>& at, float (&state)[STATE_REGISTERS], float& total) {
  total = 0.f;
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    FragmentA<X> a[4];
    const Vectors v = vectors_of(stage, heads_of(consumer));
    load_transposed(a, stage + X_OFFSET + heads_of(consumer) * BOX_BYTES);
    weigh(a, a, v.w());
    total += v.g[CHUNK - 1];
    wgmma_fence();
    start_state_update(state, a, stage + B_OFFSET + slice_of(consumer) * SLICE_BYTES);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // at once: copies take longer than products, and a stage that waits for the next chunk is missing to them
    arrive_warp(barriers.empty(at.stage));
  }
}

// Calls the initial state into L2, long before it is loaded.
__device__ __forceinline__ void prefetch_initial_state(const ForwardArgs& args, const Segment& s, int head) {
  if constexpr (INITIAL_DTYPE < 0) return;
  constexpr int BYTES = INITIAL_DTYPE == 2 ? 4 : 2, LINES = (DSTATE * BYTES + 127) / 128;
  const char* first = static_cast<const char*>(args.initial_states) + (s.sequence * args.initial_strides[0] + head * args.initial_strides[1]) * BYTES;
#pragma unroll 1
  for (int i = threadIdx.x % 128; i < HEADDIM * LINES; i += 128) prefetch_l2(first + i / LINES * args.initial_strides[2] * BYTES + i % LINES * 128);
}

// Lets the chunks of step 1 pass, which are not the score warpgroup's.
__device__ __forceinline__ void skip_segment(const Segment& s, const Barriers& barriers, RingPosition<STAGES>& at) {
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    arrive_warp(barriers.empty(at.stage));
  }
}

// Where a segment's flag is, and that of the segment before this one which is this thread's.
__device__ __forceinline__ unsigned long long* flag_of(const ForwardArgs& args, int64 slot, int head, int slice) {
  return args.flags + (slot * args.nheads + head) * PARTS + slice;
}
__device__ __forceinline__ unsigned long long* flag_before(const ForwardArgs& args, const Segment& s, int head, int slice) {
  return flag_of(args, s.slot - s.index + 1 + threadIdx.x % 128, head, slice);
}
// Step 2: returns when the segments before this one have stored what they add for `head`. The consumer's warpgroup.
__device__ __forceinline__ void wait_for_segments_before(const ForwardArgs& args, const Segment& s, int head, int slice, int barrier) {
  if (threadIdx.x % 128 < s.index) {
    const unsigned long long* flag = flag_before(args, s, head, slice);
    while ((load_acquire_grid(flag) & ~FLAG_READERS) != args.call) {
    }
  }
  bar_sync(barrier, 128);
}
// The last of those that waited for a segment takes its flag down, so that the same call can be replayed from a CUDA graph. At the block's end, where
// nobody waits for the answer.
__device__ __forceinline__ void take_flags_down(const ForwardArgs& args, const Segment& s, const Chain& chain, int head, int slice) {
  const int q = threadIdx.x % 128;
  if (q >= s.index) return;
  unsigned long long* flag = flag_before(args, s, head, slice);
  const int readers = chain.blocks - 1 - q;
  if ((add_grid(flag, 1) & FLAG_READERS) + 1 == readers) store_relaxed_grid(flag, 0);
}

// The consumers' part where the segment stays in shared memory; see common/sm90_halves.cuh.
__device__ __forceinline__ void consume_halves(const ForwardArgs& args, const Segment& s, const Chain& chain, unsigned char* smem,
                                               const HalvesBarriers& barriers, int half) {
  unsigned char* ring = smem + BARRIERS_BYTES;
  const int head = first_head(s), n0 = half * (DSTATE_PADDED / 2);
  const HeadD d(args, s, head);
  const Halves halves(s);
  const int first = half == 0 ? 0 : halves.middle, end = half == 0 ? halves.middle : halves.chunks;
  if (half == 1) prefetch_initial_state(args, s, head);

  float part[HALF_REGISTERS], of_first[HALF_REGISTERS];  // this consumer's part of dstate; of what the first half adds
  float decay = 0.f;
#pragma unroll
  for (int i = 0; i < HALF_REGISTERS; ++i) part[i] = 0.f;
  add_chunks(ring, barriers, half, 0, halves.middle, part, decay);
#pragma unroll
  for (int i = 0; i < HALF_REGISTERS; ++i) of_first[i] = part[i];
  const float decay_of_first = decay;
  if (chain.later > 0) {
    add_chunks(ring, barriers, half, halves.middle, halves.chunks, part, decay);
    store_segment_state(args, s.slot + 1, head, 0, n0 / 8, part);
    if (threadIdx.x % 128 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + head] = decay;
    bar_sync(half + 1, 128);  // all of it is stored
    if (threadIdx.x % 128 == 0) store_release_grid(flag_of(args, s.slot + 1, head, half), args.call);
  }
  const bool adds = s.index > 0, exchanges = call_initial_state(args, s, head, 0, n0, part);
  if (adds) wait_for_segments_before(args, s, head, half, half + 1);
  if (adds) {
    add_segment_states<SEGMENTS_WITHOUT_SCAN - 1, HALF_REGISTERS / 4>(args, s, head, 0, n0 / 8, part, [&] {
      if (exchanges) exchange_initial_state(part);
    });
  } else if (exchanges) {
    exchange_initial_state(part);
  }
  const float rest_of_start = ex2_approx(fminf(decay_of_first, 0.f));
#pragma unroll
  for (int i = 0; i < HALF_REGISTERS; ++i) of_first[i] += rest_of_start * part[i];  // the state at the middle
  float state[STATE_REGISTERS];
  {
    float give[HALF_REGISTERS], got[HALF_REGISTERS];
#pragma unroll
    for (int i = 0; i < HALF_REGISTERS; ++i) give[i] = half == 0 ? of_first[i] : part[i];
    swap_halves(smem + SWAP_OFFSET, half, give, got);
#pragma unroll
    for (int i = 0; i < HALF_REGISTERS; ++i) {
      state[i] = half == 0 ? part[i] : got[i];
      state[HALF_REGISTERS + i] = half == 0 ? got[i] : of_first[i];
    }
  }
  const bool has_final = FINAL_DTYPE >= 0 && s.last && half == (halves.chunks > halves.middle);
  forward_half(ring, smem + HALVES_SCORES_OFFSET, barriers, first, end, has_final, d, state);
  if (FINAL_DTYPE >= 0 && s.last) store_final_halves(args, s, ring, barriers, has_final, state);
  if (adds) take_flags_down(args, s, chain, head, half);
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
  if constexpr (HALVES == 2) {
    const HalvesBarriers halves_barriers{smem_address(smem)};
    if (threadIdx.x == 0) s = located;
    one_thread_if(copies_segment(), [&] { halves_barriers.init(); });
    __syncthreads();
    if (threadIdx.x < PRODUCER_THREADS) {
      setmaxnreg_dec<PRODUCER_REGISTERS>();
      produce_halves(args, maps, s, ring, halves_barriers);
    } else if (threadIdx.x >= PRODUCER_THREADS + 128 * WARPGROUPS) {
      setmaxnreg_dec<SCORE_REGISTERS>();
      score_halves(maps, s, ring, smem + HALVES_SCORES_OFFSET, halves_barriers);
    } else {
      setmaxnreg_inc<CONSUMER_REGISTERS>();
      consume_halves(args, s, chain, smem, halves_barriers, __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1);
    }
    return;
  }
  const bool two_passes = chain.later > 0;
  if (threadIdx.x == 0) s = located;
  if (threadIdx.x == 32) score_barriers.init();
  if (STORES_APART && threadIdx.x == 64) output_barriers.init();
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
    const int head = first_head(s) + heads_of(consumer), slice = slice_of(consumer), n0 = first_dstate(slice);
    const bool valid = head < end_head(s);
    const HeadD d[HEADS] = {HeadD(args, s, head)};
    float state[HEADS][STATE_REGISTERS];
    RingPosition<STAGES> at;
    if (valid) prefetch_initial_state(args, s, head);
    if (chain.later > 0) {
      float total;
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
      accumulate_segment(s, ring, barriers, consumer, at, state[0], total);
      if (valid) {
        store_segment_state(args, s.slot + 1, head, 0, n0 / 8, state[0]);
        if (threadIdx.x % 128 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + head] = total;
        bar_sync(consumer + 1, 128);  // all of it is stored
        if (threadIdx.x % 128 == 0) store_release_grid(flag_of(args, s.slot + 1, head, slice), args.call);
      }
    }
    const bool adds = s.index > 0 && valid, exchanges = call_initial_state(args, s, head, 0, n0, state[0]);
    if (adds) wait_for_segments_before(args, s, head, slice, consumer + 1);
    constexpr bool CROWDED = (HAS_Z && D_KIND == 2) || (PACKED && INITIAL_DTYPE >= 0 && INITIAL_DTYPE != 2);  // ptxas spills else
    constexpr bool AT_ONCE = STATE_REGISTERS <= 64 && WARPGROUPS == 1 && !CROWDED;
    if constexpr (AT_ONCE) {
      const auto exchange = [&] {
        if (exchanges) exchange_initial_state(state[0]);
      };
      if (adds) {
        add_segment_states<SEGMENTS_WITHOUT_SCAN - 1, 8>(args, s, head, 0, n0 / 8, state[0], exchange);
      } else {
        exchange();
      }
    } else {
      if (exchanges) exchange_initial_state(state[0]);
      if (adds) add_segment_states<1, WARPGROUPS == 1 && !PACKED ? 16 : 8>(args, s, head, 0, n0 / 8, state[0], [] {});
    }
    forward_segment(args, maps, s, ring, smem + SCORES_OFFSET, smem + OUTPUT_OFFSET, barriers, score_barriers, output_barriers, consumer, d, at, state);
    if (s.last) store_final_state(args, s, head, 0, n0, state[0]);
    if (adds) take_flags_down(args, s, chain, head, slice);
  }
}
