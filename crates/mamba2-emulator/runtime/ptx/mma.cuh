// The maps of common/fragments.cuh, from the instruction's documentation. Sums are float32, in the order of k.
#pragma once

namespace emulator {
template <int K, typename A, typename B>
void multiply_warp(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, A&& place_a, B&& place_b) {
  struct Lane {
    float* d;
    const unsigned* a;
    unsigned b[2];
  } lane{d, a, {b0, b1}};
  warp(lane, [&](Lane** lanes) {
    float left[16][K], right[K][8];
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i) place_a(left, l, i, lanes[l]->a[i]);
      for (int i = 0; i < 2; ++i) place_b(right, l, i, lanes[l]->b[i]);
    }
    for (int l = 0; l < 32; ++l)
      for (int i = 0; i < 4; ++i) {
        float sum = 0;
        for (int k = 0; k < K; ++k) sum += left[l / 4 + i / 2 * 8][k] * right[k][l % 4 * 2 + i % 2];
        lanes[l]->d[i] += sum;
      }
  });
}

template <int CODE>
void multiply_warp_16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply_warp<16>(
      d, a, b0, b1,
      [](auto& left, int l, int i, unsigned v) {
        for (int e = 0; e < 2; ++e) left[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8 + e] = from_16(CODE, static_cast<unsigned short>(v >> 16 * e));
      },
      [](auto& right, int l, int i, unsigned v) {
        for (int e = 0; e < 2; ++e) right[l % 4 * 2 + i * 8 + e][l / 4] = from_16(CODE, static_cast<unsigned short>(v >> 16 * e));
      });
}
}  // namespace emulator

inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { emulator::multiply_warp_16<0>(d, a, b0, b1); }
inline void mma_m16n8k16_f16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { emulator::multiply_warp_16<1>(d, a, b0, b1); }
inline void mma_m16n8k8_tf32(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulator::multiply_warp<8>(
      d, a, b0, b1, [](auto& left, int l, int i, unsigned v) { left[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = __uint_as_float(v); },
      [](auto& right, int l, int i, unsigned v) { right[l % 4 + i * 4][l / 4] = __uint_as_float(v); });
}
