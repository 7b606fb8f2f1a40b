// What sm90_segment_state and sm90_fused_forward share: work items, the shared-memory ring, its producer, and the state update.
//
// A work item is one segment of one sequence for HEADS_BLOCK heads of a group. Warpgroup 0 produces, warpgroups 1..WARPGROUPS
// consume, HEADS heads each. Chunks are 64 tokens, so that every product has M = 64.
//
// Shared-memory tiles are boxes of 64 rows x 64 elements with the 128-byte swizzle of wgmma: row r is 128 bytes, its 16-byte unit u
// lies at u ^ (r % 8). A stage holds, in this order,
//   C  [DSTATE_BOXES boxes, 64 tokens each]      (fused_forward only)
//   B  [DSTATE_BOXES boxes]
//   x  [HEADS_BLOCK boxes, 64 tokens x headdim]
//   g, gd, w  [HEADS_BLOCK][3][64]   G in log2 units; G - log2(dt), so that exp2(G_i - gd_j) = exp2(G_i - G_j) dt_j; w = dt exp2(G_last - G)
//             as float32 for f16, as two bf16 numbers high + low for bf16: x * low, then x * high + that, rounds once
// Boxes are copied by the tensor memory accelerator. Packed sequences end inside the tensor, where only cp.async can stop reading.
// Tokens past the segment, dstate past DSTATE, headdim past HEADDIM and heads past the group read as zero: nothing outside the
// tensors is touched, and NaN beyond a sequence cannot enter.
#pragma once

#include "common/args.cuh"
#include "common/fragments.cuh"
#include "common/require.cuh"
#include "common/softplus.cuh"
#include "ptx/sm90_barrier.cuh"
#include "ptx/sm90_tma.cuh"
#include "ptx/sm90_wgmma.cuh"

using X = Element<X_DTYPE>;

constexpr int CHUNK = 64;
constexpr int HEADS_BLOCK = HEADS * WARPGROUPS;
constexpr int DSTATE_BOXES = (DSTATE + 63) / 64;
constexpr int DSTATE_PADDED = DSTATE_BOXES * 64;
constexpr int STATE_REGISTERS = DSTATE_PADDED / 2;  // of a thread, for one head
constexpr int HEAD_BLOCKS_PER_GROUP = (HEADS_PER_GROUP + HEADS_BLOCK - 1) / HEADS_BLOCK;
constexpr int BOX_BYTES = 64 * 128;
constexpr float LOG2_E = 1.4426950408889634f;

MAMBA2_REQUIRE(P01, X_DTYPE < 2, "16-bit inputs only: wgmma has no float32 product");
MAMBA2_REQUIRE(P02, HEADDIM <= 64 && (DSTATE_BOXES == 1 || DSTATE_BOXES == 2 || DSTATE_BOXES == 4), "one 64-row tile of headdim, 64, 128 or 256 of dstate");
MAMBA2_REQUIRE(P04, ALIGNED == 1, "16-byte copies");
MAMBA2_REQUIRE(P05, SEGMENT % CHUNK == 0, "a segment is whole chunks");

constexpr int C_BYTES = WITH_C ? DSTATE_BOXES * BOX_BYTES : 0;
constexpr int B_OFFSET = C_BYTES;
constexpr int X_OFFSET = B_OFFSET + DSTATE_BOXES * BOX_BYTES;
constexpr int VECTORS_OFFSET = X_OFFSET + HEADS_BLOCK * BOX_BYTES;
constexpr int STAGE_BYTES = VECTORS_OFFSET + (HEADS_BLOCK * 3 * CHUNK * 4 + 1023) / 1024 * 1024;
constexpr int BARRIERS_BYTES = 1024;
constexpr int PRODUCER_THREADS = 128;
static_assert(THREADS == 128 * (WARPGROUPS + 1), "launch.rs gives one producer warpgroup");

constexpr bool USE_TMA = !PACKED;
struct TensorMaps {
  TensorMap x, b, c;
};

// Two blocks share a multiprocessor where the states of a lone consumer warpgroup are small enough; copies without tensor maps need
// too many registers for that.
constexpr int BLOCKS_PER_SM = USE_TMA && WARPGROUPS == 1 && HEADS * STATE_REGISTERS <= 64 ? 2 : 1;
// Registers after reallocation: what a block is launched with, moved from the producer to the
// consumers. In steps of eight; a thread has at most 240. rules.rs computes the same.
constexpr int LAUNCH_REGISTERS = 65536 / (BLOCKS_PER_SM * THREADS) > 248 ? 248 : 65536 / (BLOCKS_PER_SM * THREADS) / 8 * 8;
constexpr int PRODUCER_REGISTERS = USE_TMA ? 56 : 72;
constexpr int CONSUMER_SHARE = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * PRODUCER_THREADS) / (128 * WARPGROUPS) / 8 * 8;
constexpr int CONSUMER_REGISTERS = CONSUMER_SHARE > 240 ? 240 : CONSUMER_SHARE;

MAMBA2_REQUIRE(P03, HEADS * STATE_REGISTERS + (WITH_C ? 80 + 32 * HEADS : 24 + 16 * HEADS) <= CONSUMER_REGISTERS,
               "the states of a warpgroup, and what the products need beside them, must stay in registers");

struct Segment {
  int64 row;      // index along the batch axis
  int64 first;    // first token
  int tokens;     // of this segment
  int sequence;
  int index;      // of the segment in its sequence
  int64 slot;     // where its state lies in the workspace: segment 1 of a sequence is at the sequence's first slot
  bool last;      // of its sequence
  int head0, head_end, group;
};

// Items: head blocks fastest (they share B and C in L2), then segments of a sequence, then sequences. Packed sequence s owns the
// segment items from cu_seqlens[s] / SEGMENT + s, as many as it has segments or more; an empty sequence has one.
__device__ __forceinline__ Segment locate_segment(const ForwardArgs& args, int64 work) {
  const int groups = args.nheads / HEADS_PER_GROUP;
  const int blocks = groups * HEAD_BLOCKS_PER_GROUP;
  const int head_block = static_cast<int>(work % blocks);
  const int item = static_cast<int>(work / blocks);
  Segment s;
  s.group = head_block / HEAD_BLOCKS_PER_GROUP;
  s.head0 = s.group * HEADS_PER_GROUP + head_block % HEAD_BLOCKS_PER_GROUP * HEADS_BLOCK;
  s.head_end = (s.group + 1) * HEADS_PER_GROUP;
  int tokens;
  int64 first, first_item;
  if (PACKED) {
    int below = 0, above = args.sequences;
    while (above - below > 1) {
      const int middle = (below + above) / 2;
      if ((SEGMENT ? args.cu_seqlens[middle] / max(SEGMENT, 1) : 0) + middle <= item) {
        below = middle;
      } else {
        above = middle;
      }
    }
    s.sequence = below;
    s.row = 0;
    first = args.cu_seqlens[below];
    int end = args.cu_seqlens[below + 1];
    if (end > args.seqlen) end = args.seqlen;
    tokens = end > first ? static_cast<int>(end - first) : 0;
    first_item = (SEGMENT ? first / max(SEGMENT, 1) : 0) + below;
  } else {
    const int per_row = args.chunks_per_row;  // segments of a row here
    s.sequence = item / per_row;
    s.row = s.sequence;
    first = 0;
    tokens = args.seqlen;
    first_item = static_cast<int64>(s.sequence) * per_row;
  }
  s.index = static_cast<int>(item - first_item);
  s.slot = (PACKED ? first_item : static_cast<int64>(s.sequence) * (args.chunks_per_row - 1)) + s.index - 1;
  if (SEGMENT == 0) {
    s.first = first;
    s.tokens = s.index == 0 ? tokens : -1;
    s.last = true;
  } else {
    const int64 at = static_cast<int64>(s.index) * SEGMENT;
    const int64 left = tokens - at;
    s.first = first + at;
    s.tokens = left > SEGMENT ? SEGMENT : left > 0 ? static_cast<int>(left) : s.index == 0 ? 0 : -1;  // -1: no such segment
    s.last = left <= SEGMENT;
  }
  return s;
}

// Byte offset of 16-byte unit `unit` of row `row` in a box.
__device__ __forceinline__ int swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// Copies 64 rows x 64 elements into a box. A thread copies unit threadIdx.x % 8 of the rows threadIdx.x / 8 + 16 i: `from` and `to`
// already point at its first one, `rows_left` and `columns_left` count from there. Rows and columns past the tensor become zero and
// are not read.
__device__ __forceinline__ void copy_box_async(unsigned char* to, const X* from, int64 row_stride, int rows_left, int columns_left) {
  const int columns = columns_left < 0 ? 0 : columns_left > 8 ? 8 : columns_left;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int bytes = 16 * i < rows_left ? columns * 2 : 0;
    cp_async_cg_16(to + i * 2048, bytes > 0 ? from : nullptr, bytes);
    from += 16 * row_stride;
  }
}

// A full and an empty barrier per stage.
struct Barriers {
  unsigned base;
  __device__ __forceinline__ unsigned full(int stage) const { return base + stage * 16; }
  __device__ __forceinline__ unsigned empty(int stage) const { return base + stage * 16 + 8; }
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; ++s) {
        mbarrier_init(full(s), USE_TMA ? 1 + PRODUCER_THREADS           // the copies, and each thread's vectors
                                       : 2 * PRODUCER_THREADS);  // each thread: its cp.async, and its vectors
        mbarrier_init(empty(s), 128 * WARPGROUPS);
      }
      fence_mbarrier_init();
    }
  }
};

__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Stage and parity of the n-th chunk, advanced step by step.
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == STAGES) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Copies one chunk's boxes with the tensor memory accelerator; one thread.
__device__ __forceinline__ void copy_stage_tma(const TensorMaps& maps, const Segment& s, int token, unsigned stage, unsigned full) {
  mbarrier_arrive_expect_tx(full, VECTORS_OFFSET);
#pragma unroll
  for (int box = 0; box < DSTATE_BOXES; ++box) {
    tma_load_4d(stage + B_OFFSET + box * BOX_BYTES, &maps.b, box * 64, s.group, token, static_cast<int>(s.row), full);
    if (WITH_C) tma_load_4d(stage + box * BOX_BYTES, &maps.c, box * 64, s.group, token, static_cast<int>(s.row), full);
  }
#pragma unroll
  for (int h = 0; h < HEADS_BLOCK; ++h) tma_load_4d(stage + X_OFFSET + h * BOX_BYTES, &maps.x, 0, s.head0 + h, token, static_cast<int>(s.row), full);
}

// Copies one chunk's boxes with cp.async; the whole producer warpgroup, each thread one 16-byte unit of every sixteenth row.
struct CpAsyncCopier {
  const X* b;
  const X* c;
  const X* x;
  int row, column;

  __device__ __forceinline__ CpAsyncCopier(const ForwardArgs& args, const Segment& s) : row(threadIdx.x / 8), column(threadIdx.x % 8 * 8) {
    const int64 token = s.first + row;
    b = static_cast<const X*>(args.B) + s.row * args.b_strides.batch + token * args.b_strides.token + s.group * args.b_strides.head + column;
    c = static_cast<const X*>(args.C) + s.row * args.c_strides.batch + token * args.c_strides.token + s.group * args.c_strides.head + column;
    x = static_cast<const X*>(args.x) + s.row * args.x_strides.batch + token * args.x_strides.token + s.head0 * args.x_strides.head + column;
  }

  __device__ __forceinline__ void copy_stage(const ForwardArgs& args, const Segment& s, int chunk, unsigned char* stage) {
    unsigned char* to = stage + swizzled(row, threadIdx.x % 8);
    const int rows_left = s.tokens - chunk * CHUNK - row;
#pragma unroll 1
    for (int box = 0; box < DSTATE_BOXES; ++box) {
      copy_box_async(to + B_OFFSET + box * BOX_BYTES, b + box * 64, args.b_strides.token, rows_left, DSTATE - box * 64 - column);
      if (WITH_C) copy_box_async(to + box * BOX_BYTES, c + box * 64, args.c_strides.token, rows_left, DSTATE - box * 64 - column);
    }
#pragma unroll 1
    for (int h = 0; h < HEADS_BLOCK; ++h)
      copy_box_async(to + X_OFFSET + h * BOX_BYTES, x + h * args.x_strides.head, args.x_strides.token, s.head0 + h < s.head_end ? rows_left : 0, HEADDIM - column);
    b += CHUNK * args.b_strides.token;
    if (WITH_C) c += CHUNK * args.c_strides.token;
    x += CHUNK * args.x_strides.token;
  }
};

// g, gd and w of one head's chunk from this lane's two raw dt.
__device__ __forceinline__ void make_vectors(const ForwardArgs& args, const float (&raw)[2], float a, float bias, int tokens_left, float2* to) {
  const int lane = threadIdx.x % 32;
  float dt[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) dt[e] = e < tokens_left ? dt_pipeline(raw[e], bias, args.dt_min, args.dt_max) : 0.f;
  const long long g0 = to_fixed(a * dt[0]), g1 = to_fixed(a * dt[1]) + g0;
  long long before = g1;  // inclusive scan over lanes
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long from = __shfl_up_sync(0xffffffffu, before, step);
    if (lane >= step) before += from;
  }
  before = __shfl_up_sync(0xffffffffu, before, 1);
  if (lane == 0) before = 0;
  const float2 g = make_float2(from_fixed(before + g0), from_fixed(before + g1));
  to[0] = g;
  to[CHUNK / 2] = make_float2(g.x - lg2_approx(dt[0]), g.y - lg2_approx(dt[1]));  // dt = 0: +inf, its weight exp2(-inf) = 0
  const float last = __shfl_sync(0xffffffffu, g.y, 31);
  const float w0 = dt[0] * ex2_approx(fminf(last - g.x, 0.f)), w1 = dt[1] * ex2_approx(fminf(last - g.y, 0.f));
  if constexpr (X_DTYPE == 0) {
    const Pair<X> high = pack<X>(w0, w1);
    const float2 kept = unpack(high);
    to[CHUNK] = make_float2(__uint_as_float(high.bits), __uint_as_float(pack<X>(w0 - kept.x, w1 - kept.y).bits));
  } else {
    to[CHUNK] = make_float2(w0, w1);
  }
}

// Warpgroup 0: fills the ring for every chunk of the segment. Warp w makes the vectors of the heads w, w + 4, ...
__device__ __forceinline__ void produce(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, unsigned char* ring, const Barriers& barriers) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int HEADS_WARP = (HEADS_BLOCK + 3) / 4;
  // Raw dt is loaded this many chunks before its use: a chunk is shorter than the latency of device memory.
  constexpr int DT_AHEAD = USE_TMA && HEADS_WARP == 1 ? 4 : 2;
  float raw[DT_AHEAD][HEADS_WARP][2], a[HEADS_WARP], bias[HEADS_WARP];
  bool valid[HEADS_WARP];
#pragma unroll
  for (int i = 0; i < HEADS_WARP; ++i) {
    const int head = s.head0 + warp + i * 4;
    valid[i] = warp + i * 4 < HEADS_BLOCK && head < s.head_end;
    a[i] = valid[i] ? args.A[head] * LOG2_E : 0.f;
    bias[i] = HAS_DT_BIAS && valid[i] ? args.dt_bias[head] : 0.f;
  }
  const Element<DT_DTYPE>* dt_next = static_cast<const Element<DT_DTYPE>*>(args.dt) + s.row * args.dt_strides.batch +
                                     (s.first + 2 * lane) * args.dt_strides.token + (s.head0 + warp) * args.dt_strides.head;
  int dt_tokens_left = s.tokens - 2 * lane;
  const auto load_dt = [&](float (&to)[HEADS_WARP][2]) {  // of the chunk after the last call's
#pragma unroll
    for (int i = 0; i < HEADS_WARP; ++i)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        to[i][e] = valid[i] && e < dt_tokens_left ? to_float(dt_next[e * args.dt_strides.token + i * 4 * args.dt_strides.head]) : 0.f;
    dt_next += CHUNK * args.dt_strides.token;
    dt_tokens_left -= CHUNK;
  };
#pragma unroll
  for (int i = 0; i < DT_AHEAD; ++i) load_dt(raw[i]);

  CpAsyncCopier copier(args, s);
  RingPosition at;
  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  for (int chunk0 = 0; chunk0 < chunks; chunk0 += DT_AHEAD) {
#pragma unroll
    for (int ahead = 0; ahead < DT_AHEAD; ++ahead) {
      const int chunk = chunk0 + ahead;
      if (chunk >= chunks) break;
      wait_barrier(barriers.empty(at.stage), at.parity ^ 1);
      unsigned char* stage = ring + at.stage * STAGE_BYTES;
      if constexpr (USE_TMA) {
        if (threadIdx.x == 0) copy_stage_tma(maps, s, static_cast<int>(s.first) + chunk * CHUNK, smem_address(stage), barriers.full(at.stage));
      } else {
        copier.copy_stage(args, s, chunk, stage);
        cp_async_mbarrier_arrive_noinc(barriers.full(at.stage));
      }
#pragma unroll
      for (int i = 0; i < HEADS_WARP; ++i)
        if (warp + i * 4 < HEADS_BLOCK)
          make_vectors(args, raw[ahead][i], a[i], bias[i], valid[i] ? s.tokens - chunk * CHUNK - 2 * lane : 0,
                       reinterpret_cast<float2*>(stage + VECTORS_OFFSET) + (warp + i * 4) * (3 * CHUNK / 2) + lane);
      mbarrier_arrive(barriers.full(at.stage));
      at.advance();
      load_dt(raw[ahead]);
    }
  }
}

// Vectors of head h of the block in a stage.
struct Vectors {
  const float* g;
  __device__ __forceinline__ const float* gd() const { return g + CHUNK; }
  __device__ __forceinline__ const float* w() const { return g + 2 * CHUNK; }
};
__device__ __forceinline__ Vectors vectors_of(const unsigned char* stage, int h) {
  return {reinterpret_cast<const float*>(stage + VECTORS_OFFSET) + h * 3 * CHUNK};
}

// D [64 x N] += A (registers) times the [K][N] tile behind the descriptor.
template <int N>
__device__ __forceinline__ void product_registers_by_rows(float (&d)[N / 2], const FragmentA<X>& a, unsigned long long b) {
  const unsigned r[4] = {a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits};
  if constexpr (X_DTYPE == 0) {
    if constexpr (N == 64) wgmma_m64n64k16_bf16_rs<1>(d, r, b, 1);
    if constexpr (N == 128) wgmma_m64n128k16_bf16_rs<1>(d, r, b, 1);
    if constexpr (N == 256) wgmma_m64n256k16_bf16_rs<1>(d, r, b, 1);
  } else {
    if constexpr (N == 64) wgmma_m64n64k16_f16_rs<1>(d, r, b, 1);
    if constexpr (N == 128) wgmma_m64n128k16_f16_rs<1>(d, r, b, 1);
    if constexpr (N == 256) wgmma_m64n256k16_f16_rs<1>(d, r, b, 1);
  }
}

// (w x)^T of one head's x box as operand A: 64 headdim rows, 16 a warp; K = the chunk's 64 tokens.
__device__ __forceinline__ void load_weighted_x(FragmentA<X> (&a)[4], const unsigned char* x_box, const float* w) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const unsigned base = smem_address(x_box);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned r[4];
    ldmatrix_x4_trans_at(r, base + swizzled(k * 16 + lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2));
    const float2 even = *reinterpret_cast<const float2*>(w + k * 16 + lane % 4 * 2);
    const float2 odd = *reinterpret_cast<const float2*>(w + k * 16 + 8 + lane % 4 * 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[k].pair[i] = {r[i]};
      if constexpr (X_DTYPE == 0) {
        const float2 hl = i < 2 ? even : odd;
        a[k].pair[i] = {fma_bf16x2(r[i], __float_as_uint(hl.x), mul_bf16x2(r[i], __float_as_uint(hl.y)))};
      }
    }
    if constexpr (X_DTYPE != 0) scale_along_k(a[k], even, odd);
  }
}

// Starts H += (w x)^T B, H already scaled by exp2(G_last). The caller commits and waits.
__device__ __forceinline__ void start_state_update(float (&state)[STATE_REGISTERS], const FragmentA<X> (&a)[4], const unsigned char* b_boxes) {
  const WgmmaDescriptor b(smem_address(b_boxes), BOX_BYTES);
#pragma unroll
  for (int k = 0; k < 4; ++k) product_registers_by_rows<DSTATE_PADDED>(state, a[k], b.at(k * 16 * 128));
}

// headdim and dstate of accumulator element i of this thread.
__device__ __forceinline__ int state_p(int i) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int state_n(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// Where the float32 state of (slot, head) starts in the workspace.
__device__ __forceinline__ float* segment_state(const ForwardArgs& args, int64 slot, int head) {
  return static_cast<float*>(args.states) + (slot * args.nheads + head) * (HEADDIM * STATES_ROW);
}
