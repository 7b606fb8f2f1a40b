// What CUDA C++ has and C++ has not, for kernel templates that run on the CPU.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "threads.h"

using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes)
#define __shared__ static  // one block at a time runs kernels that have static shared memory

struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline float __uint_as_float(unsigned u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline unsigned __float_as_uint(float f) {
  unsigned u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline long long __float2ll_rn(float v) { return std::llrint(v); }
inline float __ll2float_rn(long long v) { return static_cast<float>(v); }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned select) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<unsigned>(bytes >> (8 * (select >> (4 * i) & 7)) & 0xff) << (8 * i);
  return r;
}

#define threadIdx (emulator::current().index)
#define blockIdx (emulator::block_index())
#define gridDim (emulator::grid)

inline void __syncthreads() { emulator::named_barrier(0, emulator::threads_per_block); }
inline void __syncwarp(unsigned = ~0u) {
  emulator::warp<int>(0, [](int**) {});
}

namespace emulator {
template <typename T>
T shuffle(T value, int from) {
  struct Lane {
    T in, out;
    int from;
  } lane{value, value, from};
  warp(lane, [](Lane** lanes) {
    for (int l = 0; l < 32; ++l)
      if (const int from = lanes[l]->from; from >= 0 && from < 32) lanes[l]->out = lanes[from]->in;
  });
  return lane.out;
}
inline int this_lane() { return static_cast<int>(threadIdx.x % 32); }
}  // namespace emulator
template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  return emulator::shuffle(v, from % 32);
}
template <typename T>
T __shfl_up_sync(unsigned, T v, int by) {
  return emulator::shuffle(v, emulator::this_lane() - by);
}
template <typename T>
T __shfl_down_sync(unsigned, T v, int by) {
  return emulator::shuffle(v, emulator::this_lane() + by);
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulator::shuffle(v, emulator::this_lane() ^ mask);
}

// 16-bit floats by their code in the config header: 0 bf16, 1 f16.
namespace emulator {
inline unsigned short to_bf16(float v) {
  const unsigned u = __float_as_uint(v);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<unsigned short>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float from_bf16(unsigned short v) { return __uint_as_float(static_cast<unsigned>(v) << 16); }
inline unsigned short to_f16(float v) {
  const _Float16 h = static_cast<_Float16>(v);
  unsigned short r;
  std::memcpy(&r, &h, 2);
  return r;
}
inline float from_f16(unsigned short v) {
  _Float16 h;
  std::memcpy(&h, &v, 2);
  return static_cast<float>(h);
}
inline float from_16(int code, unsigned short v) { return code == 0 ? from_bf16(v) : from_f16(v); }
}  // namespace emulator
