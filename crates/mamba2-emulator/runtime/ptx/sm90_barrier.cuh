#pragma once

#include "memory_barriers.h"
#include "ptx/cp_async.cuh"
#include "ptx/ldmatrix.cuh"

inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
  emulator::MemoryBarrier b;
  b.arrivals = b.pending = static_cast<int>(arrivals);
  emulator::memory_barriers[emulator::barrier_key(emulator::current().block, barrier)] = b;
}
inline void mbarrier_arrive(unsigned barrier) { emulator::memory_barrier(barrier).arrive(); }
inline void cp_async_mbarrier_arrive_noinc(unsigned barrier) { mbarrier_arrive(barrier); }
inline bool mbarrier_try_wait_parity(unsigned barrier, unsigned parity) {
  if (emulator::memory_barrier(barrier).phase != parity) return true;
  emulator::yield();
  return emulator::memory_barrier(barrier).phase != parity;
}
inline bool mbarrier_test_wait_parity(unsigned barrier, unsigned parity) { return emulator::memory_barrier(barrier).phase != parity; }
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
template <int REGISTERS>
inline void setmaxnreg_inc() {}
template <int REGISTERS>
inline void setmaxnreg_dec() {}
inline void bar_sync(int id, int threads) { emulator::named_barrier(id, threads); }

namespace emulator {
template <bool TRANSPOSE>
inline void store_matrices(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (address % 16) fault("an stmatrix row is not aligned");
  struct Lane {
    unsigned address;
    unsigned registers[4];
  } lane{address, {a, b, c, d}};
  warp(lane, [](Lane** lanes) {
    for (int m = 0; m < 4; ++m)
      for (int l = 0; l < 32; ++l)
        for (unsigned e = 0; e < 2; ++e) {
          const unsigned short v = static_cast<unsigned short>(lanes[l]->registers[m] >> 16 * e);
          const unsigned row = static_cast<unsigned>(l / 4), column = static_cast<unsigned>(l % 4 * 2) + e;
          const unsigned to = TRANSPOSE ? lanes[m * 8 + static_cast<int>(column)]->address + row * 2 : lanes[m * 8 + l / 4]->address + column * 2;
          std::memcpy(own_shared() + to, &v, 2);
        }
  });
}
}  // namespace emulator
inline void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) { emulator::store_matrices<false>(address, a, b, c, d); }
inline void stmatrix_x4_trans(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) { emulator::store_matrices<true>(address, a, b, c, d); }
inline void ldmatrix_x4_trans_at(unsigned (&r)[4], unsigned address) { emulator::load_matrices(r, emulator::own_shared() + address, true); }
