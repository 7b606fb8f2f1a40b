// sm90_chain_forward: the whole forward pass in one launch, for grids that run at once. Several blocks split each sequence and hand states over
// through the workspace:
//   1. every block but the last: the state its segment adds, and its decay, which it stores and then says so. The first block's has the decayed
//      initial state in it
//   2. every block but the first: the state at its start. Of up to SEGMENTS_WITHOUT_SCAN blocks each waits for those before it, and adds up what
//      they stored. Of more, each first turns a slice of all stored states into states at segment starts, in place, and then waits for all slices
//   3. every block: Y of its segment from the state at its start, as sm90_fused_forward
// A segment that fits the ring is copied once and stays there for both passes; of a longer one pass 1 takes the last chunk first, so that the sum
// is never scaled. A block waits for other blocks of its chain, and all run at once (a cooperative launch: crates/mamba2-cuda/src/module.rs), so
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
  __device__ __forceinline__ bool scans() const { return blocks > SEGMENTS_WITHOUT_SCAN; }
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
// state is that at the segment's start and is scaled every chunk. The ring is read from `at`; with `release` unset the stages stay full.
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

// Flags, [slot or slice][head]: of the states that segments have stored, and, behind those of all sequences, of the slices that are scanned.
__device__ __forceinline__ unsigned long long* stored_flag(const ForwardArgs& args, int64 slot, int head) { return args.flags + slot * args.nheads + head; }
__device__ __forceinline__ unsigned long long* scanned_flag(const ForwardArgs& args, const Segment& s, int rank, int head) {
  const int64 segments = args.chunks_per_row.value;
  return args.flags + (args.sequences * (segments - 1) + s.sequence * segments + rank) * args.nheads + head;
}
__device__ __forceinline__ void raise(const ForwardArgs& args, unsigned long long* flag, int barrier) {
  bar_sync(barrier, 128);  // all of what it stands for is stored
  if (threadIdx.x % 128 == 0) store_release_grid(flag, args.call);
}

// Returns when `count` flags are up, one every nheads. The last of the `readers` blocks that wait for a flag takes it down, so that the same call can
// be replayed from a CUDA graph. The consumer's warpgroup.
template <typename F>
__device__ __forceinline__ void wait_for_flags(const ForwardArgs& args, unsigned long long* flags, int count, F&& readers, int barrier) {
  for (int q = threadIdx.x % 128; q < count; q += 128) {
    unsigned long long* flag = flags + static_cast<int64>(q) * args.nheads;
    while ((load_acquire_grid(flag) & ~FLAG_READERS) != args.call) {
    }
    if ((add_grid(flag, 1) & FLAG_READERS) + 1 == readers(q)) store_relaxed_grid(flag, 0);
  }
  bar_sync(barrier, 128);
}

// Turns this block's slice of what the segments of the chain add into states at segment starts, in place: slot s holds what segment s adds before,
// and the state at the start of segment s + 1 after. Slices are whole lines, which nobody else writes.
__device__ __forceinline__ void scan_slice(const ForwardArgs& args, const Segment& s, const Chain& chain, int head) {
  constexpr int VECTORS_OF_STATE = STATE_ELEMS / 4, BATCH = 8;
  const int slice = ((VECTORS_OF_STATE + chain.blocks - 1) / chain.blocks + 7) / 8 * 8;
  const int first = s.index * slice, end = min(first + slice, VECTORS_OF_STATE);
  const int64 slot = s.slot - s.index + 1, step = static_cast<int64>(args.nheads) * VECTORS_OF_STATE;
  const float* totals = args.da_cumsum + slot * args.nheads + head;
  float4* states = reinterpret_cast<float4*>(segment_state(args, slot, head));
  for (int at = first + threadIdx.x % 128; at < end; at += 128) {
    float4 carry = make_float4(0.f, 0.f, 0.f, 0.f);
    // In place, so a load cannot pass the store before it: eight segments are loaded before the first is stored.
#pragma unroll 1
    for (int q0 = 0; q0 + 1 < chain.blocks; q0 += BATCH) {
      float4 local[BATCH];
      float total[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (q0 + i + 1 < chain.blocks) {
          local[i] = states[(q0 + i) * step + at];
          total[i] = totals[static_cast<int64>(q0 + i) * args.nheads];
        }
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (q0 + i + 1 < chain.blocks) {
          const float decay = ex2_approx(fminf(total[i], 0.f));
          carry.x = carry.x * decay + local[i].x;
          carry.y = carry.y * decay + local[i].y;
          carry.z = carry.z * decay + local[i].z;
          carry.w = carry.w * decay + local[i].w;
          states[(q0 + i) * step + at] = carry;
        }
    }
  }
}

// Step 2 of a block that is not the first: waits for the state at its segment's start.
__device__ __forceinline__ void take_over(const ForwardArgs& args, const Segment& s, const Chain& chain, int head, int barrier, float (&state)[STATE_REGISTERS]) {
  if (chain.scans()) {
    wait_for_flags(args, scanned_flag(args, s, 0, head), chain.blocks, [&](int) { return chain.blocks - 1; }, barrier);
    load_segment_state<1>(args, s, head, 0, 0, state);
  } else {
    wait_for_flags(args, stored_flag(args, s.slot - s.index + 1, head), s.index, [&](int q) { return chain.blocks - 1 - q; }, barrier);
    load_segment_state<SEGMENTS_WITHOUT_SCAN - 1>(args, s, head, 0, 0, state);
  }
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
        raise(args, stored_flag(args, s.slot + 1, head), consumer + 1);
      }
    }
    if (valid && chain.scans()) {
      wait_for_flags(args, stored_flag(args, s.slot - s.index + 1, head), chain.blocks - 1, [&](int) { return chain.blocks; }, consumer + 1);
      scan_slice(args, s, chain, head);
      raise(args, scanned_flag(args, s, s.index, head), consumer + 1);
    }
    if (s.index == 0) {
      if constexpr (HOLDS_INITIAL) {
#pragma unroll
        for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = initial[i];
      } else {
        load_initial_state(args, s, head, 0, 0, state[0]);
      }
    } else if (valid) {
      take_over(args, s, chain, head, consumer + 1, state[0]);
    } else {
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
    }
    if (resident) at = {};
    forward_segment(args, maps, s, ring, smem + SCORES_OFFSET, smem + OUTPUT_OFFSET, barriers, score_barriers, output_barriers, consumer, d, at, state);
    if (s.last) store_final_state(args, s, head, 0, 0, state[0]);
  }
}
