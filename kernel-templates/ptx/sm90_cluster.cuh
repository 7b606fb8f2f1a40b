// Blocks of one cluster: barriers across it and access to each other's shared memory. sm_90.
#pragma once

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}

// The barrier of all threads of the cluster, in two steps. Whoever waits sees the mbarriers that any thread made before it arrived, for their
// inits are fenced, but no other writes: to release those takes thousands of cycles. A thread that needs nothing of the others does not wait.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Address in the cluster's window of what is at `address` in block `rank`.
__device__ __forceinline__ unsigned map_to_rank(unsigned address, unsigned rank) {
  unsigned r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
  return r;
}

__device__ __forceinline__ float4 load_cluster_v4(unsigned address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ float load_cluster(unsigned address) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_cluster_v4(unsigned address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Stores without waiting, and counts its 16 bytes at a barrier of the same block as `address`: who waits there sees them.
__device__ __forceinline__ void store_async_v4(unsigned address, float4 v, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
}

// Arrives at a barrier of any block of the cluster; what this thread did and saw before is seen by who waits there.
__device__ __forceinline__ void mbarrier_arrive_cluster(unsigned barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool mbarrier_try_wait_parity_cluster(unsigned barrier, unsigned parity) {
  unsigned done;
  asm volatile(
      "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
