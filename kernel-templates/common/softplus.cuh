// The dt pipeline, in the operator's order: bias, softplus (identity above 20), clamp. NaN stays NaN.
#pragma once

#include "common/args.cuh"
#include "common/dtypes.cuh"

__device__ __forceinline__ float softplus(float v) { return v <= 20.f ? log1pf(expf(v)) : v; }

__device__ __forceinline__ float dt_pipeline(float dt, float bias, float dt_min, float dt_max) {
  if (HAS_DT_BIAS) dt += bias;
  if (DT_SOFTPLUS) dt = softplus(dt);
  if (HAS_DT_LIMIT) {
    dt = dt < dt_min ? dt_min : dt;
    return dt > dt_max ? dt_max : dt;
  }
  return dt < 0.f ? 0.f : dt;  // the default limit (0, inf)
}

__device__ __forceinline__ float silu(float v) { return v / (1.f + expf(-v)); }
