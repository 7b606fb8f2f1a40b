#pragma once

inline float rcp_approx(float v) { return 1.f / v; }
inline float ex2_approx(float v) {
  const float r = std::exp2(v);
  return std::fabs(r) < 1.17549435e-38f ? 0.f : r;  // flushes denormals
}
inline float max_or_nan(float a, float b) { return a != a ? a : b != b ? b : std::fmax(a, b); }
inline float lg2_approx(float v) { return std::log2(v); }
inline unsigned cvt_rn_bf16x2(float high, float low) { return static_cast<unsigned>(emulator::to_bf16(high)) << 16 | emulator::to_bf16(low); }
inline unsigned cvt_rn_f16x2(float high, float low) { return static_cast<unsigned>(emulator::to_f16(high)) << 16 | emulator::to_f16(low); }
inline float cvt_f32_f16(unsigned short v) { return emulator::from_f16(v); }
inline unsigned cvt_rna_tf32(float v) { return (__float_as_uint(v) + 0x1000u) & 0xffffe000u; }

// The float32 sum is rounded a second time, to bf16: off by at most an ulp where the instruction rounds once.
inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
  const auto half = [](unsigned x, unsigned y, unsigned z) {
    return emulator::to_bf16(std::fma(emulator::from_bf16(static_cast<unsigned short>(x)), emulator::from_bf16(static_cast<unsigned short>(y)),
                                      emulator::from_bf16(static_cast<unsigned short>(z))));
  };
  return static_cast<unsigned>(half(a >> 16, b >> 16, c >> 16)) << 16 | half(a, b, c);
}
inline unsigned mul_bf16x2(unsigned a, unsigned b) { return fma_bf16x2(a, b, 0x80008000u); }
