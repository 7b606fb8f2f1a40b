// sm90_split_fused_forward, as sm90_fused_forward for any headdim, and dstate up to 512:
//   Y[i, p]  = exp2(G_i) sum_n C[i, n] H[p, n] + sum_{j <= i} exp2(G_i - G_j) dt_j (C B^T)[i, j] x[j, p] + D x[i, p],  then Y * silu(z)
//   H[p, n]  = exp2(G_last) H[p, n] + sum_l w[l] x[l, p] B[l, n]
// Y is a sum over dstate in every term but D x. So the SLICES blocks of a cluster each make the Y of their slice, S of their slice of C B^T
// included, and hand each other half of the tokens: a block adds, finishes and stores tokens OWN slice .. OWN (slice + 1) of each chunk.
//
// Products (M = 64) of the producer: C B^T, both in shared memory. Of a consumer, which makes Y^T: H C^T and (w x)^T B, the left ones in
// registers, where H is already; x^T S^T, both in shared memory.
//
// Grid   one cluster of SLICES blocks per (sequence, segment, WARPGROUPS units of a group)
// Block  a producer warpgroup, which also makes S, and WARPGROUPS consumers of one unit each
// Shared barriers, then the ring (common/sm90_split_pipeline.cuh), then S [VECTOR_SETS boxes], then z [WARPGROUPS][OWN tokens of a box] (HAS_Z
//        only), then what the other block sends (two slices only) [WARPGROUPS][2][4][128] float4, a thread's registers four by four; there the
//        finished rows are put together for their stores, too; then vectors
// Tail   as in common/sm90_split_pipeline.cuh; rows past the segment are not stored
// Source Dao and Gu 2024, section 6, all steps in one pass
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;

#include "common/sm90_split_pipeline.cuh"
#include "ptx/sm90_cluster.cuh"

constexpr int OWN = CHUNK / SLICES;  // tokens of a chunk that this block stores
constexpr int OWN_REGISTERS = OWN / 2;
constexpr int OWN_BYTES = OWN * 128;
constexpr int PART_BYTES = SLICES > 1 ? OWN_REGISTERS * 128 * 4 : 0;  // what a consumer receives in a chunk

constexpr int SCORES_OFFSET = BARRIERS_BYTES + STAGES * STAGE_BYTES;
constexpr int Z_OFFSET = SCORES_OFFSET + VECTOR_SETS * BOX_BYTES;
constexpr int EXCHANGE_OFFSET = Z_OFFSET + (HAS_Z ? WARPGROUPS * OWN_BYTES : 0);
static_assert(EXCHANGE_OFFSET + WARPGROUPS * 2 * PART_BYTES == VECTORS_OFFSET, "launch.rs carves the same shared memory");

static_assert(STATE_REGISTERS + 56 <= CONSUMER_REGISTERS, "the state of a unit's slice, and what the products need beside it, must stay in registers");

// Barriers behind the ring's: of the tiles of S, and of what the other block sends. There are two places for that and no barrier says that one
// is free: who sends for chunk c + 2 has received for c + 1, which the other block's threads sent after each had read for c, and stored its rows
// from there.
struct ForwardBarriers {
  unsigned base;
  __device__ __forceinline__ unsigned scores_full(int set) const { return base + set * 16; }
  __device__ __forceinline__ unsigned scores_empty(int set) const { return base + set * 16 + 8; }
  __device__ __forceinline__ unsigned received(int consumer, int place) const { return base + 32 + (consumer * 2 + place) * 8; }
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 64) {
      for (int i = 0; i < VECTOR_SETS; ++i) {
        mbarrier_init(scores_full(i), 4 * WARP_ARRIVALS);
        mbarrier_init(scores_empty(i), 4 * WARPGROUPS / VECTOR_SETS * WARP_ARRIVALS);
      }
      for (int i = 0; i < WARPGROUPS * 2; ++i) mbarrier_init(received(0, i), 1);
      fence_mbarrier_init();
    }
  }
};
constexpr int FORWARD_BARRIERS_OFFSET = 256;

// ---- the producer ----

// D [64 x 64] = the C boxes times the B boxes transposed.
__device__ __forceinline__ void start_score_product(float (&d)[32], const unsigned char* stage) {
  const WgmmaDescriptor<128> c(smem_address(stage), 0), b(smem_address(stage + B_OFFSET), 0);
#pragma unroll
  for (int k = 0; k < SLICE_BOXES * 4; ++k) {
    const unsigned offset = k / 4 * BOX_BYTES + k % 4 * 32;
    multiply_tiles<0, 0>(d, c.at(offset), b.at(offset), k > 0);
  }
}

// Fills the rings and makes S of every chunk and set of vectors. A copy takes longest, and starts at the first look that finds its stage free;
// the next chunk's vectors are made under the product.
__device__ __forceinline__ void produce(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, unsigned char* ring, unsigned tiles,
                                        const Barriers& barriers, const ForwardBarriers& forward_barriers) {
  const int chunks = __shfl_sync(0xffffffffu, (s.tokens + CHUNK - 1) / CHUNK, 0);  // known to be uniform
  Producer<false> producer(args, maps, s, ring, barriers);
  RawDt raw[2];
  producer.load_dt(args, s, ring, 0, raw);
  producer.load_constants(args, s, ring);
  producer.make(args, s, ring, barriers, 0, raw);
  producer.load_dt(args, s, ring, 1, raw);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int at = chunk % STAGES;
    const unsigned char* stage = ring + at * STAGE_BYTES;
    producer.provide(maps, s, ring, barriers, chunk);
    producer.copy_next(maps, s, ring, barriers);
    wait_barrier(barriers.full(at), chunk / STAGES % 2);
    float scores[32];  // raw C B^T, 64 rows x 64 tokens
    wgmma_fence();
    start_score_product(scores, stage);
    wgmma_commit_group();
    if (chunk + 1 < chunks) {
      producer.make(args, s, ring, barriers, chunk + 1, raw);
      producer.load_dt(args, s, ring, chunk + 2, raw);
    }
    wait_barrier(barriers.vectors_full(chunk), parity_of_vectors(chunk));
    wgmma_wait_group<0>();
#pragma unroll 1
    for (int set = 0; set < VECTOR_SETS; ++set) {
      producer.copy_next(maps, s, ring, barriers);
      wait_barrier(forward_barriers.scores_empty(set), chunk % 2 ^ 1);
      const unsigned tile = tiles + set * BOX_BYTES;
      const int thread = volatile_tid_x(), lane = thread % 32, row = thread / 32 % 4 * 16 + lane % 16;
      decay_scores<ROOMY>(scores, Vectors{vectors_at(ring, chunk, set)}, thread, 0, [&](int k, const FragmentA<X>& a) {
        stmatrix_x4(tile + swizzled(row, 2 * k + lane / 16), a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits);
      });
      fence_proxy_async();
      arrive_warp(forward_barriers.scores_full(set));
    }
    arrive_warp(barriers.empty(at));
    arrive_warp(barriers.vectors_empty(chunk));
  }
}

// ---- a consumer ----

// Y^T [64 headdim x 64 tokens] = H C^T, H the state rounded to X_DTYPE: its registers are operand A already. Large states go two k-steps at a
// time; ptxas rounds under the products of the two before, and to say so here (wgmma_wait_group<1>) makes it add waits. Scales the state by the
// chunk's decay when all of it is rounded.
__device__ __forceinline__ void multiply_state(float (&y)[32], float (&state)[PIECES][PIECE_REGISTERS], const unsigned char* c_boxes, const Vectors& v) {
  constexpr int STEPS = SLICE_BOXES * 4, PIECE_STEPS = STEPS / PIECES, PART = TIGHT ? 2 : STEPS;
  const WgmmaDescriptor<128> c(smem_address(c_boxes), 0);
#pragma unroll
  for (int part = 0; part < STEPS; part += PART) {
    FragmentA<X> h[PART];
    if (part > 0) wgmma_wait_group<0>();
#pragma unroll
    for (int k = 0; k < PART; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* from = state[(part + k) / PIECE_STEPS] + (part + k) % PIECE_STEPS * 8 + 2 * i;
        h[k].pair[i] = pack<X>(from[0], from[1]);
      }
    if (part + PART == STEPS) {
      const float decay = v.rise()[CHUNK - 1];
#pragma unroll
      for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
        for (int i = 0; i < PIECE_REGISTERS; ++i) state[piece][i] *= decay;
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < PART; ++k) multiply_registers<0>(y, h[k], c.at((part + k) / 4 * BOX_BYTES + (part + k) % 4 * 32), part + k > 0);
    wgmma_commit_group();
  }
  wgmma_wait_group<0>();
}

// The block's own rows of z, 64 headdim elements each; what is not there becomes zero.
__device__ __forceinline__ void copy_z(const ForwardArgs& args, const Segment& s, const Unit& unit, int slice, int chunk, unsigned char* z) {
  const int thread = thread_index() % 128, u = thread % 8, columns = HEADDIM - unit.p0 - u * 8;
  const X* from = static_cast<const X*>(args.z) + s.row * args.z_strides.batch + unit.head * args.z_strides.head + unit.p0 + u * 8;
#pragma unroll
  for (int i = 0; i < OWN / 16; ++i) {
    const int r = thread / 8 + i * 16, token = chunk * CHUNK + slice * OWN + r;
    const int bytes = unit.valid && token < s.tokens && columns > 0 ? (columns < 8 ? columns : 8) * 2 : 0;
    cp_async_cg_16(z + swizzled(r, u), bytes > 0 ? from + (s.first + token) * args.z_strides.token : nullptr, bytes);
  }
}

// Adds D x to the block's rows of Y; `x` is those of the x box.
__device__ __forceinline__ void add_dx(const ForwardArgs& args, const Segment& s, int consumer, float (&y)[OWN_REGISTERS], unsigned char* ring,
                                       const unsigned char* x) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  float d[2];  // D of the headdim rows lane / 4 and lane / 4 + 8 of the warp
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if constexpr (D_KIND == 1) {
      d[r] = constants_of(ring, consumer % VECTOR_SETS).d;
    } else {
      const Unit unit = locate_unit(s, consumer);
      const int p = unit.p0 + warp * 16 + lane / 4 + 8 * r;
      d[r] = unit.valid && p < HEADDIM ? args.D[unit.head * args.d_head_stride + p] : 0.f;
    }
  }
#pragma unroll
  for (int k = 0; k < OWN / 16; ++k) {
    const FragmentA<X> own = load_transposed(x, k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 f = unpack(own.pair[i]);
      y[8 * k + 2 * i] += d[i % 2] * f.x;
      y[8 * k + 2 * i + 1] += d[i % 2] * f.y;
    }
  }
}

// Applies the gate, and stores the block's rows of Y through `rows` of shared memory, 128 bytes each, of which a warp writes the 16 headdim columns
// that only it has read.
__device__ __forceinline__ void store_output(const ForwardArgs& args, const Segment& s, int consumer, int chunk, float (&y)[OWN_REGISTERS],
                                             unsigned char* rows, const unsigned char* z) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const Unit unit = locate_unit(s, consumer);
#pragma unroll
  for (int k = 0; k < OWN / 16; ++k) {
    float* v = y + 8 * k;
    if constexpr (HAS_Z) {
      const FragmentA<X> gate = load_transposed(z, k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 f = silu(unpack(gate.pair[i]));
        v[2 * i] *= f.x;
        v[2 * i + 1] *= f.y;
      }
    }
    stmatrix_x4_trans(transposed_at(rows, k), pack<X>(v[0], v[1]).bits, pack<X>(v[2], v[3]).bits, pack<X>(v[4], v[5]).bits, pack<X>(v[6], v[7]).bits);
  }
  bar_sync(consumer + 1, 128);  // rows are whole
  const int row = warp * (OWN / 4) + lane / 8, token = chunk * CHUNK + slice_of(s) * OWN + row;
  const int rows_left = unit.valid ? s.tokens - token : 0, columns = HEADDIM - unit.p0 - lane % 8 * 8;
  const unsigned char* from = rows + warp * (OWN / 4) * 128;
  X* to = static_cast<X*>(args.out) + s.row * args.out_strides.batch + (s.first + token) * args.out_strides.token + unit.head * args.out_strides.head +
          unit.p0 + lane % 8 * 8;
#pragma unroll
  for (int i = 0; i < OWN / 16; ++i) {
    if (4 * i < rows_left && columns > 0) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + swizzled(i * 4 + lane / 8, lane % 8));
      if (HEADDIM % 8 == 0 || columns >= 8) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < columns) to[j] = {static_cast<unsigned short>(words[j / 2] >> 16 * (j % 2))};
      }
    }
    to += 4 * args.out_strides.token;
  }
}

// The state before the first token of the segment: segment_scan's, or, where that is not launched (few segments: launch.rs, needs_scan), the sum of
// the initial state and what the segments before have made. For both there are no registers if the initial state comes element by element.
constexpr bool MAY_ADD = INITIAL_DTYPE < 0 || INITIAL_DTYPE == 2;
__device__ __forceinline__ void load_start_state(const ForwardArgs& args, const Segment& s, const Unit& unit, int n0, float (&state)[PIECES][PIECE_REGISTERS]) {
  if (s.index == 0 || (MAY_ADD && !args.scanned)) {
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) load_initial_state(args, s, unit.head, unit.p0, n0 + piece * PIECE_BOXES * 64, state[piece]);
  }
  wait_for_states(s);
  if (s.index == 0) return;
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) {
    const int first = n0 / 8 + piece * PIECE_BOXES * 8;
    if (!MAY_ADD || args.scanned) {
      load_segment_state(args, s, unit.head, unit.p0, first, state[piece]);
    } else {
      add_segment_states<1, 8>(args, s, unit.head, unit.p0, first, state[piece], [] {});
    }
  }
}

__device__ __forceinline__ void store_end_state(const ForwardArgs& args, const Segment& s, const Unit& unit, int n0, const float (&state)[PIECES][PIECE_REGISTERS]) {
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece) store_final_state(args, s, unit.head, unit.p0, n0 + piece * PIECE_BOXES * 64, state[piece]);
}

// Sends the other block its tokens of Y, and keeps this block's. Copies that count at the barrier, because an arrival would fence all memory.
__device__ __forceinline__ void exchange_output(const float (&y)[32], float (&own)[OWN_REGISTERS], int slice, unsigned place, unsigned received) {
  const int thread = thread_index();
  const unsigned to = map_to_rank(place, slice ^ 1) + thread % 128 * 16, there = map_to_rank(received, slice ^ 1);
  float sent[OWN_REGISTERS];
#pragma unroll
  for (int i = 0; i < OWN_REGISTERS; ++i) {
    sent[i] = slice == 0 ? y[(OWN_REGISTERS + i) % 32] : y[i];
    own[i] = slice == 0 ? y[i] : y[(OWN_REGISTERS + i) % 32];
  }
#pragma unroll
  for (int i = 0; i < OWN_REGISTERS; i += 4) store_async_v4(to + i / 4 * 2048, make_float4(sent[i], sent[i + 1], sent[i + 2], sent[i + 3]), there);
  if (thread % 128 == 0) mbarrier_arrive_expect_tx(received, PART_BYTES);  // of what comes here
}
__device__ __forceinline__ void add_received(float (&own)[OWN_REGISTERS], const unsigned char* place, unsigned received, unsigned parity) {
  while (!mbarrier_try_wait_parity_cluster(received, parity)) {
  }
  place += thread_index() % 128 * 16;
#pragma unroll
  for (int i = 0; i < OWN_REGISTERS; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(place + i / 4 * 2048);
    own[i] += v.x;
    own[i + 1] += v.y;
    own[i + 2] += v.z;
    own[i + 3] += v.w;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(SLICES, 1, 1)
    sm90_split_fused_forward(const __grid_constant__ ForwardArgs args, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  call_maps(maps);
  unsigned char* ring = smem + BARRIERS_BYTES;
  const Barriers barriers{smem_address(smem)};
  const ForwardBarriers forward_barriers{smem_address(smem) + FORWARD_BARRIERS_OFFSET};
  const Segment located = locate_segment(args, blockIdx.x);
  if (located.tokens < 0) return;  // so do the other blocks of the cluster
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  if (threadIdx.x == 0) s = located;
  barriers.init();
  forward_barriers.init();
  if constexpr (SLICES > 1) cluster_arrive();
  __syncthreads();  // s is there; the barrier of the cluster orders no ordinary writes
  if constexpr (SLICES > 1) cluster_wait();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce(args, maps, s, ring, smem_address(smem) + SCORES_OFFSET, barriers, forward_barriers);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    const int set = consumer % VECTOR_SETS;
    unsigned char* z = smem + Z_OFFSET + consumer * OWN_BYTES;
    const WgmmaDescriptor<128> scores(smem_address(smem) + SCORES_OFFSET + set * BOX_BYTES, 0);
    float state[PIECES][PIECE_REGISTERS];
    load_start_state(args, s, locate_unit(s, consumer), slice_of(s) * SLICE_BOXES * 64, state);

    // All places follow from the chunk: its number is the only one kept.
    for (int chunk = 0; chunk * CHUNK < s.tokens; ++chunk) {
      const int at = chunk % STAGES;
      unsigned char* stage = ring + at * STAGE_BYTES;
      unsigned char* x_box = stage + X_OFFSET + consumer * BOX_BYTES;
      if constexpr (HAS_Z) {
        copy_z(args, s, locate_unit(s, consumer), slice_of(s), chunk, z);
        cp_async_commit_group();
      }
      wait_barrier(barriers.vectors_full(chunk), parity_of_vectors(chunk));
      wait_barrier(barriers.full(at), chunk / STAGES % 2);
      const Vectors v{vectors_at(ring, chunk, set)};
      float y[32];  // Y^T, 64 headdim rows x 64 tokens
      multiply_state(y, state, stage, v);
      const float* rises = v.rise() + thread_index() % 4 * 2;
#pragma unroll
      for (int t = 0; t < 8; ++t) {
        const float2 rise = *reinterpret_cast<const float2*>(rises + t * 8);
#pragma unroll
        for (int i = 0; i < 4; ++i) y[4 * t + i] *= i % 2 ? rise.y : rise.x;
      }

      wait_barrier(forward_barriers.scores_full(set), chunk % 2);
      pin(y);
      wgmma_fence();
      const WgmmaDescriptor<128> x_rows(smem_address(x_box), 0);
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_tiles<1, 0>(y, x_rows.at(k * 16 * 128), scores.at(k * 32), 1);
      wgmma_commit_group();
      wgmma_wait_group<0>();
      arrive_warp(forward_barriers.scores_empty(set));

      float own[OWN_REGISTERS];
      unsigned char* place = smem + EXCHANGE_OFFSET + (consumer * 2 + chunk % 2) * PART_BYTES;
      const unsigned received = forward_barriers.received(consumer, chunk % 2);
      if constexpr (SLICES > 1) {
        exchange_output(y, own, slice_of(s), smem_address(place), received);
      } else {
#pragma unroll
        for (int i = 0; i < OWN_REGISTERS; ++i) own[i] = y[i];
      }
      if constexpr (D_KIND > 0) add_dx(args, s, consumer, own, ring, x_box + slice_of(s) * OWN_BYTES);

      FragmentA<X> weighted_x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) weighted_x[k] = load_transposed(x_box, k);
      weigh(weighted_x, v.w());
      arrive_warp(barriers.vectors_empty(chunk));
      wgmma_fence();
      start_state_update(state, weighted_x, stage + B_OFFSET);
      wgmma_commit_group();
      if constexpr (SLICES > 1) {
        wgmma_wait_group<0>();
        arrive_warp(barriers.empty(at));  // and the other block's part is waited for while the next chunk is copied
        add_received(own, place, received, chunk / 2 % 2);
        if constexpr (HAS_Z) cp_async_wait_group<0>();
        bar_sync(consumer + 1, 128);  // what was received is read: the place is the output's; and all of z is there
        store_output(args, s, consumer, chunk, own, place, z);
      } else {
        if constexpr (HAS_Z) cp_async_wait_group<0>();
        bar_sync(consumer + 1, 128);  // every warp is done with x^T S^T: the x box is the output's; and all of z is there
        store_output(args, s, consumer, chunk, own, x_box, z);
        fence_proxy_async();  // the next copy into the x box comes through another proxy than its last reads and writes
        wgmma_wait_group<0>();  // the state update
        arrive_warp(barriers.empty(at));
      }
    }
    if (s.last) store_end_state(args, s, locate_unit(s, consumer), slice_of(s) * SLICE_BOXES * 64, state);
    wait_at_the_end(s);
  }
}
