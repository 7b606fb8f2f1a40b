// Tensor memory accelerator: boxes of a strided tensor to swizzled shared memory, completing on an mbarrier. sm_90.
#pragma once

// A CUtensorMap, made by the host (crates/mamba2-cuda/src/tensor_map.rs). Axes, innermost first:
// x [headdim, nheads, seqlen, batch], B and C [dstate, ngroups, seqlen, batch]; box [64, 1, 64, 1], 128-byte swizzle, zeros outside.
struct alignas(64) TensorMap {
  unsigned char opaque[128];
};

// One arrival that also expects `bytes` of copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void tma_load_4d(unsigned smem, const TensorMap* map, int c0, int c1, int c2, int c3, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(smem),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
}

// Calls a tensor map from device memory, some hundred cycles before the first copy that needs it.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Stores a box to the tensor; what lies outside it is dropped. Completes with the thread's bulk groups.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, int c0, int c1, int c2, int c3, unsigned smem) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map), "r"(c0), "r"(c1), "r"(c2),
               "r"(c3), "r"(smem)
               : "memory");
}
__device__ __forceinline__ void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Returns when at most PENDING of this thread's groups still read shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
