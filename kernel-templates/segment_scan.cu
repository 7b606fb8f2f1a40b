// segment_scan, for every sequence, head and state element, serially over segments s:
//   start[s + 1] = exp2(total[s]) start[s] + local[s],    start[0] = initial_states or zero
// in place: slot s holds local[s] before and start[s + 1] after. The order of a state's elements: common/sm90_chunk.cuh.
//
// Grid   one thread per four elements of a state, THREADS a block, over (sequence, head)
// Source Dao and Gu 2024, section 6 (state passing)
#include "mamba2_config.cuh"

#include "common/args.cuh"
#include "common/dtypes.cuh"
#include "common/require.cuh"
#include "ptx/launch.cuh"

constexpr int TILES = (DSTATE + 63) / 64 * 8;
constexpr int BLOCKS_PER_STATE = (STATE_ELEMS / 4 + THREADS - 1) / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, 1) segment_scan(const __grid_constant__ ForwardArgs args) {
  griddepcontrol_launch_dependents();
  for (unsigned work = blockIdx.x; work < args.work_items; work += gridDim.x) {
    const int at = (static_cast<int>(work % BLOCKS_PER_STATE) * THREADS + threadIdx.x) * 4;
    const unsigned sequence_head = work / BLOCKS_PER_STATE;
    const int head = static_cast<int>(sequence_head % args.nheads);
    const int sequence = static_cast<int>(sequence_head / args.nheads);
    const int strip = at / 128 / TILES;
    if (strip * 16 >= HEADDIM) continue;
    int64 slot;
    int segments;
    if (PACKED) {
      const int first = args.cu_seqlens[sequence];
      const int end = min(args.cu_seqlens[sequence + 1], args.seqlen);
      slot = first / args.segment + sequence;
      segments = (max(end - first, 0) + args.segment - 1) / args.segment;
    } else {
      segments = static_cast<int>(args.chunks_per_row.value);
      slot = static_cast<int64>(sequence) * (segments - 1);
    }
    float4 carry = make_float4(0.f, 0.f, 0.f, 0.f);
    if constexpr (INITIAL_DTYPE >= 0) {
      const int lane = at / 4 % 32, n = at / 128 % TILES * 8 + lane % 4 * 2, p = strip * 16 + lane / 4;
      const int64 from = sequence * args.initial_strides[0] + head * args.initial_strides[1] + p * args.initial_strides[2] + n;
      if (p < HEADDIM && n < DSTATE) carry.x = load_element<INITIAL_DTYPE>(args.initial_states, from);
      if (p < HEADDIM && n + 1 < DSTATE) carry.y = load_element<INITIAL_DTYPE>(args.initial_states, from + 1);
      if (p + 8 < HEADDIM && n < DSTATE) carry.z = load_element<INITIAL_DTYPE>(args.initial_states, from + 8 * args.initial_strides[2]);
      if (p + 8 < HEADDIM && n + 1 < DSTATE) carry.w = load_element<INITIAL_DTYPE>(args.initial_states, from + 8 * args.initial_strides[2] + 1);
    }
    griddepcontrol_wait();
    float4* states = reinterpret_cast<float4*>(static_cast<float*>(args.states) + (slot * args.nheads + head) * STATE_ELEMS + at);
    const float* totals = args.da_cumsum + slot * args.nheads + head;
    const int64 step = static_cast<int64>(args.nheads) * (STATE_ELEMS / 4);
    // In place, so a load cannot pass the store before it: eight segments are loaded before the first is stored.
    constexpr int BATCH = 8;
    for (int s0 = 0; s0 + 1 < segments; s0 += BATCH) {
      float4 local[BATCH];
      float total[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (s0 + i + 1 < segments) {
          local[i] = states[(s0 + i) * step];
          total[i] = totals[static_cast<int64>(s0 + i) * args.nheads];
        }
#pragma unroll
      for (int i = 0; i < BATCH; ++i)
        if (s0 + i + 1 < segments) {
          const float decay = ex2_approx(fminf(total[i], 0.f));
          carry.x = carry.x * decay + local[i].x;
          carry.y = carry.y * decay + local[i].y;
          carry.z = carry.z * decay + local[i].z;
          carry.w = carry.w * decay + local[i].w;
          states[(s0 + i) * step] = carry;
        }
    }
  }
}
