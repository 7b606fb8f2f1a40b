// mbarrier objects, by block and shared-memory address.
#pragma once

#include <cstdint>
#include <map>

#include "threads.h"

namespace emulator {

struct MemoryBarrier {
  int arrivals = 0;  // of a phase
  int pending = 0;
  long bytes = 0;  // copies that are expected or, if negative, came early
  unsigned phase = 0;

  void arrive() {
    if (pending <= 0) fault("more arrivals at an mbarrier than it was initialised for");
    --pending;
    ++events;
    complete();
  }
  void complete() {
    if (pending == 0 && bytes == 0) {
      phase ^= 1;
      pending = arrivals;
      ++events;
    }
  }
};

extern std::map<std::uint64_t, MemoryBarrier> memory_barriers;

inline std::uint64_t barrier_key(int block, unsigned address) { return static_cast<std::uint64_t>(block) << 32 | address; }
inline MemoryBarrier& memory_barrier(int block, unsigned address) {
  const auto found = memory_barriers.find(barrier_key(block, address));
  if (found == memory_barriers.end()) fault("an mbarrier that was not initialised");
  return found->second;
}
inline MemoryBarrier& memory_barrier(unsigned address) { return memory_barrier(current().block, address); }

}  // namespace emulator
