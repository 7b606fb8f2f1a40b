// Special registers.
#pragma once

// threadIdx.x, read anew at every call: what is computed from it is not carried through a loop in registers.
__device__ __forceinline__ int volatile_tid_x() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}
