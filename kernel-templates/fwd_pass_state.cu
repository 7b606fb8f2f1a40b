// fwd_pass_state, for every sequence s, head h, serially over its chunks c:
//   states[c, h, p, n] = H                                                  the state at the chunk's start, rounded to X_DTYPE
//   H[p, n]            = exp2(G_last) H[p, n] + sum_l x[l, p] w[l] B[l, n]    w = state_weight, H stays in float32 registers
// and at the end final_states[s, h] = H. H starts as initial_states[s, h] or zero.
//
//   SWAP_AB 0: H   = (w x)^T B   M = headdim, N = dstate, x scaled in registers
//   SWAP_AB 1: H^T = (w B)^T x   M = dstate, N = headdim, B scaled in registers
//
// Grid   sequences * nheads * ceil(headdim / BLOCK_HEAD) * ceil(dstate / BLOCK_STATE) blocks, tiles of one head adjacent (they share x and B in L2)
// Block  WARPS warps, WARPS_M x WARPS_N over the M x N tile
// Shared ring of STAGES x { x [64][BLOCK_HEAD + 8], B [64][BLOCK_STATE + 8], w [64], G_last of the chunk, padded to 16 bytes }
// Tail   tokens past the sequence read as zero and have weight zero; an empty sequence copies its initial state
// Source Dao and Gu 2024, section 6 (chunk state and state passing, fused)
#include "mamba2_config.cuh"

#include "common/args.cuh"
#include "common/fragments.cuh"
#include "common/require.cuh"
#include "common/tiles.cuh"
#include "common/work.cuh"
#include "ptx/launch.cuh"

using X = Element<X_DTYPE>;

constexpr int TILE_TOKENS = 64;
constexpr int TILES_PER_CHUNK = CHUNK_SIZE / TILE_TOKENS;
constexpr int M = SWAP_AB ? BLOCK_STATE : BLOCK_HEAD;
constexpr int N = SWAP_AB ? BLOCK_HEAD : BLOCK_STATE;
constexpr int WARPS_M = WARPS < M / 16 ? WARPS : M / 16;
constexpr int WARPS_N = WARPS / WARPS_M;
constexpr int MT = M / 16 / WARPS_M;  // 16-row tiles of a warp
constexpr int NT = N / 8 / WARPS_N;   // 8-column tiles of a warp

MAMBA2_REQUIRE(F01, CHUNK_SIZE % TILE_TOKENS == 0, "CHUNK_SIZE must be a multiple of the 64-token tile");
MAMBA2_REQUIRE(F02, WARPS_M * WARPS_N == WARPS && N % (16 * WARPS_N) == 0 && M % (16 * WARPS_M) == 0, "each warp must own whole 16 x 16 tiles");
MAMBA2_REQUIRE(F03, MT * NT * 4 <= 64, "more than 64 accumulators a thread spill");

constexpr int X_LD = BLOCK_HEAD + ROW_PAD;
constexpr int B_LD = BLOCK_STATE + ROW_PAD;
constexpr int X_OFFSET = 0;
constexpr int B_OFFSET = X_OFFSET + tile_elems(TILE_TOKENS, BLOCK_HEAD) * sizeof(X);
constexpr int W_OFFSET = B_OFFSET + tile_elems(TILE_TOKENS, BLOCK_STATE) * sizeof(X);
constexpr int G_LAST_OFFSET = W_OFFSET + TILE_TOKENS * sizeof(float);
constexpr int STAGE_BYTES = G_LAST_OFFSET + 16;
static_assert(STAGES * STAGE_BYTES == SMEM_BYTES, "launch.rs carves the same shared memory");
static_assert(THREADS == 32 * WARPS && THREADS > TILE_TOKENS, "launch.rs gives WARPS warps, and one thread copies G_last");

// float32 fragments are three times as many registers: one 16-wide step at a time.
constexpr int K_UNROLL = sizeof(X) == 4 ? 1 : TILE_TOKENS / 16;

struct Item {
  Sequence sequence;
  int index;  // of the sequence
  int head, p0, n0;
  const X* x;
  const X* b;
};

__device__ __forceinline__ Item locate_item(const ForwardArgs& args, unsigned work) {
  constexpr int P_TILES = (HEADDIM + BLOCK_HEAD - 1) / BLOCK_HEAD, N_TILES = (DSTATE + BLOCK_STATE - 1) / BLOCK_STATE;
  Item item;
  item.n0 = static_cast<int>(work % N_TILES) * BLOCK_STATE;
  item.p0 = static_cast<int>(work / N_TILES % P_TILES) * BLOCK_HEAD;
  const unsigned sequence_head = work / (N_TILES * P_TILES);
  item.head = static_cast<int>(sequence_head % args.nheads);
  item.index = static_cast<int>(sequence_head / args.nheads);
  item.sequence = locate_sequence(args, item.index);
  const Sequence& s = item.sequence;
  item.x = static_cast<const X*>(args.x) + s.row * args.x_strides.batch + s.first * args.x_strides.token +
           item.head * args.x_strides.head + item.p0;
  item.b = static_cast<const X*>(args.B) + s.row * args.b_strides.batch + s.first * args.b_strides.token +
           item.head / args.heads_per_group * args.b_strides.head + item.n0;
  return item;
}

// Starts the copies of 64-token tile `tile` of the sequence into a stage.
__device__ __forceinline__ void copy_stage(const ForwardArgs& args, const Item& item, int tile, unsigned char* stage) {
  const int token = tile * TILE_TOKENS;
  const int valid = item.sequence.tokens - token;
  copy_tile_async<ALIGNED, TILE_TOKENS, BLOCK_HEAD, X_LD>(reinterpret_cast<X*>(stage + X_OFFSET), item.x + token * args.x_strides.token,
                                                    args.x_strides.token, valid, HEADDIM - item.p0);
  copy_tile_async<ALIGNED, TILE_TOKENS, BLOCK_STATE, B_LD>(reinterpret_cast<X*>(stage + B_OFFSET), item.b + token * args.b_strides.token,
                                                     args.b_strides.token, valid, DSTATE - item.n0);
  if (threadIdx.x < TILE_TOKENS) {
    const int64 slot = item.sequence.first_slot + tile / TILES_PER_CHUNK;
    const int in_chunk = tile % TILES_PER_CHUNK * TILE_TOKENS + threadIdx.x;
    cp_async_ca_4(reinterpret_cast<float*>(stage + W_OFFSET) + threadIdx.x,
                  args.state_weight + vector_index(slot, item.head, in_chunk, args.nheads));
  } else if (threadIdx.x == TILE_TOKENS) {  // G at the chunk's last token; the tail repeats it
    // Through shared memory like all else: a load to a register would share a scoreboard with those from there, and be waited for at once.
    const int64 slot = item.sequence.first_slot + tile / TILES_PER_CHUNK;
    cp_async_ca_4(stage + G_LAST_OFFSET, args.da_cumsum + vector_index(slot, item.head, CHUNK_SIZE - 1, args.nheads));
  }
}

// Accumulator element i of tile (mt, nt) of this thread, as (headdim, dstate) inside the block.
struct Position {
  int p, n;
};
__device__ __forceinline__ Position position(int mt, int nt, int i) {
  const int warp = threadIdx.x / 32;
  const int m = (warp / WARPS_N * MT + mt) * 16 + lane_row() + i / 2 * 8;
  const int n = (warp % WARPS_N * NT + nt) * 8 + lane_column() + i % 2;
  return SWAP_AB ? Position{n, m} : Position{m, n};
}

template <typename F>
__device__ __forceinline__ void for_each_element(float (&acc)[MT][NT][4], F&& f) {
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) f(position(mt, nt, i), acc[mt][nt][i]);
}

// acc += (w * M operand)^T (N operand) over one 64-token tile.
__device__ __forceinline__ void accumulate(float (&acc)[MT][NT][4], const unsigned char* stage) {
  const X* x = reinterpret_cast<const X*>(stage + X_OFFSET);
  const X* b = reinterpret_cast<const X*>(stage + B_OFFSET);
  const float* w = reinterpret_cast<const float*>(stage + W_OFFSET);
  const int warp = threadIdx.x / 32;
  const X* m_tile = (SWAP_AB ? b : x) + warp / WARPS_N * MT * 16;
  const X* n_tile = (SWAP_AB ? x : b) + warp % WARPS_N * NT * 8;
  constexpr int M_LD = SWAP_AB ? B_LD : X_LD, N_LD = SWAP_AB ? X_LD : B_LD;
#pragma unroll K_UNROLL
  for (int k = 0; k < TILE_TOKENS; k += 16) {
    const float2 even = *reinterpret_cast<const float2*>(w + k + lane_column());  // bf16: high and low numbers of both tokens
    const float2 odd = *reinterpret_cast<const float2*>(w + k + 8 + lane_column());
    FragmentA<X> a[MT];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      a[mt] = load_a_transposed(m_tile + k * M_LD + mt * 16, M_LD);
      scale_along_k(a[mt], even, odd);
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt += 2) {
      const FragmentB2<X> bn = load_b_transposed(n_tile + k * N_LD + nt * 8, N_LD);
#pragma unroll
      for (int mt = 0; mt < MT; ++mt) {
        multiply_add(acc[mt][nt], a[mt], bn.pair[0]);
        multiply_add(acc[mt][nt + 1], a[mt], bn.pair[1]);
      }
    }
  }
}

// Rounds the state to X_DTYPE and stores it as the start of chunk `slot`, straight from registers: a copy through shared memory would cost a
// wait of the whole block a chunk. A warp fills 16 bytes of eight rows at a time, its next tile their other half.
template <typename T>
__device__ __forceinline__ void store_chunk_state(const ForwardArgs& args, const Item& item, int64 slot, const float (&acc)[MT][NT][4]) {
  T* to = static_cast<T*>(args.states) + ((slot * args.nheads + item.head) * HEADDIM + item.p0) * STATES_ROW + item.n0;
  const auto inside = [&](int p, int n) { return item.p0 + p < HEADDIM && item.n0 + n < STATES_ROW; };
#pragma unroll
  for (int mt = 0; mt < MT; ++mt)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float first = acc[mt][nt][2 * r], second = acc[mt][nt][2 * r + 1];
        Position at = position(mt, nt, 2 * r);
        if constexpr (SWAP_AB && sizeof(T) == 2) {  // the pair lies along headdim: transposed, it lies along dstate
          at.p += lane_row() - lane_column();
          at.n += lane_column() - lane_row();
          const unsigned bits = movmatrix_trans(pack<T>(first, second).bits);
          if (inside(at.p, at.n)) *reinterpret_cast<unsigned*>(to + static_cast<int64>(at.p) * STATES_ROW + at.n) = bits;
        } else if constexpr (SWAP_AB) {
          if (inside(at.p, at.n)) from_float(to[static_cast<int64>(at.p) * STATES_ROW + at.n], first);
          if (inside(at.p + 1, at.n)) from_float(to[static_cast<int64>(at.p + 1) * STATES_ROW + at.n], second);
        } else {
          if (inside(at.p, at.n)) *reinterpret_cast<Pair<T>*>(to + static_cast<int64>(at.p) * STATES_ROW + at.n) = pack<T>(first, second);
        }
      }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) fwd_pass_state(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(128) unsigned char smem[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();

  for (unsigned work = blockIdx.x; work < args.work_items; work += gridDim.x) {
    const Item item = locate_item(args, work);
    const int tiles = (item.sequence.tokens + TILE_TOKENS - 1) / TILE_TOKENS;
    float acc[MT][NT][4];
    for_each_element(acc, [&](Position at, float& v) {
      const int p = item.p0 + at.p, n = item.n0 + at.n;
      v = 0.f;
      if constexpr (INITIAL_DTYPE >= 0) {
        if (p < HEADDIM && n < DSTATE)
          v = load_element<INITIAL_DTYPE>(args.initial_states, item.index * args.initial_strides[0] + item.head * args.initial_strides[1] +
                                                                   p * args.initial_strides[2] + n);
      }
    });

#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) {
      if (s < tiles) copy_stage(args, item, s, smem + s * STAGE_BYTES);
      cp_async_commit_group();
    }
    int stage = 0, ahead_stage = STAGES - 1;
    for (int tile = 0; tile < tiles; ++tile) {
      cp_async_wait_group<STAGES - 2>();
      __syncthreads();
      const int ahead = tile + STAGES - 1;
      if (ahead < tiles) copy_stage(args, item, ahead, smem + ahead_stage * STAGE_BYTES);
      cp_async_commit_group();
      if (tile % TILES_PER_CHUNK == 0) {
        store_chunk_state<X>(args, item, item.sequence.first_slot + tile / TILES_PER_CHUNK, acc);
        const float decay = ex2_approx(fminf(*reinterpret_cast<const float*>(smem + stage * STAGE_BYTES + G_LAST_OFFSET), 0.f));
        for_each_element(acc, [&](Position, float& v) { v *= decay; });
      }
      accumulate(acc, smem + stage * STAGE_BYTES);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      ahead_stage = ahead_stage + 1 == STAGES ? 0 : ahead_stage + 1;
    }

    if constexpr (FINAL_DTYPE >= 0) {
      for_each_element(acc, [&](Position at, float v) {
        const int p = item.p0 + at.p, n = item.n0 + at.n;
        if (p < HEADDIM && n < DSTATE)
          store_element<FINAL_DTYPE>(args.final_states, item.index * args.final_strides[0] + item.head * args.final_strides[1] +
                                                            p * args.final_strides[2] + n, v);
      });
    }
    cp_async_wait_group<0>();
    __syncthreads();  // before the next item's copies
  }
}
