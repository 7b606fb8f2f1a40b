// Blocks of one cluster: barriers across it and access to each other's shared memory. sm_90.
#pragma once

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

// Stores without waiting, and counts its 16 bytes at a barrier of the same block as `address`: who waits there sees them.
__device__ __forceinline__ void store_async_v4(unsigned address, float4 v, unsigned barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address), "f"(v.x), "f"(v.y),
               "f"(v.z), "f"(v.w), "r"(barrier)
               : "memory");
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
