// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, if the host allows it
// (crates/mamba2-cuda/src/module.rs). sm_90; before it, launches never overlap and there is nothing to wait for.
#pragma once

// Returns when the kernel before this one is done and what it wrote can be read. A kernel that writes what an earlier one reads or writes
// waits as well, before its last thread ends.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may start once every block has said so or ended.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
