// Special registers.
#pragma once

// threadIdx.x, read anew at every call: what is computed from it is not carried through a loop in registers.
__device__ __forceinline__ int volatile_tid_x() {
  int v;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v));
  return v;
}

// True for one thread of a converged warp, the same one each time. sm_90.
__device__ __forceinline__ bool elect_one() {
  unsigned elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(elected));
  return elected;
}

// Calls f() in one thread of the warp if `wanted` holds in its first lane; for converged warps. The compiler sees that it is one thread: what
// copies take goes to uniform registers at once, where behind any other condition (a bool that was made by elect_one, too) each copy
// becomes a loop over the values that threads may have, of 20 instructions.
template <typename F>
__device__ __forceinline__ void one_thread_if(bool wanted, F&& f) {
  if (__shfl_sync(0xffffffffu, wanted, 0)) {
    if (elect_one()) f();
  }
}
