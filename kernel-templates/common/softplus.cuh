// The dt pipeline, in the operator's order: bias, softplus (identity above 20), clamp. NaN stays NaN.
#pragma once

#include "common/args.cuh"
#include "common/dtypes.cuh"

__device__ __forceinline__ float softplus(float v) { return v <= 20.f ? log1pf(expf(v)) : v; }

// log(1 + e^v) = max(v, 0) + 2 atanh(s), s = e / (2 + e), e = e^-|v|: no branch, and a third of the instructions of log1pf(expf(v)), where those
// are the longest chain. The polynomial is atanh(s) / s over s^2 <= 1/9 to 5e-9; above 17 the answer is v.
__device__ __forceinline__ float softplus_short(float v) {
  const float e = ex2_approx(-1.4426950408889634f * fabsf(v));
  const float s = e * rcp_approx(2.f + e), q = s * s;
  const float series = 1.f + q * (0.333332081f + q * (0.200107637f + q * (0.140009013f + q * 0.140059991f)));
  return fmaxf(v, 0.f) + 2.f * s * series;
}

template <float (*SOFTPLUS)(float) = softplus>
__device__ __forceinline__ float dt_pipeline(float dt, float bias, float dt_min, float dt_max) {
  if (HAS_DT_BIAS) dt += bias;
  if (DT_SOFTPLUS) dt = SOFTPLUS(dt);
  if (HAS_DT_LIMIT) {
    dt = dt < dt_min ? dt_min : dt;
    return dt > dt_max ? dt_max : dt;
  }
  return dt < 0.f ? 0.f : dt;  // the default limit (0, inf)
}

// The running sum G is made in 64-bit fixed point, 32 bits behind the point: integer sums do not depend on their order, so a parallel
// prefix sum is as good as a serial one. G never rises where A dt <= 0, and tokens with dt = 0 keep exactly the same G however large
// it is. One token counts at most 160 either way: exp2(-160) is 0 in float32 whatever follows, and a small G keeps its digits.
__device__ __forceinline__ long long to_fixed(float log2_decay) {
  return __float2ll_rn(fminf(fmaxf(log2_decay, -160.f), 160.f) * 4294967296.f);
}
__device__ __forceinline__ float from_fixed(long long sum) { return __ll2float_rn(sum) * 2.3283064365386963e-10f; }

// v / (1 + exp(-v)); an exact division is five times as many instructions.
__device__ __forceinline__ float silu(float v) { return v * rcp_approx(1.f + ex2_approx(-1.4426950408889634f * v)); }

// Two of them with one reciprocal, 1 / a = b / (a b): the special function units are what a gate waits for. Below -41 one is as good as zero, which
// keeps a b finite. Neither sees what the other is: not even NaN.
__device__ __forceinline__ float2 silu(float2 v) {
  constexpr float LEAST = -41.f, LOG2_E = 1.4426950408889634f;
  const float a = 1.f + ex2_approx(fminf(-LOG2_E * v.x, -LOG2_E * LEAST)), b = 1.f + ex2_approx(fminf(-LOG2_E * v.y, -LOG2_E * LEAST));
  const float r = rcp_approx(a * b);
  return {max_or_nan(v.x, LEAST) * (b * r), max_or_nan(v.y, LEAST) * (a * r)};
}
