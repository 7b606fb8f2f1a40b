// sm90_cluster_forward: the whole forward pass in one launch. The CLUSTER blocks of a cluster split each sequence into as many segments
// and hand the states over through shared memory:
//   1. every block but the last: the state its segment adds (the first block: starting from the initial state), and its decay
//   2. block r takes one slice of the state and chains it:  start[q + 1] = exp2(total[q]) start[q] + local[q]
//   3. every block: Y of its segment from the state at its start, as sm90_fused_forward
// A segment that fits the ring is copied once and stays there for both passes.
//
// Grid   CLUSTER blocks per (sequence, HEADS_BLOCK heads)
// Block  a producer warpgroup, WARPGROUPS consumers of one head each, a score warpgroup
// Shared barriers and totals, then the ring (common/sm90_pipeline.cuh), then per consumer the exchanged state [STATE_REGISTERS / 4][128]
//        float4, a thread's registers four by four; then S [WARPGROUPS][SCORE_SLOTS boxes]
//        and Y [WARPGROUPS][OUTPUT_SLOTS boxes]
// Tail   as in common/sm90_pipeline.cuh; blocks past a short sequence have no tokens and still take part in the exchange
// Source Dao and Gu 2024, section 6, all steps in one launch
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;
constexpr int HEADS = 1;    // a warpgroup; two spill

#include "common/sm90_forward.cuh"
#include "ptx/sm90_cluster.cuh"

constexpr int STATE_BYTES = STATE_REGISTERS * 128 * 4;  // of one head
constexpr int EXCHANGE_OFFSET = BARRIERS_BYTES + STAGES * STAGE_BYTES;
constexpr int SCORES_OFFSET = EXCHANGE_OFFSET + WARPGROUPS * STATE_BYTES;
static_assert(SCORES_OFFSET + SCORES_BYTES + OUTPUT_BYTES == SMEM_BYTES, "launch.rs carves the same shared memory");

constexpr int CLUSTER_BARRIERS_OFFSET = 512;  // behind the ring's barriers
constexpr int TOTALS_OFFSET = 640;
static_assert(SCORE_BARRIERS_OFFSET + WARPGROUPS * SCORE_SLOTS * 16 <= CLUSTER_BARRIERS_OFFSET && TOTALS_OFFSET + HEADS_BLOCK * 4 <= SEGMENT_OFFSET);
constexpr int BLOCK_BARRIER = WARPGROUPS + 1;  // of all consumers

__device__ __forceinline__ Segment locate_cluster_segment(const ForwardArgs& args, unsigned work, int rank) {
  const unsigned blocks = args.nheads / HEADS_PER_GROUP * HEAD_BLOCKS_PER_GROUP;
  const int block = static_cast<int>(work % blocks);
  Segment s;
  s.group = block / HEAD_BLOCKS_PER_GROUP;
  s.block = block % HEAD_BLOCKS_PER_GROUP;
  s.sequence = static_cast<int>(work / blocks);
  s.row = PACKED ? 0 : s.sequence;
  int first = 0, tokens = args.seqlen;
  if (PACKED) {
    first = args.cu_seqlens[s.sequence];
    tokens = max(min(args.cu_seqlens[s.sequence + 1], args.seqlen) - first, 0);
  }
  const int length = (tokens + CLUSTER * CHUNK - 1) / (CLUSTER * CHUNK) * CHUNK;
  s.index = rank;
  s.first = static_cast<int64>(first) + static_cast<int64>(rank) * length;
  s.tokens = max(min(tokens - rank * length, length), 0);
  s.slot = 0;
  s.last = rank == (tokens > 0 ? (tokens - 1) / length : 0);
  return s;
}

// What consumers of all blocks did before is done: one arrival a block at barrier `offset` of every block.
__device__ __forceinline__ void sync_consumers_of_cluster(unsigned barrier) {
  bar_sync(BLOCK_BARRIER, 128 * WARPGROUPS);
  if (threadIdx.x - PRODUCER_THREADS < CLUSTER) mbarrier_arrive_cluster(map_to_rank(barrier, threadIdx.x - PRODUCER_THREADS));
  while (!mbarrier_try_wait_parity_cluster(barrier, 0)) {
  }
}

// Step 1: the state at the segment's end from that at its start, and the whole decay, log2 units. Forward, because the vectors of a
// resident segment serve step 3 as well. The ring is read from `at`; with `release` unset the stages stay full.
__device__ __forceinline__ void accumulate_segment(const Segment& s, const unsigned char* ring, const Barriers& barriers, int consumer,
                                                   RingPosition<STAGES>& at, bool release, float (&state)[STATE_REGISTERS], float& total) {
  total = 0.f;
  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  for (int chunk = 0; chunk < chunks; ++chunk, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    const Vectors v = vectors_of(stage, consumer);
    FragmentA<X> a[4];
    load_transposed(a, stage + X_OFFSET + consumer * BOX_BYTES);
    weigh(a, a, v.w());
    total += v.g[CHUNK - 1];
    scale_state(state, v);
    wgmma_fence();
    start_state_update(state, a, stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    if (release) {
      fence_proxy_async();  // the next copies come through another proxy than these reads
      arrive_warp(barriers.empty(at.stage));
    }
  }
}

// Lets the chunks of step 1 pass, which are not the score warpgroup's.
__device__ __forceinline__ void skip_segment(const Segment& s, const Barriers& barriers, RingPosition<STAGES>& at) {
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    arrive_warp(barriers.empty(at.stage));
  }
}

// Step 2: this block's slice of the state, through all segments. exchange and totals are addresses in this block.
__device__ __forceinline__ void chain_slice(unsigned exchange, unsigned totals, int rank) {
  constexpr int SLICE = HEADS_BLOCK * STATE_REGISTERS / 4 * 128 / CLUSTER;  // float4
  static_assert(SLICE % (128 * WARPGROUPS) == 0);
#pragma unroll
  for (int i = 0; i < SLICE / (128 * WARPGROUPS); ++i) {
    const int at = rank * SLICE + i * 128 * WARPGROUPS + threadIdx.x - PRODUCER_THREADS;
    const int head = at / (STATE_REGISTERS / 4 * 128);
    float4 local[CLUSTER - 1];
    float total[CLUSTER - 1];
#pragma unroll
    for (int q = 0; q < CLUSTER - 1; ++q) {
      local[q] = load_cluster_v4(map_to_rank(exchange + at * 16, q));
      total[q] = q > 0 ? load_cluster(map_to_rank(totals + head * 4, q)) : 0.f;
    }
    float4 carry = local[0];
#pragma unroll
    for (int q = 1; q < CLUSTER; ++q) {
      store_cluster_v4(map_to_rank(exchange + at * 16, q), carry);
      if (q < CLUSTER - 1) {
        const float decay = ex2_approx(fminf(total[q], 0.f));
        carry.x = carry.x * decay + local[q].x;
        carry.y = carry.y * decay + local[q].y;
        carry.z = carry.z * decay + local[q].z;
        carry.w = carry.w * decay + local[q].w;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) __cluster_dims__(CLUSTER, 1, 1)
    sm90_cluster_forward(const __grid_constant__ ForwardArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  unsigned char* ring = smem + BARRIERS_BYTES;
  const Barriers barriers{smem_address(smem)};
  const ScoreBarriers score_barriers{smem_address(smem) + SCORE_BARRIERS_OFFSET};
  const int rank = static_cast<int>(cluster_rank());
  const unsigned local_ready = smem_address(smem) + CLUSTER_BARRIERS_OFFSET, start_ready = local_ready + 8;
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  if (threadIdx.x == 0) {
    s = locate_cluster_segment(args, blockIdx.x / CLUSTER, rank);
    mbarrier_init(local_ready, CLUSTER);
    mbarrier_init(start_ready, CLUSTER);
  }
  barriers.init();
  score_barriers.init();
  cluster_sync_all();

  const bool resident = s.tokens <= STAGES * CHUNK;
  const bool adds = rank < CLUSTER - 1;  // to a state that another block starts from
  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    RingPosition<STAGES> at;
    RingPosition<1> tail;
    if (adds && !resident) produce<false, false>(args, maps, s, ring, barriers, at, tail);
    produce<true, false>(args, maps, s, ring, barriers, at, tail);
  } else if (threadIdx.x >= PRODUCER_THREADS + 128 * WARPGROUPS) {
    setmaxnreg_dec<SCORE_REGISTERS>();
    RingPosition<STAGES> at;
    if (adds && !resident) skip_segment(s, barriers, at);
    make_scores(s, ring, smem + SCORES_OFFSET, barriers, score_barriers, at);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    float4* exchanged = reinterpret_cast<float4*>(smem + EXCHANGE_OFFSET + consumer * STATE_BYTES) + threadIdx.x % 128;
    const int head = first_head(s) + consumer;
    float state[HEADS][STATE_REGISTERS];
    RingPosition<STAGES> at;
    if (adds) {
      float total;
      if (rank == 0) {
        load_initial_state(args, s, head, state[0]);
      } else {
#pragma unroll
        for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
      }
      accumulate_segment(s, ring, barriers, consumer, at, !resident, state[0], total);
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; i += 4) exchanged[i / 4 * 128] = make_float4(state[0][i], state[0][i + 1], state[0][i + 2], state[0][i + 3]);
      if (threadIdx.x % 128 == 0) reinterpret_cast<float*>(smem + TOTALS_OFFSET)[consumer] = total;
    }
    sync_consumers_of_cluster(local_ready);
    chain_slice(smem_address(smem) + EXCHANGE_OFFSET, smem_address(smem) + TOTALS_OFFSET, rank);
    sync_consumers_of_cluster(start_ready);
    if (rank == 0) {
      load_initial_state(args, s, head, state[0]);
    } else {
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; i += 4) {
        const float4 v = exchanged[i / 4 * 128];
        state[0][i] = v.x;
        state[0][i + 1] = v.y;
        state[0][i + 2] = v.z;
        state[0][i + 3] = v.w;
      }
    }
    if (resident) at = {};
    forward_segment(args, maps, s, ring, smem + SCORES_OFFSET, barriers, score_barriers, consumer, at, state);
    if (s.last) store_final_state(args, s, head, state[0]);
  }
}
