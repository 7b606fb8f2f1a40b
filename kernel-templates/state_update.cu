// state_update, for every row, head h, headdim element p, over the row's tokens t:
//   H[p, n] = exp(A dt_t) H[p, n] + dt_t x[t, p] B[t, n]
//   out[t, p] = sum_n H[p, n] C[t, n] + D x[t, p],   then out * silu(z)
// H is state[slot, h], updated in place; slot = state_batch_indices[row] or row; a negative slot (or one past the cache) skips the row.
//
// Grid   rows * nheads * ceil(headdim / BLOCK_HEAD) blocks; blocks loop if that exceeds the grid limit
// Block  WARPS warps; ROW_THREADS threads share a state row, each owns vectors of VECTOR elements, ROW_THREADS * VECTOR apart,
//        so that a warp's loads are contiguous runs of the row
// Source mamba_ssm selective_state_update.py (semantics)
#include "mamba2_config.cuh"

#include "common/args.cuh"
#include "common/dtypes.cuh"
#include "common/require.cuh"
#include "common/softplus.cuh"

using X = Element<X_DTYPE>;
using S = Element<STATE_DTYPE>;

constexpr int ROWS_PER_PASS = THREADS / ROW_THREADS;
constexpr int PASSES = BLOCK_HEAD / ROWS_PER_PASS;
constexpr int VECTOR = 16 / sizeof(S);
constexpr int VECTORS = (DSTATE + ROW_THREADS * VECTOR - 1) / (ROW_THREADS * VECTOR);  // per thread and row
constexpr float LOG2_E = 1.4426950408889634f;

MAMBA2_REQUIRE(U01, 32 % ROW_THREADS == 0, "ROW_THREADS must divide a warp");
MAMBA2_REQUIRE(U02, BLOCK_HEAD % ROWS_PER_PASS == 0, "BLOCK_HEAD must be whole passes");
static_assert(THREADS == 32 * WARPS, "launch.rs gives WARPS warps");
static_assert(SMEM_BYTES == 0, "no shared memory here");

// Elements of a 16-byte vector of state starting at n; past dstate they are zero.
__device__ __forceinline__ void load_state(const S* row, int n, bool aligned, float (&v)[VECTOR]) {
  if (aligned && n + VECTOR <= DSTATE) {
    const uint4 bits = *reinterpret_cast<const uint4*>(row + n);
    const S* e = reinterpret_cast<const S*>(&bits);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = to_float(e[i]);
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v[i] = n + i < DSTATE ? to_float(row[n + i]) : 0.f;
  }
}

__device__ __forceinline__ void store_state(S* row, int n, bool aligned, const float (&v)[VECTOR]) {
  if (aligned && n + VECTOR <= DSTATE) {
    uint4 bits;
    S* e = reinterpret_cast<S*>(&bits);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) from_float(e[i], v[i]);
    *reinterpret_cast<uint4*>(row + n) = bits;
  } else {
#pragma unroll
    for (int i = 0; i < VECTOR; ++i)
      if (n + i < DSTATE) from_float(row[n + i], v[i]);
  }
}

__device__ __forceinline__ void load_inputs(const X* row, int n, float (&v)[VECTOR]) {
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) v[i] = n + i < DSTATE ? to_float(row[n + i]) : 0.f;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) state_update(const __grid_constant__ StepArgs args) {
  constexpr int P_TILES = (HEADDIM + BLOCK_HEAD - 1) / BLOCK_HEAD;
  const int row_in_pass = threadIdx.x / ROW_THREADS, part = threadIdx.x % ROW_THREADS;
  const unsigned row_lanes = (ROW_THREADS == 32 ? 0xffffffffu : (1u << ROW_THREADS) - 1) << (threadIdx.x % 32 / ROW_THREADS * ROW_THREADS);

  for (int64 work = blockIdx.x; work < args.work_items; work += gridDim.x) {
    const int p0 = static_cast<int>(work % P_TILES) * BLOCK_HEAD;
    const int64 row_head = work / P_TILES;
    const int head = static_cast<int>(row_head % args.nheads);
    const int64 row = row_head / args.nheads;
    const int64 slot = HAS_INDICES ? args.state_batch_indices[row * args.indices_stride] : row;
    if (slot < 0 || slot >= args.slots) continue;
    S* state = static_cast<S*>(args.state) + slot * args.state_strides[0] + head * args.state_strides[1];
    const bool aligned = (reinterpret_cast<unsigned long long>(state) | args.state_strides[2] * sizeof(S)) % 16 == 0;
    const float a = args.A[head] * LOG2_E;
    const int64 group = head / HEADS_PER_GROUP;
    const X* b = static_cast<const X*>(args.B) + row * args.b_strides.batch + group * args.b_strides.head;
    const X* c = static_cast<const X*>(args.C) + row * args.c_strides.batch + group * args.c_strides.head;
    const X* x = static_cast<const X*>(args.x) + row * args.x_strides.batch + head * args.x_strides.head;
    const X* z = static_cast<const X*>(args.z) + row * args.z_strides.batch + head * args.z_strides.head;
    X* out = static_cast<X*>(args.out) + row * args.out_strides.batch + head * args.out_strides.head;
    const int64 dt_base = row * args.dt_strides.batch + head * args.dt_strides.head;
    const float bias = HAS_DT_BIAS ? args.dt_bias[head] : 0.f;

#pragma unroll 2
    for (int pass = 0; pass < PASSES; ++pass) {
      const int p = p0 + pass * ROWS_PER_PASS + row_in_pass;
      if (P_TILES * BLOCK_HEAD != HEADDIM && p >= HEADDIM) continue;  // whole groups of ROW_THREADS leave together
      S* state_row = state + p * args.state_strides[2];
      float h[VECTORS][VECTOR];
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) load_state(state_row, (v * ROW_THREADS + part) * VECTOR, aligned, h[v]);

      for (int t = 0; t < args.tokens; ++t) {
        const float dt = dt_pipeline(load_element<DT_DTYPE>(args.dt, dt_base + t * args.dt_strides.token), bias, args.dt_min, args.dt_max);
        const float decay = ex2_approx(a * dt);
        const float xt = to_float(x[t * args.x_strides.token + p]);
        const float gain = dt * xt;
        float sum = 0.f;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
          const int n = (v * ROW_THREADS + part) * VECTOR;
          float bv[VECTOR], cv[VECTOR];
          load_inputs(b + t * args.b_strides.token, n, bv);
          load_inputs(c + t * args.c_strides.token, n, cv);
#pragma unroll
          for (int i = 0; i < VECTOR; ++i) {
            h[v][i] = h[v][i] * decay + gain * bv[i];
            sum += h[v][i] * cv[i];
          }
        }
#pragma unroll
        for (int step = ROW_THREADS / 2; step > 0; step /= 2) sum += __shfl_xor_sync(row_lanes, sum, step, ROW_THREADS);
        if (part == 0) {
          if (D_KIND > 0) sum += args.D[head * args.d_head_stride + (D_KIND == 2 ? p : 0)] * xt;
          if (HAS_Z) sum *= silu(to_float(z[t * args.z_strides.token + p]));
          from_float(out[t * args.out_strides.token + p], sum);
        }
      }
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) store_state(state_row, (v * ROW_THREADS + part) * VECTOR, aligned, h[v]);
    }
  }
}
