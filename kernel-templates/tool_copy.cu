// A plain copy, to know how fast memory is: to[i] = from[i], 16 bytes each.
//
// Grid   any number of blocks; they loop
// Block  THREADS threads; each has IN_FLIGHT loads under way before its first store
// Tail   vectors past the end are neither loaded nor stored
#include "mamba2_config.cuh"

#include "common/args.cuh"

constexpr int IN_FLIGHT = 4;

struct CopyArgs {
  const uint4* from;
  uint4* to;
  int64 vectors;
};

extern "C" __global__ void __launch_bounds__(THREADS) tool_copy(const __grid_constant__ CopyArgs args) {
  constexpr int64 PER_BLOCK = THREADS * IN_FLIGHT;
  for (int64 start = blockIdx.x * PER_BLOCK + threadIdx.x; start < args.vectors; start += gridDim.x * PER_BLOCK) {
    uint4 v[IN_FLIGHT];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i)
      if (start + i * THREADS < args.vectors) v[i] = args.from[start + i * THREADS];
#pragma unroll
    for (int i = 0; i < IN_FLIGHT; ++i)
      if (start + i * THREADS < args.vectors) args.to[start + i * THREADS] = v[i];
  }
}
