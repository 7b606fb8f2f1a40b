// wgmma by the canonical layouts of its matrix descriptors (PTX ISA, asynchronous warpgroup matrix instructions). With EMULATOR_LATE
// set, products are made as late as they may be, at the wait for their group: a tile that is overwritten too early, or a result that is
// read too early, gives a wrong answer.
#pragma once

#include <deque>
#include <vector>

#include "ptx/cp_async.cuh"
#include "ptx/sm90_tma.cuh"

namespace emulator {

struct Product {
  float* d;
  int columns;
  int code;  // 0 bf16, 1 f16
  bool registers;
  unsigned a[4];
  unsigned long long a_tile, b_tile;
  bool accumulate, transpose_a, transpose_b;
};

struct Pending {
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
};
inline Pending pending[MAX_THREADS];

// Element (i, k) of a tile, i along M or N.
inline float tile_element(unsigned long long descriptor, bool transposed, int code, int i, int k) {
  const auto field = [&](int at) { return static_cast<unsigned>(descriptor >> at & 0x3fff) << 4; };
  const unsigned start = field(0), leading = field(16), groups = field(32);
  const int layout = static_cast<int>(descriptor >> 62);
  const int row = layout == 1 ? 128 : layout == 2 ? 64 : 32;
  if (layout == 0) fault("a descriptor without swizzle");
  if (!transposed && start % row / 2 + 16 > static_cast<unsigned>(row / 2)) fault("a step along K leaves the swizzled row");
  const unsigned offset = transposed ? static_cast<unsigned>(i % (row / 2) * 2 + k % 8 * row) + i / (row / 2) * leading + k / 8 * groups
                                     : static_cast<unsigned>(i % 8 * row + k * 2) + i / 8 * groups;
  unsigned short v;
  std::memcpy(&v, own_shared() + swizzle(start + offset, row), 2);
  return from_16(code, v);
}

inline void multiply(Product* const (&of)[128]) {
  const Product& p = *of[0];
  for (const Product* q : of)
    if (q->columns != p.columns || q->registers != p.registers || q->b_tile != p.b_tile || q->accumulate != p.accumulate ||
        (!p.registers && q->a_tile != p.a_tile))
      fault("the threads of a warpgroup disagree about a product");
  static float a[64][16], b[16][256];
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < p.columns; ++n) b[k][n] = tile_element(p.b_tile, p.transpose_b, p.code, n, k);
    if (!p.registers)
      for (int m = 0; m < 64; ++m) a[m][k] = tile_element(p.a_tile, p.transpose_a, p.code, m, k);
  }
  for (int t = 0; t < 128; ++t) {
    const int row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
    if (p.registers)
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e) a[row + i % 2 * 8][column + i / 2 * 8 + e] = from_16(p.code, static_cast<unsigned short>(of[t]->a[i] >> 16 * e));
  }
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < p.columns / 2; ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      float& d = of[t]->d[i];
      d = (p.accumulate ? d : 0.f) + sum;
    }
}

inline void start(Product product) {
  if (late) {
    if (!product.accumulate)
      for (int i = 0; i < product.columns / 2; ++i) product.d[i] = __uint_as_float(0x7fc00000u);
    pending[running].open.push_back(product);
    return;
  }
  warpgroup(product, [](Product** of) {
    Product* all[128];
    std::copy(of, of + 128, all);
    multiply(all);
  });
}
inline void commit() {
  if (!late) return;
  Pending& p = pending[running];
  p.groups.push_back(std::move(p.open));
  p.open.clear();
}
inline void wait(int groups) {
  if (!late) return;
  warpgroup(pending[running], [&](Pending** of) {
    while (static_cast<int>(of[0]->groups.size()) > groups) {
      const std::size_t count = of[0]->groups.front().size();
      for (int t = 0; t < 128; ++t)
        if (of[t]->groups.empty() || of[t]->groups.front().size() != count) fault("the threads of a warpgroup wait for different groups");
      for (std::size_t i = 0; i < count; ++i) {
        Product* all[128];
        for (int t = 0; t < 128; ++t) all[t] = &of[t]->groups.front()[i];
        multiply(all);
      }
      for (int t = 0; t < 128; ++t) of[t]->groups.pop_front();
    }
  });
}

}  // namespace emulator

template <int COUNT>
inline void pin(float (&)[COUNT]) {}
inline void wgmma_fence() {}
inline void wgmma_commit_group() { emulator::commit(); }
template <int PENDING>
inline void wgmma_wait_group() {
  emulator::wait(PENDING);
}

template <int SWIZZLE>
struct WgmmaDescriptor {
  unsigned low, high;
  WgmmaDescriptor(unsigned smem_address, unsigned leading_bytes)
      : low((leading_bytes >> 4) << 16 | (smem_address & 0x3ffffu) >> 4), high((SWIZZLE == 128 ? 1u : 2u) << 30 | 8u * SWIZZLE >> 4) {
    if (smem_address % (8 * SWIZZLE)) emulator::fault("a tile does not start where its swizzle repeats");
  }
  unsigned long long at(unsigned offset_bytes) const { return static_cast<unsigned long long>(high) << 32 | (low + (offset_bytes >> 4)); }
};

template <int TRANSPOSE_A, int TRANSPOSE_B, int COUNT>
inline void wgmma_bf16_ss(float (&d)[COUNT], unsigned long long a, unsigned long long b, int accumulate) {
  emulator::start({d, COUNT * 2, 0, false, {}, a, b, accumulate != 0, TRANSPOSE_A != 0, TRANSPOSE_B != 0});
}
template <int TRANSPOSE_A, int TRANSPOSE_B, int COUNT>
inline void wgmma_f16_ss(float (&d)[COUNT], unsigned long long a, unsigned long long b, int accumulate) {
  emulator::start({d, COUNT * 2, 1, false, {}, a, b, accumulate != 0, TRANSPOSE_A != 0, TRANSPOSE_B != 0});
}
template <int TRANSPOSE_B, int COUNT>
inline void wgmma_bf16_rs(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int accumulate) {
  emulator::start({d, COUNT * 2, 0, true, {a[0], a[1], a[2], a[3]}, 0, b, accumulate != 0, false, TRANSPOSE_B != 0});
}
template <int TRANSPOSE_B, int COUNT>
inline void wgmma_f16_rs(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int accumulate) {
  emulator::start({d, COUNT * 2, 1, true, {a[0], a[1], a[2], a[3]}, 0, b, accumulate != 0, false, TRANSPOSE_B != 0});
}
