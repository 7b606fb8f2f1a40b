// sm90_split_segment_state, as sm90_segment_state for any headdim, and dstate up to 512:
//   local[s, h, p, n] = sum_l exp2(G_end - G_l) dt_l x[l, h, p] B[l, n]    the segment's state from a zero start, float32
//   total[s, h]       = G_end                                              its whole decay, log2 units
// Chunks are taken from the last to the first, so that the sum is never scaled.
//
// Grid   one block per (sequence, segment, WARPGROUPS units of a group, slice of dstate), not for the last segment of a sequence
// Block  a producer warpgroup and WARPGROUPS consumers of one unit each; see common/sm90_split_pipeline.cuh
// Shared barriers, then the ring, then vectors
// Source Dao and Gu 2024, section 6 (chunk states), with a segment for the chunk
#include "mamba2_config.cuh"

constexpr bool WITH_C = false;

#include "common/sm90_split_pipeline.cuh"

static_assert(BARRIERS_BYTES + STAGES * STAGE_BYTES == VECTORS_OFFSET, "launch.rs carves the same shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, 1) sm90_split_segment_state(const __grid_constant__ ForwardArgs args,
    const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) unsigned char smem[];
  griddepcontrol_launch_dependents();
  call_maps(maps);
  unsigned char* ring = smem + BARRIERS_BYTES;
  const Barriers barriers{smem_address(smem)};
  const Segment located = locate_segment(args, blockIdx.x);
  if (located.tokens < 0 || located.last) return;
  Segment& s = *reinterpret_cast<Segment*>(smem + SEGMENT_OFFSET);
  if (threadIdx.x == 0) s = located;
  barriers.init();
  __syncthreads();

  if (threadIdx.x < PRODUCER_THREADS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    Producer<true> producer(args, maps, s, ring, barriers);
    constexpr int DT_AHEAD = 4;  // chunks are short
    RawDt raw[DT_AHEAD][2];
#pragma unroll
    for (int i = 0; i < DT_AHEAD; ++i) producer.load_dt(args, s, ring, i, raw[i]);
    producer.load_constants(args, s, ring);
    const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
    for (int at0 = 0; at0 < chunks; at0 += DT_AHEAD) {
#pragma unroll
      for (int ahead = 0; ahead < DT_AHEAD; ++ahead) {
        if (at0 + ahead >= chunks) break;
        producer.provide(maps, s, ring, barriers, at0 + ahead);
        producer.make(args, s, ring, barriers, at0 + ahead, raw[ahead]);
        producer.load_dt(args, s, ring, at0 + ahead + DT_AHEAD, raw[ahead]);
      }
    }
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    const int consumer = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - 1;  // known to be uniform
    float state[PIECES][PIECE_REGISTERS];
    float total = 0.f;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
      for (int i = 0; i < PIECE_REGISTERS; ++i) state[piece][i] = 0.f;
    RingPosition<STAGES> at;
    const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
    for (int chunk = 0; chunk < chunks; ++chunk, at.advance()) {
      wait_barrier(barriers.vectors_full(chunk), parity_of_vectors(chunk));
      wait_barrier(barriers.full(at.stage), at.parity);
      const unsigned char* stage = ring + at.stage * STAGE_BYTES;
      const Vectors v{vectors_at(ring, chunk, consumer % VECTOR_SETS)};
      FragmentA<X> a[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) a[k] = load_transposed(stage + X_OFFSET + consumer * BOX_BYTES, k);
      weigh(a, v.w());
      total += v.g[CHUNK - 1];
      arrive_warp(barriers.vectors_empty(chunk));
      wgmma_fence();
      start_state_update(state, a, stage + B_OFFSET);
      wgmma_commit_group();
      wgmma_wait_group<0>();  // at once: copies take longer than products, and a stage that waits for the next chunk is missing to them
      arrive_warp(barriers.empty(at.stage));
    }
    const Unit unit = locate_unit(s, consumer);
    if (!unit.valid) return;
    const int n0 = slice_of(s) * SLICE_BOXES * 64;
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) store_segment_state(args, s.slot + 1, unit.head, unit.p0, n0 / 8 + piece * PIECE_BOXES * 8, state[piece]);
    if (threadIdx.x % 128 == 0 && unit.p0 == 0 && n0 == 0) args.da_cumsum[(s.slot + 1) * args.nheads + unit.head] = total;
  }
}
