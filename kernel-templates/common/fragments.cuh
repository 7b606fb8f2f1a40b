// Register fragments of a 16 x 8 x 16 product, one map for every element type. q = lane % 4, r = lane / 4:
//
//   A [16 x 16]  pair 0: (row r,     k 2q, 2q+1)   pair 1: (row r + 8, k 2q, 2q+1)
//                pair 2: (row r, k 8 + 2q, +1)     pair 3: (row r + 8, k 8 + 2q, +1)
//   B [16 x 8]   pair 0: (column r, k 2q, 2q+1)    pair 1: (column r, k 8 + 2q, +1)
//   D [16 x 8]   0, 1: (row r, columns 2q, 2q+1)   2, 3: (row r + 8, the same columns)
//
// 16-bit pairs are the registers of mma.m16n8k16. For float32 the same ownership feeds two m16n8k8 TF32 products: k is only
// summed over, so slot q takes k = 2q and slot q + 4 takes k = 2q + 1 on both sides.
// An accumulator is thus operand A of the next product (pairs along its columns), or operand B of a transposed one.
#pragma once

#include "common/dtypes.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"

template <typename T>
struct FragmentA {
  Pair<T> pair[4];
};
// Two neighbouring B fragments: columns 0..7 and 8..15.
template <typename T>
struct FragmentB2 {
  Pair<T> pair[2][2];
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int lane_row() { return lane_id() / 4; }
__device__ __forceinline__ int lane_column() { return lane_id() % 4 * 2; }

// ---- loads from shared memory; `ld` is the distance of rows in elements ----

// A from a tile stored [row][k].
template <typename T>
__device__ __forceinline__ FragmentA<T> load_a(const T* tile, int ld) {
  const int lane = lane_id();
  unsigned r[4];
  ldmatrix_x4(r, tile + lane % 16 * ld + lane / 16 * 8);
  return {{{r[0]}, {r[1]}, {r[2]}, {r[3]}}};
}
template <>
__device__ __forceinline__ FragmentA<float> load_a<float>(const float* tile, int ld) {
  const float* p = tile + lane_row() * ld + lane_column();
  FragmentA<float> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = *reinterpret_cast<const float2*>(p + i % 2 * 8 * ld + i / 2 * 8);
    a.pair[i] = {v.x, v.y};
  }
  return a;
}

// A from a tile stored [k][row].
template <typename T>
__device__ __forceinline__ FragmentA<T> load_a_transposed(const T* tile, int ld) {
  const int lane = lane_id();
  unsigned r[4];
  ldmatrix_x4_trans(r, tile + (lane % 8 + lane / 16 * 8) * ld + lane / 8 % 2 * 8);
  return {{{r[0]}, {r[1]}, {r[2]}, {r[3]}}};
}
template <>
__device__ __forceinline__ FragmentA<float> load_a_transposed<float>(const float* tile, int ld) {
  const float* p = tile + lane_column() * ld + lane_row();
  FragmentA<float> a;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* at = p + i / 2 * 8 * ld + i % 2 * 8;
    a.pair[i] = {at[0], at[ld]};
  }
  return a;
}

// B, 16 columns, from a tile stored [column][k].
template <typename T>
__device__ __forceinline__ FragmentB2<T> load_b(const T* tile, int ld) {
  const int lane = lane_id();
  unsigned r[4];
  ldmatrix_x4(r, tile + (lane % 8 + lane / 16 * 8) * ld + lane / 8 % 2 * 8);
  return {{{{r[0]}, {r[1]}}, {{r[2]}, {r[3]}}}};
}
template <>
__device__ __forceinline__ FragmentB2<float> load_b<float>(const float* tile, int ld) {
  const float* p = tile + lane_row() * ld + lane_column();
  FragmentB2<float> b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = *reinterpret_cast<const float2*>(p + i / 2 * 8 * ld + i % 2 * 8);
    b.pair[i / 2][i % 2] = {v.x, v.y};
  }
  return b;
}

// B, 16 columns, from a tile stored [k][column].
template <typename T>
__device__ __forceinline__ FragmentB2<T> load_b_transposed(const T* tile, int ld) {
  const int lane = lane_id();
  unsigned r[4];
  ldmatrix_x4_trans(r, tile + lane % 16 * ld + lane / 16 * 8);
  return {{{{r[0]}, {r[1]}}, {{r[2]}, {r[3]}}}};
}
template <>
__device__ __forceinline__ FragmentB2<float> load_b_transposed<float>(const float* tile, int ld) {
  const float* p = tile + lane_column() * ld + lane_row();
  FragmentB2<float> b;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* at = p + i % 2 * 8 * ld + i / 2 * 8;
    b.pair[i / 2][i % 2] = {at[0], at[ld]};
  }
  return b;
}

// ---- products ----

__device__ __forceinline__ void multiply_add(float (&d)[4], const FragmentA<bf16>& a, const Pair<bf16> (&b)[2]) {
  const unsigned r[4] = {a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits};
  mma_m16n8k16_bf16(d, r, b[0].bits, b[1].bits);
}
__device__ __forceinline__ void multiply_add(float (&d)[4], const FragmentA<f16>& a, const Pair<f16> (&b)[2]) {
  const unsigned r[4] = {a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits};
  mma_m16n8k16_f16(d, r, b[0].bits, b[1].bits);
}

// value = high + low + O(2^-22 value): two TF32 numbers that together keep float32's accuracy.
__device__ __forceinline__ void split_tf32(float v, unsigned& high, unsigned& low) {
  high = cvt_rna_tf32(v);
  low = cvt_rna_tf32(v - __uint_as_float(high));
}

__device__ __forceinline__ void multiply_add(float (&d)[4], const FragmentA<float>& a, const Pair<float> (&b)[2]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const float av[4] = {a.pair[2 * s].x, a.pair[2 * s + 1].x, a.pair[2 * s].y, a.pair[2 * s + 1].y};
    const float bv[2] = {b[s].x, b[s].y};
    unsigned ah[4], al[4], bh[2], bl[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(av[i], ah[i], al[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) split_tf32(bv[i], bh[i], bl[i]);
    if (!USE_TF32) {  // small terms first; low x low is below float32's rounding
      mma_m16n8k8_tf32(d, al, bh[0], bh[1]);
      mma_m16n8k8_tf32(d, ah, bl[0], bl[1]);
    }
    mma_m16n8k8_tf32(d, ah, bh[0], bh[1]);
  }
}

// Scales A along k: `even` holds the factors of k = 2q, 2q+1, `odd` those of k = 8 + 2q, +1; for bf16 x the two high and y the two low
// numbers whose sums are the factors.
template <typename T>
__device__ __forceinline__ void scale_along_k(FragmentA<T>& a, float2 even, float2 odd) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 v = unpack(a.pair[i]);
    const float2 w = i < 2 ? even : odd;
    a.pair[i] = pack<T>(v.x * w.x, v.y * w.y);
  }
}
template <>
__device__ __forceinline__ void scale_along_k<bf16>(FragmentA<bf16>& a, float2 even, float2 odd) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 w = i < 2 ? even : odd;
    const unsigned by_low = fma_bf16x2(a.pair[i].bits, __float_as_uint(w.y), 0x80008000u);  // + -0: a product of its own needs sm_90
    a.pair[i] = {fma_bf16x2(a.pair[i].bits, __float_as_uint(w.x), by_low)};
  }
}
