// The block of a chain whose segment stays in shared memory (HALVES 2): one head, whose two consumers take half of the segment each. Include after
// common/sm90_forward.cuh.
//
// Every chunk has a stage of its own, filled once, so nothing is ever handed back. For the sums each consumer takes all chunks and half of dstate:
// what the first half of the segment adds, and then all of it, which it stores for the blocks after this one. It adds up its part of what those
// before stored, and has its part of the state at the segment's start and of that at its middle. They swap parts, and each makes Y of its own half.
//
// The score warpgroup makes S of all chunks as they come, a tile each. A warp of the producer makes the vectors of one chunk and stores its Y, which
// takes the place of x in shared memory: each warp of the half's consumer reads and writes the same 16 columns, and the other consumer has read its
// last of them when they swap.
//
// Shared  barriers, then a stage per chunk (common/sm90_pipeline.cuh), then S [STAGES boxes], then what the consumers swap [2 boxes]
#pragma once

#include "common/sm90_forward.cuh"

static_assert(HALVES == 1 || STAGES <= PRODUCER_THREADS / 32, "a warp makes the vectors of one chunk");

constexpr int HALVES_SCORES_OFFSET = BARRIERS_BYTES + STAGES * STAGE_BYTES;
constexpr int SWAP_OFFSET = HALVES_SCORES_OFFSET + STAGES * BOX_BYTES;
constexpr int HALVES_BYTES = SWAP_OFFSET + 2 * BOX_BYTES;

// What waits for what, a chunk.
struct HalvesBarriers {
  unsigned base;
  __device__ __forceinline__ unsigned summed(int chunk) const { return base + chunk * 32; }       // B, x and the vectors are there
  __device__ __forceinline__ unsigned whole(int chunk) const { return base + chunk * 32 + 8; }    // C and z are, whatever the rest
  __device__ __forceinline__ unsigned scores(int chunk) const { return base + chunk * 32 + 16; }  // S is
  __device__ __forceinline__ unsigned output(int chunk) const { return base + chunk * 32 + 24; }  // Y is
  __device__ __forceinline__ void init() const {
#pragma unroll 1
    for (int chunk = 0; chunk < STAGES; ++chunk) {
      mbarrier_init(summed(chunk), 1 + WARP_ARRIVALS);
      mbarrier_init(whole(chunk), 1);
      mbarrier_init(scores(chunk), 4 * WARP_ARRIVALS);
      mbarrier_init(output(chunk), 4 * WARP_ARRIVALS);
    }
    fence_mbarrier_init();
    fence_proxy_async();
  }
};

// The chunks of a segment and of its halves; the second may have none.
struct Halves {
  int chunks, middle;
  __device__ __forceinline__ explicit Halves(const Segment& s) : chunks((s.tokens + CHUNK - 1) / CHUNK), middle((chunks + 1) / 2) {}
  // The chunk that is the i-th wanted: halves take turns.
  __device__ __forceinline__ int in_turn(int i) const { return i / 2 + i % 2 * middle; }
};

// The warp of the thread that makes the barriers and starts the copies: the score warpgroup's first, which waits for them.
__device__ __forceinline__ bool copies_segment() { return threadIdx.x / 32 == (PRODUCER_THREADS + 128 * WARPGROUPS) / 32; }

// Copies of B and x, which the sums want, and of C and z: later, or they would take half of what L2 delivers from the former. One thread.
__device__ __forceinline__ void copy_for_sums(const TensorMaps& maps, const Segment& s, int chunks, unsigned ring, const HalvesBarriers& barriers) {
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int token = s.first + chunk * CHUNK;
    const unsigned stage = ring + chunk * STAGE_BYTES, barrier = barriers.summed(chunk);
    mbarrier_arrive_expect_tx(barrier, (DSTATE_BOXES + 1) * BOX_BYTES);
    tma_load_4d(stage + X_OFFSET, &maps.x, 0, first_head(s), token, s.row, barrier);
#pragma unroll
    for (int box = 0; box < DSTATE_BOXES; ++box) tma_load_4d(stage + B_OFFSET + box * BOX_BYTES, &maps.b, box * 64, s.group, token, s.row, barrier);
  }
}
__device__ __forceinline__ void copy_the_rest(const TensorMaps& maps, const Segment& s, const Halves& halves, unsigned ring, const HalvesBarriers& barriers) {
#pragma unroll 1
  for (int i = 0; i < halves.chunks; ++i) {
    const int chunk = halves.in_turn(i), token = s.first + chunk * CHUNK;
    const unsigned stage = ring + chunk * STAGE_BYTES, barrier = barriers.whole(chunk);
    mbarrier_arrive_expect_tx(barrier, C_BYTES + Z_BYTES);
#pragma unroll
    for (int box = 0; box < DSTATE_BOXES; ++box) tma_load_4d(stage + box * BOX_BYTES, &maps.c, box * 64, s.group, token, s.row, barrier);
    if (WITH_Z) tma_load_4d(stage + Z_OFFSET, &maps.z, 0, first_head(s), token, s.row, barrier);
  }
}

// The part of the producer's warp of a chunk: its vectors, and later the store of its Y.
__device__ __forceinline__ void produce_halves(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, unsigned char* ring,
                                               const HalvesBarriers& barriers) {
  const Halves halves(s);
  const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32;
  if (chunk >= halves.chunks) return;
  const int head = first_head(s), own = chunk * CHUNK + 2 * lane, token = s.first + chunk * CHUNK;
  unsigned char* stage = ring + chunk * STAGE_BYTES;
  const RawDt* dt = static_cast<const RawDt*>(args.dt) + s.row * args.dt_strides.batch + head * args.dt_strides.head + (s.first + own) * args.dt_strides.token;
  RawDt raw[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) raw[e] = own + e < s.tokens ? dt[e * args.dt_strides.token] : RawDt{};
  const float a = args.A[head] * LOG2_E, bias = HAS_DT_BIAS ? args.dt_bias[head] : 0.f;
  make_vectors(args, raw, a, bias, s.tokens - own, 0.f, reinterpret_cast<float2*>(stage + VECTORS_OFFSET) + lane);
  arrive_warp(barriers.summed(chunk));
  wait_barrier(barriers.output(chunk), 0);
  one_thread_if(true, [&] {
    tma_store_4d(&maps.out, 0, head, token, s.row, smem_address(stage + X_OFFSET));
    bulk_commit_group();
    bulk_wait_group_read<0>();
  });
}

// The score warpgroup's part.
__device__ __forceinline__ void score_halves(const TensorMaps& maps, const Segment& s, unsigned char* ring, unsigned char* tiles, const HalvesBarriers& barriers) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  const Halves halves(s);
  one_thread_if(copies_segment(), [&] { copy_for_sums(maps, s, halves.chunks, smem_address(ring), barriers); });
  wait_barrier(barriers.summed(max(halves.chunks - 2, 0)), 0);
  one_thread_if(copies_segment(), [&] { copy_the_rest(maps, s, halves, smem_address(ring), barriers); });
#pragma unroll 1
  for (int i = 0; i < halves.chunks; ++i) {
    const int chunk = halves.in_turn(i);
    const unsigned char* stage = ring + chunk * STAGE_BYTES;
    const unsigned tile = smem_address(tiles + chunk * BOX_BYTES);
    wait_barrier(barriers.whole(chunk), 0);
    wait_barrier(barriers.summed(chunk), 0);
    float scores[32];
    wgmma_fence();
    start_product_over_dstate(scores, stage, stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    decay_scores<true>(scores, vectors_of(stage, 0), threadIdx.x, 0, [&](int k, const FragmentA<X>& a) {
      stmatrix_x4(tile + swizzled(row, 2 * k + lane / 16), a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits);
    });
    fence_proxy_async();
    arrive_warp(barriers.scores(chunk));
  }
}

constexpr int HALF_REGISTERS = STATE_REGISTERS / 2;  // half of dstate
constexpr int SWAPPED_AT_ONCE = 16;                  // registers
constexpr int PART_BYTES = DSTATE_BOXES == 1 ? 64 : DSTATE_BOXES / 2 * BOX_BYTES;  // from one half of dstate to the other in B: 32 columns of a box, or a box

// The consumers swap registers, thread by thread: what one writes the other reads. The boxes change hands each time, so that nobody overwrites what
// another thread has yet to read.
__device__ __forceinline__ void swap_halves(unsigned char* boxes, int half, const float (&give)[HALF_REGISTERS], float (&got)[HALF_REGISTERS]) {
#pragma unroll
  for (int first = 0; first < HALF_REGISTERS; first += SWAPPED_AT_ONCE) {
    const int turn = first / SWAPPED_AT_ONCE % 2;
    float4* to = reinterpret_cast<float4*>(boxes + (half ^ turn) * BOX_BYTES) + threadIdx.x % 128;
    const float4* from = reinterpret_cast<const float4*>(boxes + (half ^ turn ^ 1) * BOX_BYTES) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < SWAPPED_AT_ONCE; i += 4)
      to[i / 4 * 128] = make_float4(give[first + i], give[first + i + 1], give[first + i + 2], give[first + i + 3]);
    bar_sync(WARPGROUPS + 1, 256);
#pragma unroll
    for (int i = 0; i < SWAPPED_AT_ONCE; i += 4) {
      const float4 v = from[i / 4 * 128];
      got[first + i] = v.x;
      got[first + i + 1] = v.y;
      got[first + i + 2] = v.z;
      got[first + i + 3] = v.w;
    }
  }
}

// A part of a state += (w x)^T times its part of B.
__device__ __forceinline__ void start_part_update(float (&state)[HALF_REGISTERS], const FragmentA<X> (&a)[4], const unsigned char* b_boxes, int part) {
  const WgmmaDescriptor<128> b(smem_address(b_boxes), BOX_BYTES);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_registers<1>(state, a[k], b.at(part * PART_BYTES + k * 16 * 128), 1);
}

// Adds what the chunks [first, end) do to this consumer's part of dstate, and to their decay, log2 units.
__device__ __forceinline__ void add_chunks(const unsigned char* ring, const HalvesBarriers& barriers, int part, int first, int end,
                                           float (&state)[HALF_REGISTERS], float& decay) {
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    const unsigned char* stage = ring + chunk * STAGE_BYTES;
    wait_barrier(barriers.summed(chunk), 0);
    const Vectors v = vectors_of(stage, 0);
    FragmentA<X> a[4];
    load_transposed(a, stage + X_OFFSET);
    weigh(a, a, v.w());
    scale_state(state, v);
    decay += v.g[CHUNK - 1];
    wgmma_fence();
    start_part_update(state, a, stage + B_OFFSET, part);
    wgmma_commit_group();
    wgmma_wait_group<0>();
  }
}

// Both consumers store the final state, half of dstate each: the one that has it hands the rest over in the place of C of the last chunk.
__device__ __forceinline__ void store_final_halves(const ForwardArgs& args, const Segment& s, unsigned char* ring, const HalvesBarriers& barriers,
                                                   bool has_it, const float (&state)[STATE_REGISTERS]) {
  static_assert(HALVES == 1 || C_BYTES == HALF_REGISTERS * 128 * 4, "half of a state is as large as C of a chunk");
  const int last = Halves(s).chunks - 1;
  float4* place = reinterpret_cast<float4*>(ring + last * STAGE_BYTES) + threadIdx.x % 128;
  if (has_it) {
    wait_barrier(barriers.output(last), 0);  // all four warps have done with C
#pragma unroll
    for (int i = 0; i < HALF_REGISTERS; i += 4) {
      const float* rest = state + HALF_REGISTERS + i;
      place[i / 4 * 128] = make_float4(rest[0], rest[1], rest[2], rest[3]);
    }
  }
  bar_sync(WARPGROUPS + 1, 256);
  float own[HALF_REGISTERS];
#pragma unroll
  for (int i = 0; i < HALF_REGISTERS; i += 4) {
    const float4 v = has_it ? make_float4(state[i], state[i + 1], state[i + 2], state[i + 3]) : place[i / 4 * 128];
    own[i] = v.x;
    own[i + 1] = v.y;
    own[i + 2] = v.z;
    own[i + 3] = v.w;
  }
  store_final_state(args, s, first_head(s), 0, has_it ? 0 : DSTATE_PADDED / 2, own);
}

// Y of the chunks [first, end) from the state before them, which becomes that after them if it is kept.
__device__ __forceinline__ void forward_half(unsigned char* ring, const unsigned char* tiles, const HalvesBarriers& barriers, int first, int end,
                                             bool keeps, const HeadD& d, float (&state)[STATE_REGISTERS]) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int chunk = first; chunk < end; ++chunk) {
    unsigned char* stage = ring + chunk * STAGE_BYTES;
    unsigned char* x_box = stage + X_OFFSET;
    wait_barrier(barriers.summed(chunk), 0);  // in a sequence's last block nobody has summed the second half
    const Vectors v = vectors_of(stage, 0);
    float y[32];  // Y^T, 64 headdim rows x 64 tokens
    FragmentA<X> weighted_x[4];
    load_transposed(weighted_x, x_box);
    weigh(weighted_x, weighted_x, v.w());
    wait_barrier(barriers.whole(chunk), 0);
    start_state_products<true>(y, state, weighted_x, stage, 0, v, keeps || chunk + 1 < end);
    float2 rise[8];
#pragma unroll
    for (int t = 0; t < 8; ++t) rise[t] = *reinterpret_cast<const float2*>(v.rise() + t * 8 + lane % 4 * 2);
    wgmma_wait_group<1>();  // H C^T
    FragmentA<X> x[4];
    load_transposed(x, x_box);
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) y[4 * t + i] *= i % 2 ? rise[t].y : rise[t].x;
    wait_barrier(barriers.scores(chunk), 0);
    const WgmmaDescriptor<128> scores(smem_address(tiles + chunk * BOX_BYTES), 0);
    pin(y);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_registers<0>(y, x[k], scores.at(k * 32), 1);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    finish_output(d, y, x, 0, x_box, x_box);
    arrive_warp(barriers.output(chunk));
  }
}
