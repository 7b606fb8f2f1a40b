// Addresses in the cluster's window carry the block's rank in their highest byte.
#pragma once

#include "ptx/sm90_barrier.cuh"

inline void cluster_arrive() { emulator::cluster_arrive(); }
inline void cluster_wait() { emulator::cluster_wait(); }
inline unsigned map_to_rank(unsigned address, unsigned rank) { return address | rank << 24; }

namespace emulator {
inline unsigned char* in_cluster(unsigned address) { return shared_of(static_cast<int>(address >> 24)) + (address & 0xffffffu); }
}  // namespace emulator

inline void store_async_v4(unsigned address, float4 v, unsigned barrier) {
  if (address >> 24 != barrier >> 24) emulator::fault("st.async counts at a barrier of another block");
  if (address % 16) emulator::fault("st.async of 16 bytes is not aligned");
  std::memcpy(emulator::in_cluster(address), &v, 16);
  emulator::MemoryBarrier& b = emulator::memory_barrier(static_cast<int>(barrier >> 24), barrier & 0xffffffu);
  b.bytes -= 16;
  b.complete();
}
inline bool mbarrier_try_wait_parity_cluster(unsigned barrier, unsigned parity) { return mbarrier_try_wait_parity(barrier, parity); }
