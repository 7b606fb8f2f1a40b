// What the Hopper strategies share: segments and their work items, the vectors of a chunk, rings, and the decay of C B^T.
//
// A chunk is 64 tokens, so that every product has M = 64. Its vectors, for one head, are [5][64]
//   g     G in log2 units
//   gd    G - log2(dt), so that exp2(G_i - gd_j) = exp2(G_i - G_j) dt_j
//   w     dt exp2(G_last - G) as float32 for f16, as two bf16 numbers high + low for bf16: x * low, then x * high + that, rounds once
//   rise  exp2(G)
//   fall  exp2(G_e - G) dt, e the last of the token's 16: for i past them exp2(G_i - G_j) dt_j = exp2(G_i - G_e) fall_j, both factors small
#pragma once

#include "common/args.cuh"
#include "common/fragments.cuh"
#include "common/require.cuh"
#include "common/softplus.cuh"
#include "ptx/launch.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/special.cuh"
#include "ptx/sm90_barrier.cuh"
#include "ptx/sm90_tma.cuh"
#include "ptx/sm90_wgmma.cuh"

using X = Element<X_DTYPE>;

constexpr int CHUNK = 64;
constexpr int DSTATE_BOXES = (DSTATE + 63) / 64;
constexpr int DSTATE_PADDED = DSTATE_BOXES * 64;
constexpr int BOX_BYTES = 64 * 128;  // 64 rows x 64 elements, 128-byte swizzle
constexpr int VECTORS = 5;
constexpr int VECTORS_BYTES = VECTORS * CHUNK * 4;
constexpr int PRODUCER_THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;

MAMBA2_REQUIRE(P01, X_DTYPE < 2, "16-bit inputs only: wgmma has no float32 product");
MAMBA2_REQUIRE(P04, ALIGNED == 1, "16-byte copies");
static_assert(THREADS == PRODUCER_THREADS + 128 * (WARPGROUPS + SCORE_WARPGROUPS), "launch.rs gives one producer warpgroup");

struct TensorMaps {
  TensorMap x, b, c, z, out;
};

struct Segment {
  int row;        // index along the batch axis
  int first;      // first token
  int tokens;     // of this segment
  int sequence;
  int index;      // of the segment in its sequence
  int64 slot;     // where its state lies in the workspace: segment 1 of a sequence is at the sequence's first slot
  bool last;      // of its sequence
  int group;
  int block;      // of the group
  int first_head;  // of the group
  int end_head;
};

// The group and the block of it of a work item; returns the rest of the item.
__device__ __forceinline__ int locate_group(const ForwardArgs& args, unsigned work, Segment& s) {
  const unsigned item_and_group = args.blocks_per_group.divide(work), item = args.ngroups.divide(item_and_group);
  s.group = static_cast<int>(item_and_group - item * args.ngroups.value);
  s.block = static_cast<int>(work - item_and_group * args.blocks_per_group.value);
  s.first_head = s.group * args.heads_per_group;
  s.end_head = s.first_head + args.heads_per_group;
  return static_cast<int>(item);
}
// Items: the blocks of a group fastest (they share B and C in L2), then groups, segments of a sequence, sequences. Packed
// sequence s owns the segment items from cu_seqlens[s] / segment + s, as many as it has segments or more; an empty sequence has one.
__device__ __forceinline__ Segment locate_segment(const ForwardArgs& args, unsigned work) {
  Segment s;
  const int item = locate_group(args, work, s);
  int tokens;
  int64 first, first_item;
  if (PACKED) {
    int below = 0, above = args.sequences;
    while (above - below > 1) {
      const int middle = (below + above) / 2;
      if ((args.segment ? args.cu_seqlens[middle] / args.segment : 0) + middle <= item) {
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
    first_item = (args.segment ? first / args.segment : 0) + below;
  } else {
    s.sequence = static_cast<int>(args.chunks_per_row.divide(item));
    s.row = s.sequence;
    first = 0;
    tokens = args.seqlen;
    first_item = static_cast<int64>(s.sequence) * args.chunks_per_row.value;
  }
  s.index = static_cast<int>(item - first_item);
  s.slot = (PACKED ? first_item : first_item - s.sequence) + s.index - 1;
  if (args.segment == 0) {
    s.first = static_cast<int>(first);
    s.tokens = s.index == 0 ? tokens : -1;
    s.last = true;
  } else {
    const int64 at = static_cast<int64>(s.index) * args.segment;
    const int64 left = tokens - at;
    s.first = static_cast<int>(first + at);
    s.tokens = left > args.segment ? args.segment : left > 0 ? static_cast<int>(left) : s.index == 0 ? 0 : -1;  // -1: no such segment
    s.last = left <= args.segment;
  }
  return s;
}

// Where the float32 state of (slot, head) starts in the workspace.
__device__ __forceinline__ float* segment_state(const ForwardArgs& args, int64 slot, int head) {
  return static_cast<float*>(args.states) + (slot * args.nheads + head) * STATE_ELEMS;
}

// Whoever starts from a state that earlier kernels made waits for them; all else is there before. The others wait at their end: what comes
// after this kernel comes after those before it as well.
__device__ __forceinline__ void wait_for_states(const Segment& s) {
  if (s.index > 0) griddepcontrol_wait();
}
__device__ __forceinline__ void wait_at_the_end(const Segment& s) {
  if (s.index == 0) griddepcontrol_wait();
}

// ---- states in the workspace ----
//
// A state is float32, headdim and dstate padded to 64, in strips of 16 headdim, those in tiles of 8 dstate, and a tile as a warp's accumulator
// holds it: four elements of lane 0, of lane 1, ... Warps load and store whole lines where a state lies in registers in this order.

// Where lane `lane` has its four elements of a tile of strip `strip`, in float4.
__device__ __forceinline__ int tile_vector(int strip, int tile, int lane) { return (strip * (DSTATE_PADDED / 8) + tile) * 32 + lane; }
// Where an element lies.
__device__ __forceinline__ int element_of_state(int p, int n) {
  return tile_vector(p / 16, n / 8, p % 8 * 4 + n % 8 / 2) * 4 + p / 8 % 2 * 2 + n % 2;
}

// ---- boxes ----

// Byte offset of 16-byte unit `unit` of row `row` in a box of 128-byte rows, and of 64-byte rows.
__device__ __forceinline__ int swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }
__device__ __forceinline__ int swizzled64(int row, int unit) { return row * 64 + ((unit ^ (row >> 1 & 3)) << 4); }

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

// ---- rings ----

__device__ __forceinline__ void wait_barrier(unsigned barrier, unsigned parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// The warp's arrival: what its threads did before is done. One thread arrives for all, because 32 arrivals at one address would take their
// turns; compute-sanitizer's racecheck does not see that __syncwarp orders the others' accesses before it, so for that tool each arrives.
#ifdef MAMBA2_RACECHECK
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif
__device__ __forceinline__ void arrive_warp(unsigned barrier) {
  __syncwarp();
  if (WARP_ARRIVALS == 32 || threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
}

// Slot and parity of a ring of SLOTS, advanced step by step.
template <int SLOTS>
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == SLOTS) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- vectors of a chunk ----

// Raw dt is loaded some chunks before its use, because a chunk is shorter than the latency of device memory, and is kept as it comes:
// converting it at once would wait for it.
using RawDt = Element<DT_DTYPE>;

// The vectors of one head's chunk from this lane's two raw dt; w decays by 2^after more. Returns the chunk's whole G.
__device__ __forceinline__ float make_vectors(const ForwardArgs& args, const RawDt (&raw)[2], float a, float bias, int tokens_left, float after,
                                              float2* to) {
  const int lane = threadIdx.x % 32;
  float dt[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) dt[e] = e < tokens_left ? dt_pipeline<softplus_short>(to_float(raw[e]), bias, args.dt_min, args.dt_max) : 0.f;
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
  const float2 gd = make_float2(g.x - lg2_approx(dt[0]), g.y - lg2_approx(dt[1]));  // dt = 0: +inf, its weight exp2(-inf) = 0
  to[CHUNK / 2] = gd;
  to[3 * CHUNK / 2] = make_float2(ex2_approx(fminf(g.x, 0.f)), ex2_approx(fminf(g.y, 0.f)));
  const float end = __shfl_sync(0xffffffffu, g.y, lane | 7);
  to[4 * CHUNK / 2] = make_float2(ex2_approx(end - gd.x), ex2_approx(end - gd.y));
  const float last = __shfl_sync(0xffffffffu, g.y, 31);
  const float w0 = dt[0] * ex2_approx(fminf(last - g.x, 0.f) + after), w1 = dt[1] * ex2_approx(fminf(last - g.y, 0.f) + after);
  if constexpr (X_DTYPE == 0) {
    const Pair<X> high = pack<X>(w0, w1);
    const float2 kept = unpack(high);
    to[CHUNK] = make_float2(__uint_as_float(high.bits), __uint_as_float(pack<X>(w0 - kept.x, w1 - kept.y).bits));
  } else {
    to[CHUNK] = make_float2(w0, w1);
  }
  return last;
}

struct Vectors {
  const float* g;
  __device__ __forceinline__ const float* gd() const { return g + CHUNK; }
  __device__ __forceinline__ const float* w() const { return g + 2 * CHUNK; }
  __device__ __forceinline__ const float* rise() const { return g + 3 * CHUNK; }
  __device__ __forceinline__ const float* fall() const { return g + 4 * CHUNK; }
};

// ---- products ----

// D (+)= A B, A and B tiles behind descriptors.
template <int TRANSPOSE_A, int TRANSPOSE_B, int COUNT>
__device__ __forceinline__ void multiply_tiles(float (&d)[COUNT], unsigned long long a, unsigned long long b, int accumulate) {
  if constexpr (X_DTYPE == 0) {
    wgmma_bf16_ss<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
  } else {
    wgmma_f16_ss<TRANSPOSE_A, TRANSPOSE_B>(d, a, b, accumulate);
  }
}

// D (+)= A B, A in registers, B a tile: [K][N] with TRANSPOSE_B, else [N][K].
template <int TRANSPOSE_B, int COUNT>
__device__ __forceinline__ void multiply_registers(float (&d)[COUNT], const FragmentA<X>& a, unsigned long long b, int accumulate) {
  const unsigned r[4] = {a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits};
  if constexpr (X_DTYPE == 0) {
    wgmma_bf16_rs<TRANSPOSE_B>(d, r, b, accumulate);
  } else {
    wgmma_f16_rs<TRANSPOSE_B>(d, r, b, accumulate);
  }
}

// The rows of S of a warp whose step DIAGONAL lies on the diagonal; see decay_scores.
template <int DIAGONAL, bool LOADS_FIRST, int COUNT, typename F>
__device__ __forceinline__ void decay_rows(const float (&s)[COUNT], const Vectors& v, int lane, int row, int first, F&& store) {
  constexpr int STEPS = COUNT / 8;
  const float g_row[2] = {v.g[row], v.g[row + 8]};
  float2 of_column[2 * STEPS];
  float end[STEPS];
  const auto load = [&](int k) {
    const float* from = (k < DIAGONAL ? v.fall() : v.gd()) + (first + k) * 16 + lane % 4 * 2;
    of_column[2 * k] = *reinterpret_cast<const float2*>(from);
    of_column[2 * k + 1] = *reinterpret_cast<const float2*>(from + 8);
    end[k] = v.g[(first + k) * 16 + 15];
  };
  if constexpr (LOADS_FIRST) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
      if (k <= DIAGONAL) load(k);
  }
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    FragmentA<X> a{};
    if (k <= DIAGONAL) {
      if constexpr (!LOADS_FIRST) load(k);
      float e[8];  // as s[8 k ..]
      const auto column = [&](int i) { return i % 2 ? of_column[2 * k + i / 4].y : of_column[2 * k + i / 4].x; };
      if (k < DIAGONAL) {
        const float of_row[2] = {ex2_approx(g_row[0] - end[k]), ex2_approx(g_row[1] - end[k])};
#pragma unroll
        for (int i = 0; i < 8; ++i) e[i] = s[8 * k + i] * (of_row[i / 2 % 2] * column(i));
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int below = lane / 4 + i / 2 % 2 * 8 - (i / 4 * 8 + lane % 4 * 2 + i % 2);
          const float decayed = s[8 * k + i] * ex2_approx(g_row[i / 2 % 2] - column(i));
          e[i] = below >= 0 ? decayed : 0.f;
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) a.pair[i] = pack<X>(e[2 * i], e[2 * i + 1]);
    }
    store(k, a);
  }
}

// S = exp2(G_i - G_j) dt_j (C B^T), zero above the diagonal, as operand A, given to store(k, fragment): STEPS steps of 16 tokens j, from step
// `first`. Below the diagonal's 16 x 16 tiles the exponential is a product of one factor a row and one a column. On them the exponent may be
// large and positive above the diagonal: those elements are selected away, not multiplied. Each warp has code of its own, without branches
// between the steps, so that their latencies overlap. LOADS_FIRST hides that of shared memory and takes some twenty more registers.
template <bool LOADS_FIRST, int COUNT, typename F>
__device__ __forceinline__ void decay_scores(const float (&s)[COUNT], const Vectors& v, int thread, int first, F&& store) {
  constexpr int STEPS = COUNT / 8;
  static_assert(STEPS == 4 || STEPS == 2, "all of S, or half of it");
  const int lane = thread % 32, warp = thread / 32 % 4, row = warp * 16 + lane / 4;
  const int diagonal = warp - first;
  if (diagonal == 0) {
    decay_rows<0, LOADS_FIRST>(s, v, lane, row, first, store);
  } else if (diagonal == 1) {
    decay_rows<1, LOADS_FIRST>(s, v, lane, row, first, store);
  } else if (diagonal >= 2 && (STEPS == 2 || diagonal == 2)) {
    decay_rows<2, LOADS_FIRST>(s, v, lane, row, first, store);
  } else {
    decay_rows<STEPS == 2 ? -1 : 3, LOADS_FIRST>(s, v, lane, row, first, store);
  }
}
