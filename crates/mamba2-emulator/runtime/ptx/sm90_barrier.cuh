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
inline void fence_mbarrier_init() {}
inline void fence_proxy_async() {}
template <int REGISTERS>
inline void setmaxnreg_inc() {}
template <int REGISTERS>
inline void setmaxnreg_dec() {}
inline void bar_sync(int id, int threads) { emulator::named_barrier(id, threads); }

inline void stmatrix_x4(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  if (address % 16) emulator::fault("an stmatrix row is not aligned");
  struct Lane {
    unsigned address;
    unsigned registers[4];
  } lane{address, {a, b, c, d}};
  emulator::warp(lane, [](Lane** lanes) {
    for (int m = 0; m < 4; ++m)
      for (int l = 0; l < 32; ++l)
        std::memcpy(emulator::own_shared() + lanes[m * 8 + l / 4]->address + l % 4 * 4, &lanes[l]->registers[m], 4);
  });
}
inline void ldmatrix_x4_trans_at(unsigned (&r)[4], unsigned address) { emulator::load_matrices(r, emulator::own_shared() + address, true); }
