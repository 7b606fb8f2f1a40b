// Element types by their code in the config header: 0 bf16, 1 f16, 2 f32. No toolkit headers, so the include set stays closed.
#pragma once

#include "ptx/math.cuh"

struct bf16 {
  unsigned short bits;
};
struct f16 {
  unsigned short bits;
};

template <int CODE>
struct ElementOf;
template <>
struct ElementOf<-1> {  // an absent tensor: code that names its elements must compile, and is never run
  using type = float;
};
template <>
struct ElementOf<0> {
  using type = bf16;
};
template <>
struct ElementOf<1> {
  using type = f16;
};
template <>
struct ElementOf<2> {
  using type = float;
};
template <int CODE>
using Element = typename ElementOf<CODE>::type;

__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }
__device__ __forceinline__ float to_float(f16 v) { return cvt_f32_f16(v.bits); }
__device__ __forceinline__ float to_float(float v) { return v; }

__device__ __forceinline__ void from_float(bf16& to, float v) { to.bits = static_cast<unsigned short>(cvt_rn_bf16x2(0.f, v)); }
__device__ __forceinline__ void from_float(f16& to, float v) { to.bits = static_cast<unsigned short>(cvt_rn_f16x2(0.f, v)); }
__device__ __forceinline__ void from_float(float& to, float v) { to = v; }

// Two neighbouring elements. 16-bit pairs are one register, the first element in the lower half.
template <typename T>
struct Pair {
  unsigned bits;
};
template <>
struct Pair<float> {
  float x, y;
};

__device__ __forceinline__ float2 unpack(Pair<bf16> v) {
  return make_float2(__uint_as_float(v.bits << 16), __uint_as_float(v.bits & 0xffff0000u));
}
__device__ __forceinline__ float2 unpack(Pair<f16> v) {
  return make_float2(cvt_f32_f16(static_cast<unsigned short>(v.bits)), cvt_f32_f16(static_cast<unsigned short>(v.bits >> 16)));
}
__device__ __forceinline__ float2 unpack(Pair<float> v) { return make_float2(v.x, v.y); }

template <typename T>
__device__ __forceinline__ Pair<T> pack(float x, float y);
template <>
__device__ __forceinline__ Pair<bf16> pack<bf16>(float x, float y) {
  return {cvt_rn_bf16x2(y, x)};
}
template <>
__device__ __forceinline__ Pair<f16> pack<f16>(float x, float y) {
  return {cvt_rn_f16x2(y, x)};
}
template <>
__device__ __forceinline__ Pair<float> pack<float>(float x, float y) {
  return {x, y};
}

// Element `offset` of a tensor whose dtype is only known by its code.
template <int CODE>
__device__ __forceinline__ float load_element(const void* base, long long offset) {
  return to_float(static_cast<const Element<CODE>*>(base)[offset]);
}
template <int CODE>
__device__ __forceinline__ void store_element(void* base, long long offset, float v) {
  from_float(static_cast<Element<CODE>*>(base)[offset], v);
}
