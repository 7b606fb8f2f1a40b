// States as accumulators [64 headdim][COUNT * 2 dstate] of a warpgroup, COUNT registers a thread: from and to the workspace and the caller's tensors.
// For the strategies whose left operand is headdim; the transposed ones have their own.
#pragma once

#include "common/sm90_chunk.cuh"

// headdim and dstate of accumulator element i of this thread: two rows, eight apart, and in each a pair of every eight columns.
__device__ __forceinline__ int state_p(int i) { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8; }
__device__ __forceinline__ int state_n(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

// ---- the workspace ----

// This thread's first vector in tile `first`; its warpgroup has four strips from headdim p0 on.
__device__ __forceinline__ int first_vector(int p0, int first) { return tile_vector(p0 / 16 + threadIdx.x / 32 % 4, first, threadIdx.x % 32); }

// Stores this thread's elements of the tiles from `first` on.
template <int COUNT>
__device__ __forceinline__ void store_segment_state(const ForwardArgs& args, int64 slot, int head, int p0, int first, const float (&state)[COUNT]) {
  float4* to = reinterpret_cast<float4*>(segment_state(args, slot, head)) + first_vector(p0, first);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4)
    if (first + i / 4 < DSTATE_PADDED / 8) to[i / 4 * 32] = make_float4(state[i], state[i + 1], state[i + 2], state[i + 3]);
}

// The same elements of the state at the start of a segment that is not the first, where segment_scan has been. A head past the group gets another's
// state, for a Y that is not stored.
template <int COUNT>
__device__ __forceinline__ void load_segment_state(const ForwardArgs& args, const Segment& s, int head, int p0, int first, float (&state)[COUNT]) {
  const float4* from = reinterpret_cast<const float4*>(segment_state(args, s.slot, min(head, s.end_head - 1))) + first_vector(p0, first);
#pragma unroll
  for (int i = 0; i < COUNT; i += 4) {
    const float4 v = first + i / 4 < DSTATE_PADDED / 8 ? from[i / 4 * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
    state[i] = v.x;
    state[i + 1] = v.y;
    state[i + 2] = v.z;
    state[i + 3] = v.w;
  }
}

// Where it has not been: what the segments q before this one add, to the state at the sequence's start,
//   H = exp2(total[q]) H + local[q]
// AT_ONCE of them at once, and of each VECTORS: what there are registers for beside the state. AT_ONCE is one, or as many as there may be.
// meanwhile() completes the state while the first of them are on their way.
template <int AT_ONCE, int VECTORS, int COUNT, typename F>
__device__ __forceinline__ void add_segment_states(const ForwardArgs& args, const Segment& s, int head, int p0, int first, float (&state)[COUNT],
                                                   F&& meanwhile) {
  const int64 slot = s.slot - s.index + 1, step = static_cast<int64>(args.nheads) * (STATE_ELEMS / 4);
  head = min(head, s.end_head - 1);
  const float4* from = reinterpret_cast<const float4*>(segment_state(args, slot, head)) + first_vector(p0, first);
#pragma unroll 1
  for (int q = 0; q < (AT_ONCE == 1 ? s.index : 1); ++q, from += step) {
    float decay[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) decay[j] = j == 0 || j < s.index ? args.da_cumsum[(slot + q + j) * args.nheads + head] : 0.f;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) decay[j] = ex2_approx(fminf(decay[j], 0.f));
#pragma unroll
    for (int i = 0; i < COUNT; i += 4 * VECTORS) {
      float4 part[AT_ONCE][VECTORS];
      const auto there = [&](int v) { return first + i / 4 + v < DSTATE_PADDED / 8; };
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v)
          part[j][v] = (j == 0 || j < s.index) && there(v) ? from[j * step + (i / 4 + v) * 32] : make_float4(0.f, 0.f, 0.f, 0.f);
      if (q == 0 && i == 0) meanwhile();
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          float* h = state + i + 4 * v;
          h[0] = decay[j] * h[0] + part[j][v].x;
          h[1] = decay[j] * h[1] + part[j][v].y;
          h[2] = decay[j] * h[2] + part[j][v].z;
          h[3] = decay[j] * h[3] + part[j][v].w;
        }
      asm volatile("" ::: "memory");  // the next ones are not asked for before: there may be no room for them
    }
  }
}

// ---- the caller's tensors ----
//
// `p0` and `n0` are the first headdim and dstate of the accumulators.

// Whether accumulators of COUNT registers have no column past dstate: they may be fewer than those of 64 columns, to which dstate is padded.
template <int COUNT>
constexpr bool FILLED = DSTATE % 64 == 0 && DSTATE % (2 * COUNT) == 0;

// Calls f(index of the pair in memory, whether its first and its second element are in the tensor, i) for the pairs i, i + 1 of this thread.
template <int COUNT, typename F>
__device__ __forceinline__ void for_each_state(const int64 (&strides)[3], int sequence, int head, int p0, int n0, F&& f) {
  const int64 row_stride = strides[2], first = sequence * strides[0] + head * strides[1] + (p0 + state_p(0)) * row_stride + n0 + state_n(0);
#pragma unroll
  for (int i = 0; i < COUNT; i += 2) {
    const int row = i / 2 % 2 * 8, column = i / 4 * 8;
    const bool inside = (HEADDIM % 64 == 0 || p0 + state_p(0) + row < HEADDIM) && (FILLED<COUNT> || n0 + state_n(0) + column < DSTATE);
    f(first + (row ? 8 * row_stride : 0) + column, inside, inside && (DSTATE % 2 == 0 || n0 + state_n(0) + column + 1 < DSTATE), i);
    if (i % 16 == 14) asm volatile("" ::: "memory");  // not all at once: there are no registers for 16-bit elements beside the others
  }
}

// Whether a float32 state may be read and written 16 bytes at a time.
__device__ __forceinline__ bool in_vectors(const void* state, const int64 (&strides)[3]) {
  return DSTATE % 4 == 0 && reinterpret_cast<unsigned long long>(state) % 16 == 0 && (strides[0] | strides[1] | strides[2]) % 4 == 0;
}
// Calls f(vector in memory, whether it lies in the tensor, i) for the elements i, i + 1, i + 4, i + 5 of this thread's state (one row, neighbouring
// tiles of eight columns), once they are exchanged with the neighbouring lane's: an even lane then has four neighbours of the first tile, an
// odd one of the second. Eight rows of 64 bytes a warp in place of eight of 8.
template <int COUNT, typename T, typename F>
__device__ __forceinline__ void for_each_vector(T* state, const int64 (&strides)[3], int sequence, int head, int p0, int n0, F&& f) {
  const int lane = threadIdx.x % 32, column = n0 + lane % 2 * 8 + lane % 4 / 2 * 4;
  T* first = state + sequence * strides[0] + head * strides[1] + (p0 + state_p(0)) * strides[2] + column;
#pragma unroll
  for (int i = 0; i < COUNT; i += 8)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool inside = (HEADDIM % 64 == 0 || p0 + state_p(0) + 8 * r < HEADDIM) && (FILLED<COUNT> || i * 2 + column < DSTATE);
      f(first + (r ? 8 * strides[2] : 0) + i * 2, inside, i + 2 * r);
    }
}
__device__ __forceinline__ float2 from_neighbour(float x, float y) { return {__shfl_xor_sync(0xffffffffu, x, 1), __shfl_xor_sync(0xffffffffu, y, 1)}; }

// Asks for the state before the first token of a sequence; zero if there is none. Every element is set on one way through, for ptxas spills where
// some ways leave zeros. True if the elements are those that the neighbouring lane has to exchange: later, because that waits for them.
template <int COUNT>
__device__ __forceinline__ bool call_initial_state(const ForwardArgs& args, const Segment& s, int head, int p0, int n0, float (&state)[COUNT]) {
  const bool there = INITIAL_DTYPE >= 0 && head < s.end_head && s.tokens >= 0;
  if constexpr (INITIAL_DTYPE == 2) {
    if (in_vectors(args.initial_states, args.initial_strides)) {
      for_each_vector<COUNT>(static_cast<const float*>(args.initial_states), args.initial_strides, s.sequence, head, p0, n0,
                             [&](const float* at, bool inside, int i) {
        const float4 v = there && inside ? *reinterpret_cast<const float4*>(at) : make_float4(0.f, 0.f, 0.f, 0.f);
        state[i] = v.x;
        state[i + 1] = v.y;
        state[i + 4] = v.z;
        state[i + 5] = v.w;
      });
      return true;
    }
  }
  for_each_state<COUNT>(args.initial_strides, s.sequence, head, p0, n0, [&](int64 at, bool first, bool second, int i) {
    float2 v = make_float2(0.f, 0.f);
    if constexpr (INITIAL_DTYPE >= 0) {
      if (there && first) v.x = load_element<INITIAL_DTYPE>(args.initial_states, at);
      if (there && second) v.y = load_element<INITIAL_DTYPE>(args.initial_states, at + 1);
    }
    state[i] = v.x;
    state[i + 1] = v.y;
  });
  return false;
}
template <int COUNT>
__device__ __forceinline__ void exchange_initial_state(float (&state)[COUNT]) {
  const bool odd = threadIdx.x % 2;
#pragma unroll
  for (int i = 0; i < COUNT; i += 8)
#pragma unroll
    for (int r = i; r < i + 4; r += 2) {
      const float2 low = {state[r], state[r + 1]}, high = {state[r + 4], state[r + 5]};
      const float2 other = from_neighbour(odd ? low.x : high.x, odd ? low.y : high.y);
      const float2 first = odd ? other : low, second = odd ? high : other;
      state[r] = first.x;
      state[r + 1] = first.y;
      state[r + 4] = second.x;
      state[r + 5] = second.y;
    }
}

// Both at once.
template <int COUNT>
__device__ __forceinline__ void load_initial_state(const ForwardArgs& args, const Segment& s, int head, int p0, int n0, float (&state)[COUNT]) {
  if (call_initial_state(args, s, head, p0, n0, state)) exchange_initial_state(state);
}

// The state after the last token of a sequence, if it is wanted.
template <int COUNT>
__device__ __forceinline__ void store_final_state(const ForwardArgs& args, const Segment& s, int head, int p0, int n0, const float (&state)[COUNT]) {
  if constexpr (FINAL_DTYPE >= 0) {
    if (head >= s.end_head) return;
    if (FINAL_DTYPE == 2 && in_vectors(args.final_states, args.final_strides)) {
      const bool odd = threadIdx.x % 2;
      for_each_vector<COUNT>(static_cast<float*>(args.final_states), args.final_strides, s.sequence, head, p0, n0, [&](float* at, bool inside, int i) {
        const float2 first = {state[i], state[i + 1]}, second = {state[i + 4], state[i + 5]};
        const float2 other = from_neighbour(odd ? first.x : second.x, odd ? first.y : second.y);
        const float2 low = odd ? other : first, high = odd ? second : other;
        if (inside) *reinterpret_cast<float4*>(at) = make_float4(low.x, low.y, high.x, high.y);
      });
      return;
    }
    for_each_state<COUNT>(args.final_strides, s.sequence, head, p0, n0, [&](int64 at, bool first, bool second, int i) {
      if (first) store_element<FINAL_DTYPE>(args.final_states, at, state[i]);
      if (second) store_element<FINAL_DTYPE>(args.final_states, at + 1, state[i + 1]);
    });
  }
}
