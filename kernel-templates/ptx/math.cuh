// Scalar instructions.
#pragma once

// 1 / v; relative error below 2^-23, flushes denormals. Any sm.
__device__ __forceinline__ float rcp_approx(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// 2^v; relative error below 2^-22 over the whole range, flushes denormals. Any sm.
__device__ __forceinline__ float ex2_approx(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// The larger one; NaN if one is, where fmaxf gives the other. sm_80.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

// Two floats to one register of bf16: `low` in the lower half. sm_80.
__device__ __forceinline__ unsigned cvt_rn_bf16x2(float high, float low) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// Two floats to one register of f16: `low` in the lower half. sm_80.
__device__ __forceinline__ unsigned cvt_rn_f16x2(float high, float low) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// f16 bits to float.
__device__ __forceinline__ float cvt_f32_f16(unsigned short v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}

// float to TF32 (19 significant bits kept), round to nearest. sm_80.
__device__ __forceinline__ unsigned cvt_rna_tf32(float v) {
  unsigned r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
  return r;
}

// log2(v); absolute error below 2^-22 near 1, -inf at 0.
__device__ __forceinline__ float lg2_approx(float v) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// Two bf16 products (sm_90), and products plus sums (sm_80), rounded once.
__device__ __forceinline__ unsigned mul_bf16x2(unsigned a, unsigned b) {
  unsigned r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
__device__ __forceinline__ unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  unsigned r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
