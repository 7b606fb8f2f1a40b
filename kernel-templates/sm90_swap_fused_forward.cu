// sm90_swap_fused_forward, as sm90_fused_forward with the state transposed, for any headdim, and dstate up to 512. For every segment
// and unit (BLOCK_HEAD elements of one head's headdim), chunk after chunk of 64 tokens, the state H^T in registers:
//   Y[i, p]   = exp2(G_i) sum_n C[i, n] H^T[n, p] + sum_{j <= i} exp2(G_i - G_j) dt_j (C B^T)[i, j] x[j, p] + D x[i, p],  then Y * silu(z)
//   H^T[n, p] = exp2(G_last) H^T[n, p] + sum_l B[l, n] w[l] x[l, p]
// States never touch device memory but at segment boundaries.
//
// Products of a warpgroup (M = 64): C B^T, C H^T (H rounded to X_DTYPE), B^T (w x) from shared memory; S x with S in registers, or with
// SHARE from shared memory, where each of the two warpgroups has put half of it.
//
// Grid   one block per (sequence, segment, WARPGROUPS units of a group)
// Block  a producer warpgroup and WARPGROUPS consumers of one unit each
// Shared as in common/sm90_swap_pipeline.cuh; a consumer's own: w x [tile], then H^T [DSTATE_BOXES tiles of 64 dstate rows]
// Tail   as in common/sm90_swap_pipeline.cuh; rows past the segment are not stored
// Source Dao and Gu 2024, section 6, all steps in one pass
#include "mamba2_config.cuh"

constexpr bool WITH_C = true;

#include "common/sm90_swap_pipeline.cuh"

// Stores a 64 x BLOCK_HEAD accumulator, rounded to X_DTYPE, as a tile; a warp its own 16 rows.
__device__ __forceinline__ void store_tile(unsigned tile, const float (&v)[TILE_REGISTERS]) {
  const int thread = thread_index(), lane = thread % 32, row = thread / 32 % 4 * 16 + lane % 16;  // matrices 0, 1: rows 0..7, 8..15 of unit t; 2, 3: of t + 1
#pragma unroll
  for (int t = 0; t < BLOCK_HEAD / 8; t += 2) {
    const float* e = v + t * 4;
    stmatrix_x4(tile + t / 4 * SUBTILE_BYTES + swizzled64(row, t % 4 + lane / 16), pack<X>(e[0], e[1]).bits, pack<X>(e[2], e[3]).bits,
                pack<X>(e[4], e[5]).bits, pack<X>(e[6], e[7]).bits);
  }
}

constexpr int BLOCK_BARRIER = WARPGROUPS + 1;  // of all consumers
constexpr int SCORE_STEPS = SHARE ? 2 : 4;  // 16-token columns of S that a warpgroup makes

// D [64 tokens x 16 SCORE_STEPS tokens] (+)= C box times rows of the B box transposed.
__device__ __forceinline__ void start_scores(float (&d)[8 * SCORE_STEPS], unsigned c_box, unsigned b_rows, bool first) {
  const WgmmaDescriptor<128> c(c_box, 0), b(b_rows, 0);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_tiles<0, 0>(d, c.at(k * 32), b.at(k * 32), !first || k > 0);
}

// This warpgroup's columns of S, from step `first`, to the block's tile.
__device__ __forceinline__ void store_scores(unsigned tile, const FragmentA<X> (&a)[SCORE_STEPS], int first) {
  const int thread = thread_index(), lane = thread % 32, row = thread / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int k = 0; k < SCORE_STEPS; ++k)
    stmatrix_x4(tile + swizzled(row, 2 * (first + k) + lane / 16), a[k].pair[0].bits, a[k].pair[1].bits, a[k].pair[2].bits, a[k].pair[3].bits);
}

// Y [64 tokens x BLOCK_HEAD] (+)= C box times the state's tile.
__device__ __forceinline__ void start_state_product(float (&y)[TILE_REGISTERS], unsigned c_box, unsigned h_tile, bool first) {
  const WgmmaDescriptor<128> c(c_box, 0);
  const WgmmaDescriptor<64> h(h_tile, SUBTILE_BYTES);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_tiles<0, 1>(y, c.at(k * 32), h.at(k * 1024), !first || k > 0);
}

// Adds D x, applies the gate, and stores the warp's 16 rows through the x tile, which nobody else reads any more.
__device__ __forceinline__ void store_output(const ForwardArgs& args, const Segment& s, const Unit& unit, int chunk, float (&y)[TILE_REGISTERS],
                                             unsigned char* x) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const int row = warp * 16 + lane / 4, column = lane % 4 * 2;
  const int token0 = chunk * CHUNK, valid = unit.valid ? s.tokens - token0 : 0;
  if constexpr (D_KIND > 0) {
    const float* d = args.D + unit.head * args.d_head_stride + (D_KIND == 2 ? unit.p0 : 0);
    const float head_d = D_KIND == 1 && unit.valid ? *d : 0.f;
#pragma unroll
    for (int t = 0; t < BLOCK_HEAD / 8; ++t) {
      const int p = t * 8 + column;
      float d0 = head_d, d1 = head_d;
      if constexpr (D_KIND == 2) {
        d0 = unit.valid && unit.p0 + p < HEADDIM ? d[p] : 0.f;
        d1 = unit.valid && unit.p0 + p + 1 < HEADDIM ? d[p + 1] : 0.f;
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float2 v = unpack(*reinterpret_cast<const Pair<X>*>(x + t / 4 * SUBTILE_BYTES + swizzled64(row + 8 * r, t % 4) + column * 2));
        y[t * 4 + 2 * r] += d0 * v.x;
        y[t * 4 + 2 * r + 1] += d1 * v.y;
      }
    }
  }
  if constexpr (HAS_Z) {
    const X* z = static_cast<const X*>(args.z) + s.row * args.z_strides.batch + (s.first + token0) * args.z_strides.token +
                 unit.head * args.z_strides.head + unit.p0;
#pragma unroll
    for (int t = 0; t < BLOCK_HEAD / 8; ++t)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int l = row + r * 8, p = t * 8 + column;
        if (l < valid && unit.p0 + p < HEADDIM) {
          const X* at = z + l * args.z_strides.token + p;
          const bool both = HEADDIM % 2 == 0 || unit.p0 + p + 1 < HEADDIM;
          const float2 gate = silu(both ? unpack(*reinterpret_cast<const Pair<X>*>(at)) : make_float2(to_float(*at), 0.f));
          y[t * 4 + 2 * r] *= gate.x;
          y[t * 4 + 2 * r + 1] *= gate.y;
        }
      }
  }
  store_tile(smem_address(x), y);
  __syncwarp();
  constexpr int UNITS_ROW = BLOCK_HEAD / 8;
  X* out = static_cast<X*>(args.out) + s.row * args.out_strides.batch + (s.first + token0 + warp * 16) * args.out_strides.token +
           unit.head * args.out_strides.head + unit.p0;
#pragma unroll
  for (int i = 0; i < BLOCK_HEAD / 16; ++i) {
    const int at = i * 32 + lane, r = at / UNITS_ROW, u = at % UNITS_ROW;
    const int columns = HEADDIM - unit.p0 - u * 8;
    if (warp * 16 + r < valid && columns > 0) {
      const uint4 v = *reinterpret_cast<const uint4*>(x + u / 4 * SUBTILE_BYTES + swizzled64(warp * 16 + r, u % 4));
      X* to = out + r * args.out_strides.token + u * 8;
      if (HEADDIM % 8 == 0 || columns >= 8) {
        *reinterpret_cast<uint4*>(to) = v;
      } else {
        const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int j = 0; j < 8; ++j)
          if (j < columns) to[j] = {static_cast<unsigned short>(words[j / 2] >> 16 * (j % 2))};
      }
    }
  }
}

// Calls f(headdim element, dstate element, whether they lie in the tensors, further_element_of_state, state element) for this thread's state, one headdim row after
// the other, so that few addresses are alive at a time.
template <typename F>
__device__ __forceinline__ void for_each_state(const Unit& unit, float (&state)[DSTATE_BOXES][TILE_REGISTERS], F&& f) {
#pragma unroll
  for (int t = 0; t < BLOCK_HEAD / 8; ++t)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int p = unit.p0 + state_p(t * 4 + e);
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int i = t * 4 + r * 2 + e, n = k * 64 + state_n(i);
          f(p, n, (HEADDIM % BLOCK_HEAD == 0 || p < HEADDIM) && (DSTATE % 64 == 0 || n < DSTATE), further_element_of_state(k, i), state[k][i]);
        }
    }
}

// What is not there (a unit past the group, elements past the tensor, the state before a sequence without an initial one) reads something
// else and drops it: branches here cost the products their registers.
__device__ __forceinline__ void load_start_state(const ForwardArgs& args, const Segment& s, const Unit& unit, float (&state)[DSTATE_BOXES][TILE_REGISTERS]) {
  if (INITIAL_DTYPE >= 0 && s.index == 0) {
    const int64 at = unit.valid ? s.sequence * args.initial_strides[0] + unit.head * args.initial_strides[1] : 0;
    for_each_state(unit, state, [&](int p, int n, bool inside, int, float& v) {
      const float loaded = load_element<INITIAL_DTYPE>(args.initial_states, at + (inside ? p * args.initial_strides[2] + n : 0));
      v = inside && unit.valid ? loaded : 0.f;
    });
  } else {
    const bool any = unit.valid && s.index > 0;
    const float* from = any ? segment_state(args, s.slot, unit.head) + first_element_of_state(unit) : args.A;
    for_each_state(unit, state, [&](int, int, bool inside, int further, float& v) {
      const float loaded = from[inside && any ? further : 0];
      v = inside && any ? loaded : 0.f;
    });
  }
}

__device__ __forceinline__ void store_final_state(const ForwardArgs& args, const Segment& s, const Unit& unit, float (&state)[DSTATE_BOXES][TILE_REGISTERS]) {
  if constexpr (FINAL_DTYPE >= 0) {
    if (!unit.valid) return;
    const int64 at = s.sequence * args.final_strides[0] + unit.head * args.final_strides[1];
    for_each_state(unit, state, [&](int p, int n, bool inside, int, float& v) {
      if (inside) store_element<FINAL_DTYPE>(args.final_states, at + p * args.final_strides[2] + n, v);
    });
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm90_swap_fused_forward(const __grid_constant__ ForwardArgs args,
    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const Barriers barriers{smem_address(smem) + BARRIERS_OFFSET};
  const Segment located = locate_segment(args, blockIdx.x);
  if (located.tokens < 0) return;
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  if (threadIdx.x == 0) s = located;
  barriers.init();
  __syncthreads();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce<false>(args, maps, s, smem, barriers);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    const int barrier = consumer + 1;
    const int first_step = SHARE ? consumer * SCORE_STEPS : 0;
    const Unit unit = locate_unit(s, consumer);
    unsigned char* weighted_x = smem + OWN_OFFSET + consumer * OWN_BYTES;
    const unsigned weighted = smem_address(weighted_x), h_tiles = weighted + TILE_BYTES;
    float state[DSTATE_BOXES][TILE_REGISTERS];
    wait_for_states(s);
    load_start_state(args, s, unit, state);

    RingPosition<X_STAGES> x_at;
    RingPosition<STAGES> at;
    const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
    for (int chunk = 0; chunk < chunks; ++chunk, x_at.advance(), at.advance()) {
      wait_barrier(barriers.x_full(x_at.stage), x_at.parity);
      const Vectors v{vectors_at(smem, x_at.stage, consumer)};
      unsigned char* x = x_tile(smem, x_at.stage, consumer);
      const unsigned boxes = boxes_at(smem_address(smem), at.stage);
      const float decay = ex2_approx(fminf(v.g[CHUNK - 1], 0.f));
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) store_tile(h_tiles + k * TILE_BYTES, state[k]);
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k)
#pragma unroll
        for (int i = 0; i < TILE_REGISTERS; ++i) state[k][i] *= decay;
      weigh_x(weighted_x, x, v.w());
      fence_proxy_async();
      bar_sync(barrier, 128);  // H and w x are there

      float scores[8 * SCORE_STEPS], y[TILE_REGISTERS];
      const auto wait_box = [&](int k) {
        wait_barrier(barriers.box_full(at.stage, k), at.parity);
        if constexpr (!USE_TMA) fence_proxy_async();
      };
      // Many boxes come one by one; two have come by now, and a wait between products costs a fence.
      if constexpr (DSTATE_BOXES <= 2) {
#pragma unroll
        for (int k = 0; k < DSTATE_BOXES; ++k) wait_box(k);
        wgmma_fence();
      }
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) {
        if constexpr (DSTATE_BOXES > 2) {
          wait_box(k);
          wgmma_fence();
        }
        start_scores(scores, boxes + k * PAIR_BYTES, boxes + k * PAIR_BYTES + B_OFFSET + first_step * 16 * 128, k == 0);
      }
      wgmma_commit_group();
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k)
        start_state_product(y, boxes + k * PAIR_BYTES, h_tiles + k * TILE_BYTES, k == 0);
      wgmma_commit_group();

      // Under the products: everything that needs no result of them.
      const int thread = thread_index(), row = thread / 32 % 4 * 16 + thread % 32 / 4;
      const float rise[2] = {ex2_approx(fminf(v.g[row], 0.f)), ex2_approx(fminf(v.g[row + 8], 0.f))};
      wgmma_wait_group<1>();  // C B^T
      FragmentA<X> decayed[SCORE_STEPS];
      decay_scores<!TIGHT>(scores, v, thread_index(), first_step, [&](int k, const FragmentA<X>& a) { decayed[k] = a; });
      if constexpr (SHARE) {
        store_scores(smem_address(smem) + SCORES_OFFSET, decayed, first_step);
        fence_proxy_async();
        bar_sync(BLOCK_BARRIER, 128 * WARPGROUPS);  // all of S is there
      }
      wgmma_wait_group<0>();  // C H^T
#pragma unroll
      for (int i = 0; i < TILE_REGISTERS; ++i) y[i] *= rise[i / 2 % 2];

      pin(y);
      wgmma_fence();
      const WgmmaDescriptor<64> x_rows(smem_address(x), SUBTILE_BYTES);
      if constexpr (SHARE) {
        const WgmmaDescriptor<128> all(smem_address(smem) + SCORES_OFFSET, 0);
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_tiles<0, 1>(y, all.at(k * 32), x_rows.at(k * 1024), 1);
      } else {
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_registers<1>(y, decayed[k], x_rows.at(k * 1024), 1);
      }
      wgmma_commit_group();
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) start_state_update(state[k], boxes + k * PAIR_BYTES + B_OFFSET, weighted);
      wgmma_commit_group();
      wgmma_wait_group<1>();  // S x
      // Every warp of the warpgroup is done with S x: the x tile is the output's. And of the block: S is the next chunk's.
      bar_sync(SHARE ? BLOCK_BARRIER : barrier, SHARE ? 128 * WARPGROUPS : 128);
      store_output(args, s, unit, chunk, y, x);
      fence_proxy_async();  // the next copy into the tile comes through another proxy
      arrive_warp(barriers.x_empty(x_at.stage));
      wgmma_wait_group<0>();  // the state update
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) arrive_warp(barriers.box_empty(at.stage, k));
      bar_sync(barrier, 128);  // every warp's: w x may be overwritten
    }
    if (s.last) store_final_state(args, s, unit, state);
    wait_at_the_end(s);
  }
}
