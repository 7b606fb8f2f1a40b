// Prefetches.
#pragma once

// Calls the line of `p` into L2. Nothing waits for it.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
