// wgmma.mma_async: 64 x N x 16 products of a warpgroup, float32 accumulators in registers; N is twice the length of D. sm_90a.
//
//   D  element i of a thread: row 16 (warp % 4) + lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2
//   A  _ss: descriptor of an [M][K] tile (TRANSPOSE_A 0, K contiguous) or a [K][M] tile (TRANSPOSE_A 1, M contiguous);
//      _rs: registers, 16 rows a warp, the map of FragmentA
//   B  descriptor of an [N][K] tile (TRANSPOSE_B 0, K contiguous) or a [K][N] tile (TRANSPOSE_B 1, N contiguous)
//   accumulate 0 overwrites D.
#pragma once

// Keeps the arithmetic that makes `d` before what follows: a fence does not name registers, and the compiler moves multiplications past it.
template <int COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Orders this thread's register and shared-memory accesses before the warpgroup's next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Descriptor of a swizzled tile: rows of SWIZZLE bytes (128 or 64), groups of eight rows follow one another. `leading_bytes`: for tiles
// whose contiguous axis is M or N, the distance of blocks of SWIZZLE bytes along it; not used otherwise. Only the low word holds the
// address, so that stepping through a tile is one addition.
template <int SWIZZLE>
struct WgmmaDescriptor {
  static_assert(SWIZZLE == 128 || SWIZZLE == 64);
  unsigned low, high;
  __device__ __forceinline__ WgmmaDescriptor(unsigned smem_address, unsigned leading_bytes)
      : low((leading_bytes >> 4) << 16 | (smem_address & 0x3ffffu) >> 4), high((SWIZZLE == 128 ? 1u : 2u) << 30 | 8u * SWIZZLE >> 4) {}
  __device__ __forceinline__ unsigned long long at(unsigned offset_bytes) const {
    unsigned long long d;
    asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low + (offset_bytes >> 4)), "r"(high));
    return d;
  }
};

// The accumulators as operands, and their numbers in the text.
#define MAMBA2_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MAMBA2_D16(i) MAMBA2_D4(i), MAMBA2_D4(i + 4), MAMBA2_D4(i + 8), MAMBA2_D4(i + 12)
#define MAMBA2_OPERANDS_16 MAMBA2_D16(0)
#define MAMBA2_OPERANDS_24 MAMBA2_D16(0), MAMBA2_D4(16), MAMBA2_D4(20)
#define MAMBA2_OPERANDS_32 MAMBA2_D16(0), MAMBA2_D16(16)
#define MAMBA2_OPERANDS_40 MAMBA2_OPERANDS_32, MAMBA2_D4(32), MAMBA2_D4(36)
#define MAMBA2_OPERANDS_48 MAMBA2_OPERANDS_32, MAMBA2_D16(32)
#define MAMBA2_OPERANDS_64 MAMBA2_OPERANDS_48, MAMBA2_D16(48)
#define MAMBA2_OPERANDS_128 MAMBA2_OPERANDS_64, MAMBA2_D16(64), MAMBA2_D16(80), MAMBA2_D16(96), MAMBA2_D16(112)
#define MAMBA2_NUMBERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define MAMBA2_NUMBERS_24 MAMBA2_NUMBERS_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MAMBA2_NUMBERS_32 MAMBA2_NUMBERS_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MAMBA2_NUMBERS_40 MAMBA2_NUMBERS_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define MAMBA2_NUMBERS_48 MAMBA2_NUMBERS_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define MAMBA2_NUMBERS_64 MAMBA2_NUMBERS_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MAMBA2_NUMBERS_128                                                                                                           \
  MAMBA2_NUMBERS_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, "    \
                    "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "       \
                    "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, "    \
                    "%123, %124, %125, %126, %127"

// `o0`...: the numbers that follow the accumulators'.
#define MAMBA2_WGMMA_SS(N, COUNT, TYPE, o0, o1, o2, o3, o4)                                                                          \
  template <int TRANSPOSE_A, int TRANSPOSE_B>                                                                                        \
  __device__ __forceinline__ void wgmma_##TYPE##_ss(float (&d)[COUNT], unsigned long long a, unsigned long long b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o2 ", 0;\n"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" MAMBA2_NUMBERS_##COUNT "}, " o0 ", " o1      \
                 ", p, 1, 1, " o3 ", " o4 ";\n}\n"                                                                                   \
                 : MAMBA2_OPERANDS_##COUNT                                                                                           \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(TRANSPOSE_A), "n"(TRANSPOSE_B)                                               \
                 : "memory");                                                                                                        \
  }
#define MAMBA2_WGMMA_RS(N, COUNT, TYPE, o0, o1, o2, o3, o4, o5, o6)                                                                  \
  template <int TRANSPOSE_B>                                                                                                         \
  __device__ __forceinline__ void wgmma_##TYPE##_rs(float (&d)[COUNT], const unsigned (&a)[4], unsigned long long b, int accumulate) { \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " o5 ", 0;\n"                                                                     \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE " {" MAMBA2_NUMBERS_##COUNT "}, {" o0 ", " o1     \
                 ", " o2 ", " o3 "}, " o4 ", p, 1, 1, " o6 ";\n}\n"                                                                  \
                 : MAMBA2_OPERANDS_##COUNT                                                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(TRANSPOSE_B)                             \
                 : "memory");                                                                                                        \
  }
#define MAMBA2_WGMMA(N, COUNT, o0, o1, o2, o3, o4, o5, o6)                                                                           \
  MAMBA2_WGMMA_SS(N, COUNT, bf16, o0, o1, o2, o3, o4)                                                                                \
  MAMBA2_WGMMA_SS(N, COUNT, f16, o0, o1, o2, o3, o4)                                                                                 \
  MAMBA2_WGMMA_RS(N, COUNT, bf16, o0, o1, o2, o3, o4, o5, o6)                                                                        \
  MAMBA2_WGMMA_RS(N, COUNT, f16, o0, o1, o2, o3, o4, o5, o6)

MAMBA2_WGMMA(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22")
MAMBA2_WGMMA(48, 24, "%24", "%25", "%26", "%27", "%28", "%29", "%30")
MAMBA2_WGMMA(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38")
MAMBA2_WGMMA(80, 40, "%40", "%41", "%42", "%43", "%44", "%45", "%46")
MAMBA2_WGMMA(96, 48, "%48", "%49", "%50", "%51", "%52", "%53", "%54")
MAMBA2_WGMMA(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70")
MAMBA2_WGMMA(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134")
