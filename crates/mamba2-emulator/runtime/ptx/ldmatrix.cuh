#pragma once

#include "ptx/cp_async.cuh"

namespace emulator {
inline void load_matrices(unsigned (&r)[4], const void* row, bool transposed) {
  smem_address(row);
  if (reinterpret_cast<std::uintptr_t>(row) % 16) fault("an ldmatrix row is not aligned");
  struct Lane {
    const unsigned short* row;
    unsigned* registers;
  } lane{static_cast<const unsigned short*>(row), r};
  warp(lane, [&](Lane** lanes) {
    for (int m = 0; m < 4; ++m)
      for (int l = 0; l < 32; ++l) {
        const auto at = [&](int i, int j) -> unsigned { return lanes[m * 8 + (transposed ? j : i)]->row[transposed ? i : j]; };
        lanes[l]->registers[m] = at(l / 4, l % 4 * 2) | at(l / 4, l % 4 * 2 + 1) << 16;
      }
  });
}
}  // namespace emulator

inline void ldmatrix_x4(unsigned (&r)[4], const void* row) { emulator::load_matrices(r, row, false); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) { emulator::load_matrices(r, row, true); }
inline unsigned movmatrix_trans(unsigned v) {
  struct Lane {
    unsigned from, to;
  } lane{v, 0};
  emulator::warp(lane, [](Lane** lanes) {
    const auto at = [&](int i, int j) { return lanes[i * 4 + j / 2]->from >> (j % 2 * 16) & 0xffffu; };
    for (int l = 0; l < 32; ++l) lanes[l]->to = at(l % 4 * 2, l / 4) | at(l % 4 * 2 + 1, l / 4) << 16;
  });
  return lane.to;
}
