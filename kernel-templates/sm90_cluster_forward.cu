// sm90_cluster_forward: the whole forward pass in one launch. The CLUSTER blocks of a cluster split each sequence into as many segments
// and hand the states over through shared memory:
//   1. every block but the last: the state its segment adds (the first block: starting from the initial state), and its decay
//   2. block r takes one slice of the state and chains it:  start[q + 1] = exp2(total[q]) start[q] + local[q]
//   3. every block: Y of its segment from the state at its start, as sm90_fused_forward
// A segment that fits the ring is copied once and stays there for both passes.
//
// Grid   CLUSTER blocks per (sequence, HEADS_BLOCK heads)
// Block  a producer warpgroup, WARPGROUPS consumers of one head each, a score warpgroup
// Shared barriers and totals, then the ring (common/sm90_pipeline.cuh), then S [WARPGROUPS][SCORE_SLOTS boxes], then per consumer the
//        exchanged state [STATE_REGISTERS / 4][128] float4, a thread's registers four by four, and once that is read Y [OUTPUT_SLOTS boxes]
// Tail   as in common/sm90_pipeline.cuh; blocks past a short sequence have no tokens and still take part in the exchange
// Source Dao and Gu 2024, section 6, all steps in one launch
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;
constexpr int HEADS = 1;    // a warpgroup; two spill

#include "common/sm90_forward.cuh"
#include "ptx/sm90_cluster.cuh"

constexpr int STATE_BYTES = STATE_REGISTERS * 128 * 4;  // of one head
constexpr int SCORES_OFFSET = BARRIERS_BYTES + STAGES * STAGE_BYTES;
constexpr int EXCHANGE_OFFSET = SCORES_OFFSET + SCORES_BYTES;
static_assert(EXCHANGE_OFFSET + WARPGROUPS * STATE_BYTES == SMEM_BYTES, "launch.rs carves the same shared memory");
static_assert(OUTPUT_SLOTS * BOX_BYTES <= STATE_BYTES);

constexpr int CLUSTER_BARRIERS_OFFSET = 512;  // behind the ring's barriers
constexpr int TOTALS_OFFSET = 640;
static_assert(SCORE_BARRIERS_OFFSET + WARPGROUPS * SCORE_SLOTS * 16 <= CLUSTER_BARRIERS_OFFSET && TOTALS_OFFSET + HEADS_BLOCK * 4 <= SEGMENT_OFFSET);
constexpr int BLOCK_BARRIER = WARPGROUPS + 1;  // of all consumers

__device__ __forceinline__ Segment locate_cluster_segment(const ForwardArgs& args, unsigned work, int rank) {
  Segment s;
  s.sequence = locate_group(args, work, s);
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
  call_maps(maps);
  unsigned char* ring = smem + BARRIERS_BYTES;
  const Barriers barriers{smem_address(smem)};
  const ScoreBarriers score_barriers{smem_address(smem) + SCORE_BARRIERS_OFFSET};
  const int rank = static_cast<int>(cluster_rank());
  const unsigned local_ready = smem_address(smem) + CLUSTER_BARRIERS_OFFSET, start_ready = local_ready + 8;
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  const Segment located = locate_cluster_segment(args, blockIdx.x / CLUSTER, rank);
  const bool resident = located.tokens <= STAGES * CHUNK;
  const bool adds = rank < CLUSTER - 1;  // to a state that another block starts from
  Producer<false> producer(args, maps, located, ring, barriers);
  if (threadIdx.x == 0) {
    s = located;
    mbarrier_init(local_ready, CLUSTER);
    mbarrier_init(start_ready, CLUSTER);
    score_barriers.init();
  }
  if (copies()) barriers.init();
  __syncthreads();
  cluster_arrive();  // relaxed: the inits have a fence of their own

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
#pragma unroll 1
    for (int pass = adds && !resident ? 0 : 1; pass < 2; ++pass, producer.rewind()) producer.run(pass == 1);
  } else if (threadIdx.x >= PRODUCER_THREADS + 128 * WARPGROUPS) {
    setmaxnreg_dec<SCORE_REGISTERS>();
    RingPosition<STAGES> at;
    if (adds && !resident) skip_segment(s, barriers, at);
    make_scores(s, ring, smem + SCORES_OFFSET, barriers, score_barriers, at);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    unsigned char* own = smem + EXCHANGE_OFFSET + consumer * STATE_BYTES;
    float4* exchanged = reinterpret_cast<float4*>(own) + threadIdx.x % 128;
    const int head = first_head(s) + consumer;
    const HeadD d[HEADS] = {HeadD(args, s, head)};
    float state[HEADS][STATE_REGISTERS];
    RingPosition<STAGES> at;
    if (adds) {
      float total[HEADS];
      if (rank == 0) {
        load_initial_state(args, s, head, state[0]);
      } else {
#pragma unroll
        for (int i = 0; i < STATE_REGISTERS; ++i) state[0][i] = 0.f;
      }
      accumulate_segment(s, ring, barriers, consumer, at, !resident, state, total);
#pragma unroll
      for (int i = 0; i < STATE_REGISTERS; i += 4) exchanged[i / 4 * 128] = make_float4(state[0][i], state[0][i + 1], state[0][i + 2], state[0][i + 3]);
      if (threadIdx.x % 128 == 0) reinterpret_cast<float*>(smem + TOTALS_OFFSET)[consumer] = total[0];
    }
    cluster_wait();  // the others' barriers are there
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
    bar_sync(consumer + 1, 128);  // Y takes its place
    if (resident) at = {};
    forward_segment(args, maps, s, ring, smem + SCORES_OFFSET, own, barriers, score_barriers, consumer, d, at, state);
    if (s.last) store_final_state(args, s, head, state[0]);
  }
}
