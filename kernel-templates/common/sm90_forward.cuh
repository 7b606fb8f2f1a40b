// The forward pass of one segment, for sm90_fused_forward and sm90_cluster_forward; include after common/sm90_pipeline.cuh's WITH_C = true.
#pragma once

#include "common/sm90_pipeline.cuh"

// Registers for the state update's operand while S x still needs its own, and for C B^T of the next chunk; else one product at a time.
constexpr bool ROOMY = HEADS * STATE_REGISTERS <= 64;

constexpr int H_BYTES = DSTATE_BOXES * BOX_BYTES;

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
    const X* z = static_cast<const X*>(args.z) + s.row * args.z_strides.batch + (s.first + token0) * args.z_strides.token + head * args.z_strides.head;
#pragma unroll
    for (int t = 0; t < 8; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int l = row + i / 2 * 8, p = t * 8 + column + i % 2;
        if (l < valid && p < HEADDIM) y[t * 4 + i] *= silu(to_float(z[l * args.z_strides.token + p]));
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

// The consumer's part: Y of every chunk of the segment, and the state at its end, from the state at its start. The ring is read from `at`.
__device__ __forceinline__ void forward_segment(const ForwardArgs& args, const Segment& s, unsigned char* ring, unsigned char* h_boxes,
                                                const Barriers& barriers, int consumer, RingPosition<STAGES>& at,
                                                float (&state)[HEADS][STATE_REGISTERS]) {
  const int barrier = consumer + 1;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  X* out = static_cast<X*>(args.out) + s.row * args.out_strides.batch + (s.first + warp * 16 + lane / 8) * args.out_strides.token +
           (first_head(s) + consumer * HEADS) * args.out_strides.head + lane % 8 * 8;

  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  RingPosition<STAGES> next = at;
  float scores[32];  // raw C B^T of the chunk, 64 rows x 64 tokens
  // Waits for a chunk and starts its C B^T, which needs no state: it runs under the end of the chunk before. Past the last chunk it
  // repeats that chunk's, unused: ptxas keeps wgmma asynchronous only where every path starts and waits for the same ones.
  const auto start_scores = [&](bool any) {
    if (any) wait_barrier(barriers.full(next.stage), next.parity);
    if constexpr (!USE_TMA) fence_proxy_async();
    unsigned char* stage = ring + (any ? next.stage : at.stage) * STAGE_BYTES;
    wgmma_fence();
    start_product_over_dstate(scores, stage, stage + B_OFFSET);
    wgmma_commit_group();
    next.advance();
  };
  if (ROOMY && chunks > 0) {
    start_scores(true);
    wgmma_wait_group<0>();
  }
  for (int chunk = 0; chunk < chunks; ++chunk, at.advance()) {
    unsigned char* stage = ring + at.stage * STAGE_BYTES;
    FragmentA<X> decayed[HEADS][4];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const Vectors v = vectors_of(stage, consumer * HEADS + h);
      unsigned char* x_box = stage + X_OFFSET + (consumer * HEADS + h) * BOX_BYTES;
      if constexpr (!ROOMY) wait_barrier(barriers.full(at.stage), at.parity);
      store_state_tile(h_boxes, state[h]);
      if constexpr (!ROOMY) scale_state(state[h], v);  // under products that the state's own have not finished before, ptxas adds a wait
      fence_proxy_async();
      bar_sync(barrier, 128);
      if constexpr (!ROOMY) start_scores(true);
      float y[32];
      wgmma_fence();
      start_product_over_dstate(y, stage, h_boxes);
      wgmma_commit_group();

      // Under C H^T: everything that needs no result of it.
      FragmentA<X> weighted_x[4];
      if constexpr (ROOMY) load_weighted_x(weighted_x, x_box, v.w());
      if (ROOMY && h == 0) {
#pragma unroll
        for (int i = 0; i < HEADS; ++i) decay_scores<true>(decayed[i], scores, vectors_of(stage, consumer * HEADS + i), threadIdx.x, 0);
      }
      if constexpr (!ROOMY) {
        wgmma_wait_group<1>();  // C B^T
        decay_scores<false>(decayed[h], scores, v, threadIdx.x, 0);
      }
      const int row = warp * 16 + lane / 4;
      const float rise[2] = {ex2_approx(fminf(v.g[row], 0.f)), ex2_approx(fminf(v.g[row + 8], 0.f))};
      if constexpr (ROOMY) scale_state(state[h], v);
      wgmma_wait_group<0>();  // C H^T
#pragma unroll
      for (int i = 0; i < 32; ++i) y[i] *= rise[i / 2 % 2];

      wgmma_fence();
      const WgmmaDescriptor<128> x(smem_address(x_box), BOX_BYTES);
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply_registers(y, decayed[h][k], x.at(k * 16 * 128));
      wgmma_commit_group();
      if constexpr (ROOMY) {
        start_state_update(state[h], weighted_x, stage + B_OFFSET);
        wgmma_commit_group();
      }
      wgmma_wait_group<ROOMY>();  // S x
      if constexpr (!ROOMY) {
        load_weighted_x(weighted_x, x_box, v.w());
        wgmma_fence();
        start_state_update(state[h], weighted_x, stage + B_OFFSET);
        wgmma_commit_group();
      }
      if (ROOMY && h == HEADS - 1) start_scores(chunk + 1 < chunks);
      store_output(args, s, chunk, first_head(s) + consumer * HEADS + h, y, x_box, out + h * args.out_strides.head, barrier);
      if constexpr (USE_TMA) fence_proxy_async();  // the next copy into the x box comes through another proxy than its last reads and writes
      wgmma_wait_group<0>();  // the state update and C B^T of the next chunk
    }
    out += CHUNK * args.out_strides.token;
    mbarrier_arrive(barriers.empty(at.stage));
  }
}
