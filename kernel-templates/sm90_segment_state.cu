// sm90_segment_state, for every segment but the last of each sequence, and every head:
//   local[s, h, p, n] = sum_l exp2(G_end - G_l) dt_l x[l, h, p] B[l, n]    the segment's state from a zero start, float32
//   total[s, h]       = G_end                                              its whole decay, log2 units
// segment_scan turns them into the state at each segment's start, or, where it is not launched (few segments), sm90_fused_forward adds them up.
// Chunks are taken from the last to the first: what follows a chunk is known then, its decay goes into w, and the sum is never scaled.
//
// Grid   one block per (sequence, segment, HEADS_BLOCK heads)
// Block  a producer warpgroup and WARPGROUPS consumers of HEADS heads each; see common/sm90_pipeline.cuh
// Source Dao and Gu 2024, section 6 (chunk states), with a segment for the chunk
#include "mamba2_config.cuh"

constexpr bool WITH_C = false;
constexpr int HALVES = 1;    // of a segment, a consumer each

#include "common/sm90_pipeline.cuh"

static_assert(BARRIERS_BYTES + STAGES * STAGE_BYTES == SMEM_BYTES, "launch.rs carves the same shared memory");

// The consumer's part: the sum over all chunks, and the whole decay, log2 units.
__device__ __forceinline__ void sum_segment(const Segment& s, const unsigned char* ring, const Barriers& barriers, int consumer,
                                            float (&state)[HEADS][STATE_REGISTERS], float (&total)[HEADS]) {
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    total[h] = 0.f;
#pragma unroll
    for (int i = 0; i < STATE_REGISTERS; ++i) state[h][i] = 0.f;
  }
  RingPosition<STAGES> at;
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    wait_barrier(barriers.full(at.stage), at.parity);
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    FragmentA<X> a[HEADS][4];
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const Vectors v = vectors_of(stage, consumer * HEADS + h);
      load_transposed(a[h], stage + X_OFFSET + (consumer * HEADS + h) * BOX_BYTES);
      weigh(a[h], a[h], v.w());
      total[h] += v.g[CHUNK - 1];
    }
    wgmma_fence();
#pragma unroll
    for (int h = 0; h < HEADS; ++h) start_state_update(state[h], a[h], stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();  // at once: copies take longer than products, and a stage that waits for the next chunk is missing to them
    arrive_warp(barriers.empty(at.stage));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) sm90_segment_state(const __grid_constant__ ForwardArgs args,
    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  griddepcontrol_launch_dependents();
  call_maps(maps);
  unsigned char* ring = smem + BARRIERS_BYTES;
  const Barriers barriers{smem_address(smem)};
  const Segment s = locate_segment(args, blockIdx.x);
  if (s.tokens < 0 || s.last) return;
  one_thread_if(copies(), [&] { barriers.init(); });
  __syncthreads();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    Producer<true>(args, maps, s, ring, barriers).run(false, 0, [](int) {});
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    float state[HEADS][STATE_REGISTERS];
    float total[HEADS];
    sum_segment(s, ring, barriers, consumer, state, total);
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      const int head = first_head(s) + consumer * HEADS + h;
      if (head >= end_head(s)) continue;
      store_segment_state(args, s.slot + 1, head, 0, 0, state[h]);
      if (threadIdx.x % 128 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + head] = total[h];
    }
  }
}
