// Flags in device memory between blocks that run at once. sm_70.
#pragma once

// What was stored before by this thread, and by threads it has met at a barrier, is seen by who acquires the flag.
__device__ __forceinline__ void store_release_grid(unsigned long long* flag, unsigned long long v) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(v) : "memory");
}
__device__ __forceinline__ unsigned long long load_acquire_grid(const unsigned long long* flag) {
  unsigned long long v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(flag) : "memory");
  return v;
}
// Without order. Returns what was there before.
__device__ __forceinline__ unsigned long long add_grid(unsigned long long* flag, unsigned long long v) {
  unsigned long long before;
  asm volatile("atom.add.relaxed.gpu.global.u64 %0, [%1], %2;" : "=l"(before) : "l"(flag), "l"(v) : "memory");
  return before;
}
__device__ __forceinline__ void store_relaxed_grid(unsigned long long* flag, unsigned long long v) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(v) : "memory");
}
