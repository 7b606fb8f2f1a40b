// The forward pass of one segment, for sm90_fused_forward and sm90_cluster_forward; include after common/sm90_pipeline.cuh's WITH_C = true.
//
// Two chains of work run beside each other: S of the next chunks, which needs no state, and H from chunk to chunk. The score warpgroup
// makes C B^T once for all heads of the block, and each head's S from it, into a ring of tiles; the consumers read them there. So the
// exponentials of S and the products of H hide each other, and neither's registers burden the other.
#pragma once

#include "common/sm90_pipeline.cuh"

constexpr int H_BYTES = DSTATE_BOXES * BOX_BYTES;

// Tiles of S [64 x 64] that wait for each consumer.
constexpr int SCORE_SLOTS = 2;
constexpr int SCORES_BYTES = WARPGROUPS * SCORE_SLOTS * BOX_BYTES;

// A full and an empty barrier per tile of S, behind the ring's.
struct ScoreBarriers {
  unsigned base;
  __device__ __forceinline__ unsigned full(int consumer, int slot) const { return base + (consumer * SCORE_SLOTS + slot) * 16; }
  __device__ __forceinline__ unsigned empty(int consumer, int slot) const { return full(consumer, slot) + 8; }
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < WARPGROUPS * SCORE_SLOTS; ++i) {
        mbarrier_init(full(0, i), 4);  // an arrival a warp
        mbarrier_init(empty(0, i), 4);
      }
      fence_mbarrier_init();
    }
  }
};
constexpr int SCORE_BARRIERS_OFFSET = STAGES * 16;
__device__ __forceinline__ unsigned char* score_tile(unsigned char* tiles, int consumer, int slot) {
  return tiles + (consumer * SCORE_SLOTS + slot) * BOX_BYTES;
}

// D [64 x 64] (+)= the [64][K] boxes at `a` times the [64][K] boxes at `b` transposed, K = dstate.
__device__ __forceinline__ void start_product_over_dstate(float (&d)[32], const unsigned char* a, const unsigned char* b) {
  const WgmmaDescriptor<128> da(smem_address(a), 0), db(smem_address(b), 0);
#pragma unroll
  for (int k = 0; k < DSTATE_PADDED / 16; ++k) {
    const unsigned offset = k / 4 * BOX_BYTES + k % 4 * 32;
    multiply_tiles<0, 0>(d, da.at(offset), db.at(offset), k > 0);
  }
}

// Stores the state, rounded to X_DTYPE, as [headdim][dstate] boxes: operand B of C H^T.
__device__ __forceinline__ void store_state_tile(unsigned char* boxes, const float (&state)[STATE_REGISTERS]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const unsigned base = smem_address(boxes);
  const int row = warp * 16 + lane % 16;  // matrices 0, 1: rows 0..7, 8..15 of unit t; 2, 3: the same of unit t + 1
#pragma unroll
  for (int t = 0; t < DSTATE_PADDED / 8; t += 2) {
    const int unit = t + lane / 16;
    const float* v = state + t * 4;
    stmatrix_x4(base + unit / 8 * BOX_BYTES + swizzled(row, unit % 8), pack<X>(v[0], v[1]).bits, pack<X>(v[2], v[3]).bits,
                pack<X>(v[4], v[5]).bits, pack<X>(v[6], v[7]).bits);
  }
}

__device__ __forceinline__ void scale_state(float (&state)[STATE_REGISTERS], const Vectors& v) {
  const float decay = ex2_approx(fminf(v.g[CHUNK - 1], 0.f));
#pragma unroll
  for (int i = 0; i < STATE_REGISTERS; ++i) state[i] *= decay;
}

// Adds D x, applies the gate, and stores the warp's 16 rows through the head's x box, which nobody reads any more.
// `out`: this thread's 16-byte unit of row 16 warp + lane / 8 of the chunk.
__device__ __forceinline__ void store_output(const ForwardArgs& args, const Segment& s, int chunk, int head, float (&y)[32], unsigned char* x_box, X* out, int barrier) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
  const int token0 = chunk * CHUNK, valid = s.tokens - token0;
  if constexpr (D_KIND > 0) {
    const float* d = args.D + head * args.d_head_stride;
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 x = unpack(*reinterpret_cast<const Pair<X>*>(x_box + swizzled(row + 8 * r, t) + column * 2));
        const int p = t * 8 + column;
        const float d0 = D_KIND == 2 ? (p < HEADDIM ? d[p] : 0.f) : d[0];
        const float d1 = D_KIND == 2 ? (p + 1 < HEADDIM ? d[p + 1] : 0.f) : d0;
        y[t * 4 + 2 * r] += d0 * x.x;
        y[t * 4 + 2 * r + 1] += d1 * x.y;
      }
  }
  if constexpr (HAS_Z) {
    const unsigned char* z_box = x_box + (Z_OFFSET - X_OFFSET);
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 z = unpack(*reinterpret_cast<const Pair<X>*>(z_box + swizzled(row + 8 * r, t) + column * 2));
        y[t * 4 + 2 * r] *= silu(z.x);
        y[t * 4 + 2 * r + 1] *= silu(z.y);
      }
  }
  bar_sync(barrier, 128);  // every warp of the warpgroup is done with the x box
  const unsigned base = smem_address(x_box);
#pragma unroll
  for (int t = 0; t < 8; t += 2) {
    const float* v = y + t * 4;
    stmatrix_x4(base + swizzled(warp * 16 + lane % 16, t + lane / 16), pack<X>(v[0], v[1]).bits, pack<X>(v[2], v[3]).bits,
                pack<X>(v[4], v[5]).bits, pack<X>(v[6], v[7]).bits);
  }
  __syncwarp();
  const int rows_left = head < end_head(s) ? valid - warp * 16 - lane / 8 : 0;
  const unsigned char* from = x_box + (warp * 16 + lane / 8) * 128;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (4 * i < rows_left) {
      const uint4 v = *reinterpret_cast<const uint4*>(from + i * 512 + ((lane % 8 ^ (lane / 8 + i * 4) % 8) << 4));
      if (HEADDIM == 64) {
        *reinterpret_cast<uint4*>(out) = v;
      } else {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (lane % 8 * 8 + j < HEADDIM) out[j] = {static_cast<unsigned short>(words[j / 2] >> 16 * (j % 2))};
      }
    }
    out += 4 * args.out_strides.token;
  }
}

__device__ __forceinline__ void store_final_state(const ForwardArgs& args, const Segment& s, int head, const float (&state)[STATE_REGISTERS]) {
  if constexpr (FINAL_DTYPE >= 0) {
    if (head >= end_head(s)) return;
#pragma unroll
    for (int i = 0; i < STATE_REGISTERS; ++i) {
      const int p = state_p(i), n = state_n(i);
      if (p < HEADDIM && n < DSTATE)
        store_element<FINAL_DTYPE>(args.final_states, s.sequence * args.final_strides[0] + head * args.final_strides[1] + p * args.final_strides[2] + n, state[i]);
    }
  }
}

// The state before the first token of a sequence.
__device__ __forceinline__ void load_initial_state(const ForwardArgs& args, const Segment& s, int head, float (&state)[STATE_REGISTERS]) {
#pragma unroll
  for (int i = 0; i < STATE_REGISTERS; i += 2) {
    const int p = state_p(i), n = state_n(i);
    float2 v = make_float2(0.f, 0.f);
    if constexpr (INITIAL_DTYPE >= 0) {
      if (head < end_head(s) && p < HEADDIM && s.tokens >= 0) {
        const int64 at = s.sequence * args.initial_strides[0] + head * args.initial_strides[1] + p * args.initial_strides[2] + n;
        if (n < DSTATE) v.x = load_element<INITIAL_DTYPE>(args.initial_states, at);
        if (n + 1 < DSTATE) v.y = load_element<INITIAL_DTYPE>(args.initial_states, at + 1);
      }
    }
    state[i] = v.x;
    state[i + 1] = v.y;
  }
}

// The score warpgroup's part: S of every chunk and head of the segment. The ring is read from `at`.
__device__ __forceinline__ void make_scores(const Segment& s, const unsigned char* ring, unsigned char* tiles, const Barriers& barriers,
                                            const ScoreBarriers& score_barriers, RingPosition<STAGES>& at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane % 16;
  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  RingPosition<SCORE_SLOTS> to;
  for (int chunk = 0; chunk < chunks; ++chunk, at.advance()) {
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    wait_barrier(barriers.full(at.stage), at.parity);
    if constexpr (!USE_TMA) fence_proxy_async();
    float scores[32];  // raw C B^T, 64 rows x 64 tokens
    wgmma_fence();
    start_product_over_dstate(scores, stage, stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll 1
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll 1
      for (int consumer = 0; consumer < WARPGROUPS; ++consumer) {
        FragmentA<X> decayed[4];
        decay_scores<WARPGROUPS != 3>(decayed, scores, vectors_of(stage, consumer * HEADS + h), threadIdx.x, 0);
        wait_barrier(score_barriers.empty(consumer, to.stage), to.parity ^ 1);
        const unsigned tile = smem_address(score_tile(tiles, consumer, to.stage));
#pragma unroll
        for (int k = 0; k < 4; ++k)
          stmatrix_x4(tile + swizzled(row, 2 * k + lane / 16), decayed[k].pair[0].bits, decayed[k].pair[1].bits, decayed[k].pair[2].bits, decayed[k].pair[3].bits);
        fence_proxy_async();
        arrive_warp(score_barriers.full(consumer, to.stage));
      }
      to.advance();
    }
    if constexpr (USE_TMA) fence_proxy_async();  // the next copies come through another proxy than these reads
    arrive_warp(barriers.empty(at.stage));
  }
}

// The consumer's part: Y of every chunk of the segment, and the state at its end, from the state at its start. The ring is read from `at`.
__device__ __forceinline__ void forward_segment(const ForwardArgs& args, const Segment& s, unsigned char* ring, unsigned char* h_boxes,
                                                unsigned char* tiles, const Barriers& barriers, const ScoreBarriers& score_barriers,
                                                int consumer, RingPosition<STAGES>& at, float (&state)[HEADS][STATE_REGISTERS]) {
  const int barrier = consumer + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  X* out = static_cast<X*>(args.out) + s.row * args.out_strides.batch + (s.first + warp * 16 + lane / 8) * args.out_strides.token +
           (first_head(s) + consumer * HEADS) * args.out_strides.head + lane % 8 * 8;

  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  RingPosition<SCORE_SLOTS> from;
  for (int chunk = 0; chunk < chunks; ++chunk, at.advance()) {
    unsigned char* stage = ring + at.stage * STAGE_BYTES;
#pragma unroll
    for (int h = 0; h < HEADS; ++h, from.advance()) {
      const Vectors v = vectors_of(stage, consumer * HEADS + h);
      unsigned char* x_box = stage + X_OFFSET + (consumer * HEADS + h) * BOX_BYTES;
      if (h == 0) wait_barrier(barriers.full(at.stage), at.parity);
      store_state_tile(h_boxes, state[h]);
      scale_state(state[h], v);  // under C H^T ptxas would add a wait
      fence_proxy_async();
      bar_sync(barrier, 128);
      float y[32];
      wgmma_fence();
      start_product_over_dstate(y, stage, h_boxes);
      wgmma_commit_group();

      // Under C H^T: everything that needs no result of it.
      FragmentA<X> weighted_x[4];
      load_weighted_x(weighted_x, x_box, v.w());
      const int row = warp * 16 + lane / 4;
      const float rise[2] = {ex2_approx(fminf(v.g[row], 0.f)), ex2_approx(fminf(v.g[row + 8], 0.f))};
      wgmma_wait_group<0>();  // C H^T
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] *= rise[i / 2 % 2];

      wait_barrier(score_barriers.full(consumer, from.stage), from.parity);
      wgmma_fence();
      const WgmmaDescriptor<128> scores(smem_address(score_tile(tiles, consumer, from.stage)), 0), x(smem_address(x_box), BOX_BYTES);
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_tiles<0, 1>(y, scores.at(k * 32), x.at(k * 16 * 128), 1);
      wgmma_commit_group();
      start_state_update(state[h], weighted_x, stage + B_OFFSET);
      wgmma_commit_group();
      wgmma_wait_group<1>();  // S x
      arrive_warp(score_barriers.empty(consumer, from.stage));
      store_output(args, s, chunk, first_head(s) + consumer * HEADS + h, y, x_box, out + h * args.out_strides.head, barrier);
      if constexpr (USE_TMA) fence_proxy_async();  // the next copy into the x box comes through another proxy than its last reads and writes
      wgmma_wait_group<0>();  // the state update
    }
    out += CHUNK * args.out_strides.token;
    arrive_warp(barriers.empty(at.stage));
  }
}
