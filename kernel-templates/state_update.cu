// state_update, for every row, head h, headdim element p, over the row's tokens t:
//   H[p, n] = exp(A dt_t) H[p, n] + dt_t x[t, p] B[t, n]
//   out[t, p] = sum_n H[p, n] C[t, n] + D x[t, p],   then out * silu(z)
// H is state[slot, h], updated in place; slot = state_batch_indices[row] or row; a negative slot (or one past the cache) skips the row.
//
// Grid   rows * nheads * ceil(headdim / BLOCK_HEAD) blocks; blocks loop if that exceeds the grid limit
// Block  WARPS warps; ROW_THREADS threads share a state row, each owns vectors of VECTOR elements, ROW_THREADS * VECTOR apart,
//        so that a warp's loads are contiguous runs of the row. The block covers ROWS_PER_PASS rows at a time
// Loads  all of a pass are issued before the first is used, and those of the next pass before the present one is stored
// Tail   rows p >= headdim hold zeros and are not stored; so do elements n >= dstate
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
constexpr int P_TILES = (HEADDIM + BLOCK_HEAD - 1) / BLOCK_HEAD;
constexpr bool RAGGED = P_TILES * BLOCK_HEAD != HEADDIM;
constexpr int STATE_BYTES = 16;  // of a vector of state
constexpr int VECTOR = STATE_BYTES / sizeof(S);
constexpr int INPUT_BYTES = VECTOR * sizeof(X);  // of the same elements of B or C: 8, 16 or 32
constexpr int INPUT_ALIGN = INPUT_BYTES < 16 ? INPUT_BYTES : 16;
constexpr int VECTORS = (DSTATE + ROW_THREADS * VECTOR - 1) / (ROW_THREADS * VECTOR);  // per thread and row
// A thread that has more of a row than this would not have registers for the next row beside it; nor, with still more, for whole
// vectors of B and C (dstate 512 in 4 threads spilled on sm_80).
constexpr bool FEW = VECTORS * VECTOR <= 32;
constexpr bool WHOLE_INPUTS = VECTORS * VECTOR <= 64;
constexpr float LOG2_E = 1.4426950408889634f;

MAMBA2_REQUIRE(U01, 32 % ROW_THREADS == 0, "ROW_THREADS must divide a warp");
MAMBA2_REQUIRE(U02, BLOCK_HEAD % ROWS_PER_PASS == 0, "BLOCK_HEAD must be whole passes");
static_assert(THREADS == 32 * WARPS, "launch.rs gives WARPS warps");
static_assert(SMEM_BYTES == 0, "no shared memory here");

// Neighbouring elements as they lie in memory.
template <int BYTES>
struct Raw {
  unsigned word[BYTES / 4];
};

// Elements of a row from n on; past dstate they are zero. ALIGNED: whole vectors may be loaded at once.
template <bool ALIGNED, int BYTES, typename T>
__device__ __forceinline__ Raw<BYTES> load_vector(const T* row, int n) {
  constexpr int N = BYTES / sizeof(T);
  Raw<BYTES> raw;
  if (ALIGNED && n + N <= DSTATE) {
    if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < BYTES / 16; ++i) {
        const uint4 v = reinterpret_cast<const uint4*>(row + n)[i];
        raw.word[4 * i] = v.x;
        raw.word[4 * i + 1] = v.y;
        raw.word[4 * i + 2] = v.z;
        raw.word[4 * i + 3] = v.w;
      }
    } else {
      const uint2 v = *reinterpret_cast<const uint2*>(row + n);
      raw.word[0] = v.x;
      raw.word[1] = v.y;
    }
  } else {
    T* e = reinterpret_cast<T*>(raw.word);
#pragma unroll
    for (int i = 0; i < N; ++i) e[i] = n + i < DSTATE ? row[n + i] : T{};
  }
  return raw;
}

template <typename T, int BYTES>
__device__ __forceinline__ void unpack_vector(const Raw<BYTES>& raw, float (&v)[BYTES / sizeof(T)]) {
  const T* e = reinterpret_cast<const T*>(raw.word);
#pragma unroll
  for (int i = 0; i < static_cast<int>(BYTES / sizeof(T)); ++i) v[i] = to_float(e[i]);
}

template <bool ALIGNED>
__device__ __forceinline__ void store_vector(S* row, int n, const float (&v)[VECTOR]) {
  if (ALIGNED && n + VECTOR <= DSTATE) {
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

// What a thread loads for a row of a pass.
struct Row {
  Raw<STATE_BYTES> h[VECTORS];
  X x, z;  // of the only token
  float d;
};

// BLOCK_HEAD rows from p0 on of one head and slot. ALIGNED: rows of the state, of B and of C start on vectors.
template <bool ALIGNED>
__device__ __forceinline__ void update(const StepArgs& args, S* state, int64 row, int head, int p0) {
  constexpr bool AHEAD = FEW && ALIGNED;     // single elements would take too many registers
  constexpr bool HOLD = AHEAD && ONE_TOKEN;  // B and C, which are the same for all passes
  const int part = threadIdx.x % ROW_THREADS;
  const int64 group = head / HEADS_PER_GROUP;
  const X* b = static_cast<const X*>(args.B) + row * args.b_strides.batch + group * args.b_strides.head;
  const X* c = static_cast<const X*>(args.C) + row * args.c_strides.batch + group * args.c_strides.head;
  const X* x = static_cast<const X*>(args.x) + row * args.x_strides.batch + head * args.x_strides.head;
  const X* z = static_cast<const X*>(args.z) + row * args.z_strides.batch + head * args.z_strides.head;
  X* out = static_cast<X*>(args.out) + row * args.out_strides.batch + head * args.out_strides.head;
  const int64 dt_base = row * args.dt_strides.batch + head * args.dt_strides.head;
  const auto element_of = [&](int v) { return (v * ROW_THREADS + part) * VECTOR; };
  const auto load_row = [&](int p) {
    Row r{};
    if (RAGGED && p >= HEADDIM) return r;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) r.h[v] = load_vector<ALIGNED, STATE_BYTES>(state + p * args.state_strides[2], element_of(v));
    if (ONE_TOKEN) r.x = x[p];
    if (ONE_TOKEN && HAS_Z) r.z = z[p];
    if (D_KIND > 0) r.d = args.D[head * args.d_head_stride + (D_KIND == 2 ? p : 0)];
    return r;
  };

  int p = p0 + threadIdx.x / ROW_THREADS;
  Row next{};
  if (AHEAD) next = load_row(p);
  Raw<INPUT_BYTES> held_b[HOLD ? VECTORS : 1], held_c[HOLD ? VECTORS : 1];
  if (HOLD) {
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
      held_b[HOLD ? v : 0] = load_vector<ALIGNED, INPUT_BYTES>(b, element_of(v));
      held_c[HOLD ? v : 0] = load_vector<ALIGNED, INPUT_BYTES>(c, element_of(v));
    }
  }
  const float a = args.A[head] * LOG2_E;
  const float bias = HAS_DT_BIAS ? args.dt_bias[head] : 0.f;
  const auto step_of = [&](int t) {
    return dt_pipeline(load_element<DT_DTYPE>(args.dt, dt_base + t * args.dt_strides.token), bias, args.dt_min, args.dt_max);
  };
  float dt = ONE_TOKEN ? step_of(0) : 0.f;
  float decay = ex2_approx(a * dt);

#pragma unroll(AHEAD ? 2 : 1)
  for (int pass = 0; pass < PASSES; ++pass, p += ROWS_PER_PASS) {
    const Row r = AHEAD ? next : load_row(p);
    if (AHEAD && pass + 1 < PASSES) next = load_row(p + ROWS_PER_PASS);
    const bool real = !RAGGED || p < HEADDIM;
    float h[VECTORS][VECTOR];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) unpack_vector<S>(r.h[v], h[v]);

    for (int t = 0; t < (ONE_TOKEN ? 1 : args.tokens); ++t) {
      X raw_x = r.x, raw_z = r.z;
      if (!ONE_TOKEN) {
        dt = step_of(t);
        decay = ex2_approx(a * dt);
        if (real) raw_x = x[t * args.x_strides.token + p];
        if (HAS_Z && real) raw_z = z[t * args.z_strides.token + p];
      }
      const float xt = to_float(raw_x);
      const float gain = dt * xt;
      float sum = 0.f;
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) {
        float bv[VECTOR], cv[VECTOR];
        if (HOLD) {
          unpack_vector<X>(held_b[HOLD ? v : 0], bv);
          unpack_vector<X>(held_c[HOLD ? v : 0], cv);
        } else {
          unpack_vector<X>(load_vector<ALIGNED && WHOLE_INPUTS, INPUT_BYTES>(b + t * args.b_strides.token, element_of(v)), bv);
          unpack_vector<X>(load_vector<ALIGNED && WHOLE_INPUTS, INPUT_BYTES>(c + t * args.c_strides.token, element_of(v)), cv);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
          h[v][i] = h[v][i] * decay + gain * bv[i];
          sum += h[v][i] * cv[i];
        }
      }
#pragma unroll
      for (int step = ROW_THREADS / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
      if (part == 0 && real) {
        if (D_KIND > 0) sum += r.d * xt;
        if (HAS_Z) sum *= silu(to_float(raw_z));
        from_float(out[t * args.out_strides.token + p], sum);
      }
    }
    if (real) {
#pragma unroll
      for (int v = 0; v < VECTORS; ++v) store_vector<ALIGNED>(state + p * args.state_strides[2], element_of(v), h[v]);
    }
  }
}

// The block's work.
template <bool ALIGNED>
__device__ __forceinline__ void update_all(const StepArgs& args) {
  for (int64 work = blockIdx.x; work < args.work_items; work += gridDim.x) {
    const int p0 = static_cast<int>(work % P_TILES) * BLOCK_HEAD;
    const int64 row_head = work / P_TILES;
    const int head = static_cast<int>(row_head % args.nheads);
    const int64 row = row_head / args.nheads;
    const int64 slot = HAS_INDICES ? args.state_batch_indices[row * args.indices_stride] : row;
    if (slot < 0 || slot >= args.slots) continue;
    S* state = static_cast<S*>(args.state) + slot * args.state_strides[0] + head * args.state_strides[1];
    update<ALIGNED>(args, state, row, head, p0);
  }
}

// True if elements at any sums of these strides start on multiples of `to` bytes, a power of two.
__device__ __forceinline__ bool is_aligned(const void* base, int64 s0, int64 s1, int64 s2, int elem_bytes, int to) {
  return (reinterpret_cast<unsigned long long>(base) | (s0 | s1 | s2) * elem_bytes) % to == 0;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) state_update(const __grid_constant__ StepArgs args) {
  const Strides& b = args.b_strides;
  const Strides& c = args.c_strides;
  const bool aligned = is_aligned(args.B, b.batch, b.token, b.head, sizeof(X), INPUT_ALIGN) &&
                       is_aligned(args.C, c.batch, c.token, c.head, sizeof(X), INPUT_ALIGN) &&
                       is_aligned(args.state, args.state_strides[0], args.state_strides[1], args.state_strides[2], sizeof(S), STATE_BYTES);
  // Asked once: the two loops share no registers.
  if (aligned)
    update_all<true>(args);
  else
    update_all<false>(args);
}
