// What sm90_swap_segment_state and sm90_swap_fused_forward share: units, the two shared-memory rings, their producer, and x times w.
//
// The state is kept transposed, H^T [dstate, headdim], so that headdim is the N of every product and may be any multiple of 16, and
// dstate comes in boxes of 64 that pass through the ring one by one. A unit is BLOCK_HEAD elements of one head's headdim; consumer
// warpgroup i of block b of a group has unit b WARPGROUPS + i, its producer is warpgroup 0.
//
// Shared memory, in this order
//   boxes    [STAGES][DSTATE_BOXES] x { C [64 tokens][64 dstate] (fused_forward only), B the same }, 128-byte swizzle, shared by the units
//   x        [X_STAGES][WARPGROUPS] x tile; a tile is SUBTILES x [64 rows][32 headdim], 64-byte swizzle
//   own      [WARPGROUPS] x { w x [tile], then H^T rounded to X_DTYPE [DSTATE_BOXES tiles of 64 dstate rows] } (fused_forward only)
//   S        [64 tokens][64 tokens], 128-byte swizzle (fused_forward, SHARE only)
//   vectors  [X_STAGES][VECTOR_SETS] x g, gd, w (common/sm90_chunk.cuh)
//   barriers, and the block's Segment: read from here when needed, it costs no registers
// SHARE: the two units of a block are of one head. Then each makes half the columns of S, and both read all of it.
// Tokens past the segment, dstate past DSTATE, headdim past HEADDIM and units past the group read as zero or as a neighbour's values
// that nothing stored depends on; NaN beyond a sequence cannot enter.
#pragma once

constexpr int SCORE_WARPGROUPS = 0;

#include "common/sm90_chunk.cuh"

// Boxes are copied by the tensor memory accelerator. Packed sequences end inside the tensor, where only cp.async can stop reading.
constexpr bool USE_TMA = !PACKED;

constexpr int P_TILES = (HEADDIM + BLOCK_HEAD - 1) / BLOCK_HEAD;

constexpr int SUBTILES = (BLOCK_HEAD + 31) / 32;
constexpr int SUBTILE_BYTES = 64 * 64;
constexpr int TILE_BYTES = SUBTILES * SUBTILE_BYTES;
constexpr int TILE_REGISTERS = BLOCK_HEAD / 2;  // of a thread, for a 64 x BLOCK_HEAD accumulator
constexpr int STATE_REGISTERS = DSTATE_BOXES * TILE_REGISTERS;

constexpr bool SHARE = WARPGROUPS == 2 && P_TILES % 2 == 0;

constexpr int B_OFFSET = WITH_C ? BOX_BYTES : 0;
constexpr int PAIR_BYTES = B_OFFSET + BOX_BYTES;  // a C box and its B box
constexpr int STAGE_BYTES = DSTATE_BOXES * PAIR_BYTES;
constexpr int X_STAGES = STAGES > 2 ? STAGES : 2;
constexpr int X_OFFSET = STAGES * STAGE_BYTES;
constexpr int OWN_OFFSET = X_OFFSET + X_STAGES * WARPGROUPS * TILE_BYTES;
constexpr int OWN_BYTES = WITH_C ? (1 + DSTATE_BOXES) * TILE_BYTES : 0;
constexpr int SCORES_OFFSET = OWN_OFFSET + WARPGROUPS * OWN_BYTES;
constexpr int VECTOR_SETS = SHARE ? 1 : WARPGROUPS;
constexpr int VECTORS_OFFSET = SCORES_OFFSET + (WITH_C && SHARE ? BOX_BYTES : 0);
constexpr int BARRIERS_OFFSET = VECTORS_OFFSET + X_STAGES * VECTOR_SETS * VECTORS_BYTES;
constexpr int SEGMENT_OFFSET = BARRIERS_OFFSET + (STAGES * DSTATE_BOXES + X_STAGES) * 16;
static_assert(SEGMENT_OFFSET + 64 == SMEM_BYTES && sizeof(Segment) <= 64, "launch.rs carves the same shared memory");

// Registers after reallocation; rules.rs computes the same. Two blocks share a multiprocessor where that leaves a lone consumer enough.
constexpr bool TIGHT = STATE_REGISTERS >= 96;  // the state leaves few registers
constexpr int PRODUCER_REGISTERS = !USE_TMA ? 88 : !WITH_C ? 64 : TIGHT ? 40 : 56;
constexpr int WANTED_REGISTERS = STATE_REGISTERS + (WITH_C ? TILE_REGISTERS + (SHARE ? 72 + 2 * DSTATE_BOXES : TIGHT ? 104 : 100) : 64);
constexpr int consumer_registers(int blocks) {
  const int launch = 65536 / (blocks * THREADS) > 248 ? 248 : 65536 / (blocks * THREADS) / 8 * 8;
  const int share = (launch * THREADS - PRODUCER_REGISTERS * PRODUCER_THREADS) / (128 * WARPGROUPS) / 8 * 8;
  return share > 240 ? 240 : share;
}
constexpr int BLOCKS_PER_SM = USE_TMA && WARPGROUPS == 1 && WANTED_REGISTERS <= consumer_registers(2) ? 2 : 1;
constexpr int CONSUMER_REGISTERS = consumer_registers(BLOCKS_PER_SM);

MAMBA2_REQUIRE(W01, WANTED_REGISTERS <= CONSUMER_REGISTERS, "the state of a unit, and what the products need beside it, must stay in registers");

// What a consumer warpgroup works on.
struct Unit {
  int head;
  int p0;  // first headdim element
  bool valid;
};
__device__ __forceinline__ Unit locate_unit(const Segment& s, int consumer) {
  const int unit = s.block * WARPGROUPS + consumer;
  const int head = s.first_head + unit / P_TILES;
  return {head, unit % P_TILES * BLOCK_HEAD, consumer < WARPGROUPS && head < s.end_head};
}

// A full and an empty barrier per pair of boxes, `pair` of slot `slot`, then per slot of x. Pairs have their own, so that a large
// dstate streams: the first products start, and the next chunk's copies too, before a whole chunk is there or free.
struct Barriers {
  unsigned base;
  __device__ __forceinline__ unsigned box_full(int slot, int pair) const { return base + (slot * DSTATE_BOXES + pair) * 16; }
  __device__ __forceinline__ unsigned box_empty(int slot, int pair) const { return box_full(slot, pair) + 8; }
  __device__ __forceinline__ unsigned x_full(int slot) const { return base + (STAGES * DSTATE_BOXES + slot) * 16; }
  __device__ __forceinline__ unsigned x_empty(int slot) const { return x_full(slot) + 8; }
  __device__ __forceinline__ void init() const {
    // By a thread of a warp each: one init waits for the one before.
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES * DSTATE_BOXES; ++i) mbarrier_init(box_full(0, i), USE_TMA ? 1 : PRODUCER_THREADS);
      fence_mbarrier_init();
    } else if (threadIdx.x == 32) {
      for (int i = 0; i < STAGES * DSTATE_BOXES; ++i) mbarrier_init(box_empty(0, i), 4 * WARPGROUPS * WARP_ARRIVALS);
      fence_mbarrier_init();
    } else if (threadIdx.x == 64) {
      for (int s = 0; s < X_STAGES; ++s) {
        mbarrier_init(x_full(s), (USE_TMA ? 1 : PRODUCER_THREADS) + PRODUCER_THREADS / 32 * WARP_ARRIVALS);  // the copies, and each warp's vectors
        mbarrier_init(x_empty(s), 4 * WARPGROUPS * WARP_ARRIVALS);
      }
      fence_mbarrier_init();
    }
  }
};
__device__ __forceinline__ unsigned boxes_at(unsigned smem, int slot) { return smem + slot * STAGE_BYTES; }
__device__ __forceinline__ unsigned char* x_tile(unsigned char* smem, int slot, int consumer) {
  return smem + X_OFFSET + (slot * WARPGROUPS + consumer) * TILE_BYTES;
}
__device__ __forceinline__ float* vectors_at(unsigned char* smem, int slot, int consumer) {
  return reinterpret_cast<float*>(smem + VECTORS_OFFSET + (slot * VECTOR_SETS + consumer % VECTOR_SETS) * VECTORS_BYTES);
}

// Copies of one chunk by one thread, through the tensor memory accelerator: x tiles, then boxes.
__device__ __forceinline__ void copy_x_tma(const TensorMaps& maps, const Segment& s, int chunk, unsigned char* smem, const Barriers& barriers, int x_slot) {
  const int token = s.first + chunk * CHUNK, row = s.row;
  mbarrier_arrive_expect_tx(barriers.x_full(x_slot), WARPGROUPS * TILE_BYTES);
#pragma unroll
  for (int i = 0; i < WARPGROUPS; ++i) {
    const Unit unit = locate_unit(s, i);
#pragma unroll
    for (int t = 0; t < SUBTILES; ++t)
      tma_load_4d(smem_address(x_tile(smem, x_slot, i)) + t * SUBTILE_BYTES, &maps.x, unit.p0 + t * 32, unit.head, token, row, barriers.x_full(x_slot));
  }
}
__device__ __forceinline__ void copy_boxes_tma(const TensorMaps& maps, const Segment& s, int chunk, unsigned char* smem, const Barriers& barriers,
                                               const RingPosition<STAGES>& at) {
  const int token = s.first + chunk * CHUNK, row = s.row;
#pragma unroll 1
  for (int b = 0; b < DSTATE_BOXES; ++b) {
    wait_barrier(barriers.box_empty(at.stage, b), at.parity ^ 1);
    const unsigned full = barriers.box_full(at.stage, b), to = boxes_at(smem_address(smem), at.stage) + b * PAIR_BYTES;
    mbarrier_arrive_expect_tx(full, PAIR_BYTES);
    if (WITH_C) tma_load_4d(to, &maps.c, b * 64, s.group, token, row, full);
    tma_load_4d(to + B_OFFSET, &maps.b, b * 64, s.group, token, row, full);
  }
}

// The same by the whole producer warpgroup, with cp.async.
__device__ __forceinline__ void copy_x_async(const ForwardArgs& args, const Segment& s, int chunk, unsigned char* smem, const Barriers& barriers,
                                             int x_slot) {
  const int row = threadIdx.x / 4, unit16 = threadIdx.x % 4;  // and row + 32
#pragma unroll 1
  for (int i = 0; i < WARPGROUPS; ++i) {
    const Unit unit = locate_unit(s, i);
    const X* from = static_cast<const X*>(args.x) + s.row * args.x_strides.batch + (s.first + chunk * CHUNK + row) * args.x_strides.token +
                    unit.head * args.x_strides.head;
    unsigned char* to = x_tile(smem, x_slot, i) + swizzled64(row, unit16);
#pragma unroll 1
    for (int t = 0; t < SUBTILES; ++t) {
      const int p = unit.p0 + t * 32 + unit16 * 8;
      const int columns = unit.valid && p < HEADDIM ? (HEADDIM - p < 8 ? HEADDIM - p : 8) : 0;
#pragma unroll
      for (int i32 = 0; i32 < 2; ++i32) {
        const int bytes = chunk * CHUNK + row + 32 * i32 < s.tokens ? columns * 2 : 0;
        cp_async_cg_16(to + t * SUBTILE_BYTES + i32 * 2048, bytes > 0 ? from + 32 * i32 * args.x_strides.token + p : nullptr, bytes);
      }
    }
  }
  cp_async_mbarrier_arrive_noinc(barriers.x_full(x_slot));
}
__device__ __forceinline__ void copy_boxes_async(const ForwardArgs& args, const Segment& s, int chunk, unsigned char* smem, const Barriers& barriers,
                                                 const RingPosition<STAGES>& at) {
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 8;
  const int64 token = s.first + chunk * CHUNK + row;
  const int rows_left = s.tokens - chunk * CHUNK - row;
  const X* b_from = static_cast<const X*>(args.B) + s.row * args.b_strides.batch + token * args.b_strides.token + s.group * args.b_strides.head + column;
  const X* c_from = static_cast<const X*>(args.C) + s.row * args.c_strides.batch + token * args.c_strides.token + s.group * args.c_strides.head + column;
#pragma unroll 1
  for (int b = 0; b < DSTATE_BOXES; ++b) {
    wait_barrier(barriers.box_empty(at.stage, b), at.parity ^ 1);
    unsigned char* to = smem + at.stage * STAGE_BYTES + b * PAIR_BYTES + swizzled(row, threadIdx.x % 8);
    if (WITH_C) copy_box_async(to, c_from + b * 64, args.c_strides.token, rows_left, DSTATE - b * 64 - column);
    copy_box_async(to + B_OFFSET, b_from + b * 64, args.b_strides.token, rows_left, DSTATE - b * 64 - column);
    cp_async_mbarrier_arrive_noinc(barriers.box_full(at.stage, b));
  }
}

// Warpgroup 0: fills both rings for every chunk of the segment, the last first if BACKWARD; then w decays to the segment's end. Warp w makes the vectors of unit w (one for all with SHARE); the last warp, which has none,
// feeds the tensor memory accelerator.
template <bool BACKWARD>
__device__ __forceinline__ void produce(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, unsigned char* smem, const Barriers& barriers) {
  static_assert(WARPGROUPS < 4, "the last producer warp has no vectors to make");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int DT_AHEAD = USE_TMA ? 4 : 2;
  constexpr int STEP = BACKWARD ? -CHUNK : CHUNK;
  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  const Unit unit = locate_unit(s, warp);
  const float a = unit.valid ? args.A[unit.head] * LOG2_E : 0.f;
  const float bias = HAS_DT_BIAS && unit.valid ? args.dt_bias[unit.head] : 0.f;
  const Element<DT_DTYPE>* dt_next = static_cast<const Element<DT_DTYPE>*>(args.dt) + s.row * args.dt_strides.batch +
                                     (s.first + (BACKWARD ? (chunks - 1) * CHUNK : 0) + 2 * lane) * args.dt_strides.token +
                                     unit.head * args.dt_strides.head;
  int dt_token = (BACKWARD ? (chunks - 1) * CHUNK : 0) + 2 * lane;
  float after = 0.f;
  RawDt raw[DT_AHEAD][2];
  const auto load_dt = [&](RawDt (&to)[2]) {  // of the chunk after the last call's
#pragma unroll
    for (int e = 0; e < 2; ++e) to[e] = unit.valid && dt_token >= 0 && e < s.tokens - dt_token ? dt_next[e * args.dt_strides.token] : RawDt{};
    dt_next += STEP * args.dt_strides.token;
    dt_token += STEP;
  };
#pragma unroll
  for (int i = 0; i < DT_AHEAD; ++i) load_dt(raw[i]);

  RingPosition<X_STAGES> x_at;
  RingPosition<STAGES> at;
  for (int chunk0 = 0; chunk0 < chunks; chunk0 += DT_AHEAD) {
#pragma unroll
    for (int ahead = 0; ahead < DT_AHEAD; ++ahead) {
      if (chunk0 + ahead >= chunks) break;
      const int chunk = BACKWARD ? chunks - 1 - chunk0 - ahead : chunk0 + ahead;
      wait_barrier(barriers.x_empty(x_at.stage), x_at.parity ^ 1);
      const bool copies = threadIdx.x / 32 == PRODUCER_THREADS / 32 - 1;
      if constexpr (USE_TMA) {
        one_thread_if(copies, [&] { copy_x_tma(maps, s, chunk, smem, barriers, x_at.stage); });
      } else {
        copy_x_async(args, s, chunk, smem, barriers, x_at.stage);
      }
      if (warp < VECTOR_SETS) {
        const float whole = make_vectors(args, raw[ahead], a, bias, unit.valid ? s.tokens - chunk * CHUNK - 2 * lane : 0, after,
                                         reinterpret_cast<float2*>(vectors_at(smem, x_at.stage, warp)) + lane);
        if constexpr (BACKWARD) after += whole;
      }
      arrive_warp(barriers.x_full(x_at.stage));  // before waiting for boxes: consumers prepare x and H meanwhile
      if constexpr (USE_TMA) {
        one_thread_if(copies, [&] { copy_boxes_tma(maps, s, chunk, smem, barriers, at); });
      } else {
        copy_boxes_async(args, s, chunk, smem, barriers, at);
      }
      x_at.advance();
      at.advance();
      load_dt(raw[ahead]);
    }
  }
}

// Addresses are computed anew for each chunk where that saves registers.
__device__ __forceinline__ int thread_index() { return TIGHT ? volatile_tid_x() : static_cast<int>(threadIdx.x); }

// w x of the warp's 16 tokens, `from` an x tile, to the same places of `to`.
__device__ __forceinline__ void weigh_x(unsigned char* to, const unsigned char* from, const float* w) {
  const int thread = thread_index(), lane = thread % 32, row0 = thread / 32 % 4 * 16 + lane / 4;
  const int at0 = row0 * 64 + lane % 4 * 16;  // the swizzle moves units within a row, and the weight is the row's
  uint4 v[2][SUBTILES];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int t = 0; t < SUBTILES; ++t) v[i][t] = *reinterpret_cast<const uint4*>(from + at0 + t * SUBTILE_BYTES + i * 512);
  const unsigned select = row0 % 2 ? 0x3232u : 0x1010u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(w + row0 / 2 * 2 + 8 * i);  // of two neighbouring tokens
    const unsigned high = __byte_perm(__float_as_uint(pair.x), 0, select), low = __byte_perm(__float_as_uint(pair.y), 0, select);
    const float weight = row0 % 2 ? pair.y : pair.x;
#pragma unroll
    for (int t = 0; t < SUBTILES; ++t) {
      unsigned u[4] = {v[i][t].x, v[i][t].y, v[i][t].z, v[i][t].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (X_DTYPE == 0) {
          u[j] = fma_bf16x2(u[j], high, mul_bf16x2(u[j], low));
        } else {
          const float2 f = unpack(Pair<X>{u[j]});
          u[j] = pack<X>(f.x * weight, f.y * weight).bits;
        }
      }
      *reinterpret_cast<uint4*>(to + at0 + t * SUBTILE_BYTES + i * 512) = make_uint4(u[0], u[1], u[2], u[3]);
    }
  }
}

// Starts H^T (+)= B^T (w x) for one box of dstate. The caller commits and waits.
__device__ __forceinline__ void start_state_update(float (&state)[TILE_REGISTERS], unsigned b_box, unsigned weighted_x) {
  const WgmmaDescriptor<128> b(b_box, 0);
  const WgmmaDescriptor<64> x(weighted_x, SUBTILE_BYTES);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_tiles<1, 1>(state, b.at(k * 2048), x.at(k * 1024), 1);
}

// dstate inside a box, and headdim inside a unit, of accumulator element i of this thread.
__device__ __forceinline__ int state_n(int i) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int state_p(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Where this thread's element 0 of box 0 lies in the workspace, and how far from there its element i of box k.
__device__ __forceinline__ int first_element_of_state(const Unit& unit) { return element_of_state(unit.p0 + state_p(0), state_n(0)); }
constexpr int further_element_of_state(int k, int i) {
  static_assert(BLOCK_HEAD % 16 == 0, "units are whole strips");
  return (i / 8 * (DSTATE_PADDED / 8) + k * 8 + i / 2 % 2) * 128 + i % 2 * 16 + i / 4 % 2 * 2;
}
