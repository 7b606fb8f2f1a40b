// Blocks run one after the other, in the order of their indices.
#pragma once

#include "threads.h"

inline void store_release_grid(unsigned long long* flag, unsigned long long v) {
  *flag = v;
  ++emulator::events;
}
inline unsigned long long load_acquire_grid(const unsigned long long* flag) {
  emulator::yield();
  return *flag;
}
inline unsigned long long add_grid(unsigned long long* flag, unsigned long long v) {
  const unsigned long long before = *flag;
  *flag += v;
  return before;
}
inline void store_relaxed_grid(unsigned long long* flag, unsigned long long v) { *flag = v; }
