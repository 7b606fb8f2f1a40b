// sm90_swap_segment_state, as sm90_segment_state with the state transposed, for any headdim, and dstate up to 512:
//   local[s, h, p, n] = sum_l exp2(G_end - G_l) dt_l x[l, h, p] B[l, n]    the segment's state from a zero start, float32
//   total[s, h]       = G_end                                              its whole decay, log2 units
// Chunks are taken from the last to the first, so that the sum is never scaled.
//
// Grid   one block per (sequence, segment, WARPGROUPS units of a group), not for the last segment of a sequence
// Block  a producer warpgroup and WARPGROUPS consumers of one unit each; see common/sm90_swap_pipeline.cuh
// Source Dao and Gu 2024, section 6 (chunk states), with a segment for the chunk
#include "mamba2_config.cuh"

constexpr bool WITH_C = false;

#include "common/sm90_swap_pipeline.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm90_swap_segment_state(const __grid_constant__ ForwardArgs args,
    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  griddepcontrol_launch_dependents();
  const Barriers barriers{smem_address(smem) + BARRIERS_OFFSET};
  const Segment located = locate_segment(args, blockIdx.x);
  if (located.tokens < 0 || located.last) return;
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  if (threadIdx.x == 0) s = located;
  barriers.init();
  __syncthreads();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce<true>(args, maps, s, smem, barriers);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    float state[DSTATE_BOXES][TILE_REGISTERS];
#pragma unroll
    for (int k = 0; k < DSTATE_BOXES; ++k)
#pragma unroll
      for (int i = 0; i < TILE_REGISTERS; ++i) state[k][i] = 0.f;
    float total = 0.f;
    RingPosition<X_STAGES> x_at;
    RingPosition<STAGES> at;
    const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
    for (int chunk = 0; chunk < chunks; ++chunk, x_at.advance(), at.advance()) {
      wait_barrier(barriers.x_full(x_at.stage), x_at.parity);
      const float* vectors = vectors_at(smem, x_at.stage, consumer);
      unsigned char* x = x_tile(smem, x_at.stage, consumer);
      const unsigned boxes = boxes_at(smem_address(smem), at.stage);
      weigh_x(x, x, vectors + 2 * CHUNK);
      total += vectors[CHUNK - 1];
      fence_proxy_async();
      bar_sync(consumer + 1, 128);  // all of w x is there
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) wait_barrier(barriers.box_full(at.stage, k), at.parity);
      if constexpr (!USE_TMA) fence_proxy_async();
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) start_state_update(state[k], boxes + k * PAIR_BYTES + B_OFFSET, smem_address(x));
      wgmma_commit_group();
      wgmma_wait_group<0>();  // at once: copies take longer than products
#pragma unroll
      for (int k = 0; k < DSTATE_BOXES; ++k) arrive_warp(barriers.box_empty(at.stage, k));
      arrive_warp(barriers.x_empty(x_at.stage));
    }
    const Unit unit = locate_unit(s, consumer);
    if (!unit.valid) return;
    float* to = segment_state(args, s.slot + 1, unit.head) + first_element_of_state(unit);
#pragma unroll
    for (int k = 0; k < DSTATE_BOXES; ++k)
#pragma unroll
      for (int i = 0; i < TILE_REGISTERS; ++i) {
        const int p = unit.p0 + state_p(i), n = k * 64 + state_n(i);
        if (p < HEADDIM && n < DSTATE) to[further_element_of_state(k, i)] = state[k][i];
      }
    if (threadIdx.x % 128 == 0 && unit.p0 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + unit.head] = total;
  }
}
