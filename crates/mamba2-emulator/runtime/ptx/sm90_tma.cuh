// A tensor map holds what crates/mamba2-cuda/src/tensor_map.rs tells the driver.
#pragma once

#include "ptx/sm90_barrier.cuh"

struct alignas(64) TensorMap {
  const unsigned char* base;
  long long strides[4];  // bytes, innermost first
  int dims[4];
  int columns;  // of a box, 16-bit elements; its rows are swizzled as a whole
  int rows;
  unsigned char unused[128 - 8 - 32 - 16 - 8];
};
static_assert(sizeof(TensorMap) == 128, "as in the kernels' arguments");

namespace emulator {
// Swizzle by the address itself: rows of 128, 64 or 32 bytes, eight of them repeat.
inline unsigned swizzle(unsigned address, int row_bytes) { return address ^ (address >> 7 & static_cast<unsigned>(row_bytes / 16 - 1)) << 4; }
}  // namespace emulator

inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  emulator::memory_barrier(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
inline void tma_load_4d(unsigned smem, const TensorMap* map, int c0, int c1, int c2, int c3, unsigned barrier) {
  const int row_bytes = map->columns * 2;
  if (smem % static_cast<unsigned>(row_bytes * 8)) emulator::fault("a box does not start where its swizzle repeats");
  const auto inside = [&](int axis, int c) { return c >= 0 && c < map->dims[axis]; };
  for (int r = 0; r < map->rows; ++r)
    for (int e = 0; e < map->columns; ++e) {
      unsigned short v = 0;
      if (inside(0, c0 + e) && inside(1, c1) && inside(2, c2 + r) && inside(3, c3))
        std::memcpy(&v, map->base + (c0 + e) * map->strides[0] + c1 * map->strides[1] + (c2 + r) * map->strides[2] + c3 * map->strides[3], 2);
      std::memcpy(emulator::own_shared() + emulator::swizzle(smem + static_cast<unsigned>(r * row_bytes + e * 2), row_bytes), &v, 2);
    }
  emulator::MemoryBarrier& b = emulator::memory_barrier(barrier);
  b.bytes -= map->rows * row_bytes;
  b.complete();
}
inline void prefetch_tensor_map(const TensorMap*) {}
