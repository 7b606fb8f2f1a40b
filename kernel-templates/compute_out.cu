// compute_out, for the rows i of one chunk and the heads h of a block:
//   Y[i, h, p] = exp2(G_i) sum_n C[i, n] H[h, p, n] + sum_{j <= i} S[h, i, j] x[j, h, p] + D[h, p] x[i, h, p],   then Y * silu(z)
//   S[h, i, j] = exp2(G_i - G_j) dt_j (C B^T)[i, j]
// H is the state at the chunk's start. C B^T is made once for the BLOCK_H heads of a block and never leaves the registers.
//
//   SWAP_AB 0: Y = S x        S is operand A, 16 rows a warp
//   SWAP_AB 1: Y^T = x^T S^T  S is operand B, 16 columns a warp; the same accumulator registers serve as either
//
// Grid   slots * (nheads / BLOCK_H) * ceil(headdim / BLOCK_HEAD) * (CHUNK_SIZE / ROWS), row blocks fastest (they share B, x and H in L2);
//        PERSISTENT: as many blocks as fit, each looping
// Block  WARPS warps, 16 rows of the chunk each: ROWS = 16 WARPS
// Shared C [ROWS][dstate padded + 8], later the staging tile of Y; G (float32 inputs: high and low) and dt [BLOCK_H][CHUNK_SIZE]
//        each; then a ring of STAGES
//        tiles: first the H tiles [BLOCK_HEAD][BLOCK_STATE + 8] (k outer, h inner), then for each 64 tokens j the B tiles
//        [64][BLOCK_STATE + 8] and the x tiles [64][BLOCK_HEAD + 8], one a head
// Tail   rows past the chunk's tokens are computed on zeros and not stored
// Source Dao and Gu 2024, section 6 (chunk scan)
#include "mamba2_config.cuh"

#include "common/args.cuh"
#include "common/fragments.cuh"
#include "common/require.cuh"
#include "common/softplus.cuh"
#include "common/tiles.cuh"
#include "common/work.cuh"
#include "ptx/launch.cuh"

using X = Element<X_DTYPE>;

constexpr int TILE_TOKENS = 64;
constexpr int ROWS = 16 * WARPS;
constexpr int ROW_BLOCKS = CHUNK_SIZE / ROWS;
constexpr int P_TILES = (HEADDIM + BLOCK_HEAD - 1) / BLOCK_HEAD;
constexpr int K_TILES = (DSTATE + BLOCK_STATE - 1) / BLOCK_STATE;  // BLOCK_STATE-wide tiles of dstate

MAMBA2_REQUIRE(O01, CHUNK_SIZE % TILE_TOKENS == 0, "CHUNK_SIZE must be a multiple of the 64-token tile");
MAMBA2_REQUIRE(O02, CHUNK_SIZE % ROWS == 0, "the rows of a block must divide the chunk");

constexpr int C_COLUMNS = K_TILES * BLOCK_STATE > BLOCK_HEAD ? K_TILES * BLOCK_STATE : BLOCK_HEAD;
constexpr int C_LD = C_COLUMNS + ROW_PAD;
constexpr int H_LD = BLOCK_STATE + ROW_PAD;
constexpr int X_LD = BLOCK_HEAD + ROW_PAD;
constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr int STAGE_ELEMS =
    max_of(tile_elems(BLOCK_HEAD, BLOCK_STATE), max_of(tile_elems(TILE_TOKENS, BLOCK_STATE), tile_elems(TILE_TOKENS, BLOCK_HEAD)));
constexpr int G_OFFSET = ROWS * C_LD * sizeof(X);
constexpr bool LOW = sizeof(X) == 4;  // G is two words
constexpr int LOW_OFFSET = G_OFFSET + BLOCK_H * CHUNK_SIZE * sizeof(float);
constexpr int DT_OFFSET = LOW_OFFSET + LOW * BLOCK_H * CHUNK_SIZE * sizeof(float);
constexpr int RING_OFFSET = DT_OFFSET + BLOCK_H * CHUNK_SIZE * sizeof(float);
static_assert(RING_OFFSET + STAGES * STAGE_ELEMS * sizeof(X) == SMEM_BYTES, "launch.rs carves the same shared memory");
static_assert(THREADS == 32 * WARPS, "launch.rs gives WARPS warps");

// float32 fragments are three times as many registers: one 16-wide step at a time.
constexpr int K_UNROLL = sizeof(X) == 4 ? 1 : BLOCK_STATE / 16;

// What one block works on.
struct Item {
  Chunk chunk;
  int slot, head0, p0, row0;
  int j_tiles;  // 64-token tiles at or below the block's last row
};

// 64-bit work items, unlike elsewhere: with 32 bits ptxas wants a register or two more, and spills where they are all taken.
__device__ __forceinline__ Item locate_item(const ForwardArgs& args, int64 work) {
  Item item;
  item.row0 = static_cast<int>(work % ROW_BLOCKS) * ROWS;
  item.p0 = static_cast<int>(work / ROW_BLOCKS % P_TILES) * BLOCK_HEAD;
  const int head_blocks = args.nheads / BLOCK_H;
  const int64 slot_head = work / (ROW_BLOCKS * P_TILES);
  item.head0 = static_cast<int>(slot_head % head_blocks) * BLOCK_H;
  item.slot = static_cast<int>(slot_head / head_blocks);
  item.chunk = locate_chunk(args, item.slot);
  const int rows_end = item.row0 + ROWS < item.chunk.tokens ? item.row0 + ROWS : item.chunk.tokens;
  item.j_tiles = (rows_end + TILE_TOKENS - 1) / TILE_TOKENS;
  return item;
}

// Walks the tiles of an item in the order in which they are consumed and starts their copies, STAGES - 1 ahead.
struct Producer {
  const ForwardArgs& args;
  const Item& item;
  unsigned char* smem;
  const X* b;
  const X* c;
  const X* x;
  const X* states;
  int phase_j = -1;  // -1: H tiles; j >= 0: tiles of tokens 64 j ..
  int k = 0, h = 0;
  int stage = 0;

  __device__ __forceinline__ Producer(const ForwardArgs& a, const Item& i, unsigned char* s) : args(a), item(i), smem(s) {
    const Chunk& chunk = item.chunk;
    const int64 group = item.head0 / args.heads_per_group;
    b = static_cast<const X*>(args.B) + chunk.row * args.b_strides.batch + chunk.first * args.b_strides.token + group * args.b_strides.head;
    c = static_cast<const X*>(args.C) + chunk.row * args.c_strides.batch + (chunk.first + item.row0) * args.c_strides.token +
        group * args.c_strides.head;
    x = static_cast<const X*>(args.x) + chunk.row * args.x_strides.batch + chunk.first * args.x_strides.token +
        item.head0 * args.x_strides.head + item.p0;
    states = static_cast<const X*>(args.states) + ((static_cast<int64>(item.slot) * args.nheads + item.head0) * HEADDIM + item.p0) * STATES_ROW;
  }

  __device__ __forceinline__ X* stage_tile(int index) const { return reinterpret_cast<X*>(smem + RING_OFFSET) + index * STAGE_ELEMS; }

  // Starts the next tile's copy, if any is left, and closes the group either way: consumers count groups.
  __device__ __forceinline__ void issue() {
    X* tile = stage_tile(stage);
    if (phase_j < 0) {
      // The workspace is ours: rows of STATES_ROW elements, always 16-byte aligned.
      copy_tile_async<true, BLOCK_HEAD, BLOCK_STATE, H_LD>(tile, states + static_cast<int64>(h) * HEADDIM * STATES_ROW + k * BLOCK_STATE, STATES_ROW,
                                                     HEADDIM - item.p0, DSTATE - k * BLOCK_STATE);
      if (h == 0)  // BLOCK_STATE columns of C, all rows of the block
        copy_tile_async<ALIGNED, ROWS, BLOCK_STATE, C_LD>(reinterpret_cast<X*>(smem) + k * BLOCK_STATE, c + k * BLOCK_STATE, args.c_strides.token,
                                                          item.chunk.tokens - item.row0, DSTATE - k * BLOCK_STATE);
      if (k == 0) copy_vectors(h);
      if (++h == BLOCK_H) {
        h = 0;
        if (++k == K_TILES) {
          k = 0;
          phase_j = 0;
        }
      }
    } else if (phase_j < item.j_tiles) {
      const int token = phase_j * TILE_TOKENS, valid = item.chunk.tokens - token;
      if (k < K_TILES) {
        copy_tile_async<ALIGNED, TILE_TOKENS, BLOCK_STATE, H_LD>(tile, b + token * args.b_strides.token + k * BLOCK_STATE, args.b_strides.token, valid,
                                                           DSTATE - k * BLOCK_STATE);
        ++k;
      } else {
        copy_tile_async<ALIGNED, TILE_TOKENS, BLOCK_HEAD, X_LD>(tile, x + token * args.x_strides.token + h * args.x_strides.head, args.x_strides.token,
                                                          valid, HEADDIM - item.p0);
        if (++h == BLOCK_H) {
          h = 0;
          k = 0;
          ++phase_j;
        }
      }
    }
    cp_async_commit_group();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  // G and dt of one head, the whole chunk.
  __device__ __forceinline__ void copy_vectors(int head) const {
    float* g = reinterpret_cast<float*>(smem + G_OFFSET) + head * CHUNK_SIZE;
    float* dt = reinterpret_cast<float*>(smem + DT_OFFSET) + head * CHUNK_SIZE;
#pragma unroll
    for (int i0 = 0; i0 < CHUNK_SIZE; i0 += THREADS) {
      const int i = i0 + threadIdx.x;
      if (i >= CHUNK_SIZE) break;
      const int64 at = vector_index(item.slot, item.head0 + head, i, args.nheads);
      cp_async_ca_4(g + i, args.da_cumsum + at);
      if (LOW) cp_async_ca_4(g + BLOCK_H * CHUNK_SIZE + i, args.da_cumsum + low_offset(args) + at);
      cp_async_ca_4(dt + i, args.dt_out + at);
    }
  }
};

// Y of one head: [16 rows][BLOCK_HEAD] (SWAP_AB 0) or [BLOCK_HEAD][16 rows] (SWAP_AB 1) a warp.
constexpr int Y_TILES = BLOCK_HEAD / 8;
struct Output {
  float v[Y_TILES][4];

  // Row inside the warp and column inside the block of element i of tile t. SWAP_AB: tiles 2t, 2t+1 are the two 8-row halves.
  __device__ static __forceinline__ int row(int t, int i) {
    return SWAP_AB ? t % 2 * 8 + lane_column() + i % 2 : lane_row() + i / 2 * 8;
  }
  __device__ static __forceinline__ int column(int t, int i) {
    return SWAP_AB ? t / 2 * 16 + lane_row() + i / 2 * 8 : t * 8 + lane_column() + i % 2;
  }

  // += rows (operand pair `r`: 16 rows x 16 k as A) times `tile`, stored [k][column] (TRANSPOSED) or [column][k].
  template <bool TRANSPOSED>
  __device__ __forceinline__ void multiply(const FragmentA<X>& r, const X* tile, int ld) {
    if constexpr (SWAP_AB) {
      const Pair<X> low[2] = {r.pair[0], r.pair[2]}, high[2] = {r.pair[1], r.pair[3]};
#pragma unroll
      for (int t = 0; t < Y_TILES; t += 2) {
        const FragmentA<X> a = TRANSPOSED ? load_a_transposed(tile + t * 8, ld) : load_a(tile + t * 8 * ld, ld);
        multiply_add(v[t], a, low);
        multiply_add(v[t + 1], a, high);
      }
    } else {
#pragma unroll
      for (int t = 0; t < Y_TILES; t += 2) {
        const FragmentB2<X> b = TRANSPOSED ? load_b_transposed(tile + t * 8, ld) : load_b(tile + t * 8 * ld, ld);
        multiply_add(v[t], r, b.pair[0]);
        multiply_add(v[t + 1], r, b.pair[1]);
      }
    }
  }
};

// Adds D x, applies the gate, rounds, and stores the warp's 16 rows of one head through the staging tile (the warp's own rows of C).
__device__ __forceinline__ void store_output(const ForwardArgs& args, const Item& item, const Output& y, int h, X* staging) {
  const int warp_row = item.row0 + threadIdx.x / 32 * 16;
  const int head = item.head0 + h;
  const int64 token0 = item.chunk.first + warp_row;
  const X* x = static_cast<const X*>(args.x) + item.chunk.row * args.x_strides.batch + token0 * args.x_strides.token + head * args.x_strides.head + item.p0;
  const X* z = static_cast<const X*>(args.z) + item.chunk.row * args.z_strides.batch + token0 * args.z_strides.token + head * args.z_strides.head + item.p0;
  X* out = static_cast<X*>(args.out) + item.chunk.row * args.out_strides.batch + token0 * args.out_strides.token + head * args.out_strides.head + item.p0;
  const int valid_rows = item.chunk.tokens - warp_row, valid_columns = HEADDIM - item.p0;

  __syncwarp();  // every lane has read its C rows
#pragma unroll
  for (int t = 0; t < Y_TILES; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = Output::row(t, i), column = Output::column(t, i);
      float v = y.v[t][i];
      if ((D_KIND > 0 || HAS_Z) && row < valid_rows && column < valid_columns) {
        if (D_KIND > 0) {
          const float d = args.D[head * args.d_head_stride + (D_KIND == 2 ? item.p0 + column : 0)];
          v += d * to_float(x[row * args.x_strides.token + column]);
        }
        if (HAS_Z) v *= silu(to_float(z[row * args.z_strides.token + column]));
      }
      from_float(staging[row * C_LD + column], v);
    }
  __syncwarp();
  constexpr int VECTOR = 16 / sizeof(X), PER_ROW = BLOCK_HEAD / VECTOR;
#pragma unroll
  for (int i = 0; i < 16 * PER_ROW / 32; ++i) {
    const int at = i * 32 + lane_id();
    const int row = at / PER_ROW, column = at % PER_ROW * VECTOR;
    if (row >= valid_rows) continue;
    X* to = out + row * args.out_strides.token + column;
    const X* from = staging + row * C_LD + column;
    if (ALIGNED && column + VECTOR <= valid_columns) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int e = 0; e < VECTOR && column + e < valid_columns; ++e) to[e] = from[e];
    }
  }
  __syncwarp();  // before the next head's staging
}

extern "C" __global__ void __launch_bounds__(THREADS, OCCUPANCY) compute_out(const __grid_constant__ ForwardArgs args) {
  extern __shared__ __align__(128) unsigned char smem[];
  griddepcontrol_wait();
  const int warp = threadIdx.x / 32;
  X* c_rows = reinterpret_cast<X*>(smem) + warp * 16 * C_LD;
  const float* g_tile = reinterpret_cast<const float*>(smem + G_OFFSET);
  const float* dt_tile = reinterpret_cast<const float*>(smem + DT_OFFSET);

  for (int64 work = blockIdx.x; work < args.work_items; work += gridDim.x) {
    const Item item = locate_item(args, work);
    if (item.row0 >= item.chunk.tokens) continue;  // the same for the whole block
    Producer producer(args, item, smem);
    int consumed = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; ++s) producer.issue();
    // The next tile, and its successor's copy started into the stage that everybody has left.
    const auto next_tile = [&]() {
      cp_async_wait_group<STAGES - 2>();
      __syncthreads();
      producer.issue();
      const X* tile = producer.stage_tile(consumed);
      consumed = consumed + 1 == STAGES ? 0 : consumed + 1;
      return tile;
    };

    Output y[BLOCK_H];
#pragma unroll
    for (int h = 0; h < BLOCK_H; ++h)
#pragma unroll
      for (int t = 0; t < Y_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) y[h].v[t][i] = 0.f;

    // Y = C H^T
    for (int k = 0; k < K_TILES; ++k) {
#pragma unroll
      for (int h = 0; h < BLOCK_H; ++h) {
        const X* tile = next_tile();
#pragma unroll K_UNROLL
        for (int kk = 0; kk < BLOCK_STATE; kk += 16) {
          const FragmentA<X> c = load_a(c_rows + k * BLOCK_STATE + kk, C_LD);
          y[h].template multiply<false>(c, tile + kk, H_LD);
        }
      }
    }
    // Y *= exp2(G_i)
    const int row0 = item.row0 + warp * 16;
#pragma unroll
    for (int h = 0; h < BLOCK_H; ++h)
#pragma unroll
      for (int t = 0; t < Y_TILES; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) y[h].v[t][i] *= ex2_approx(fminf(g_tile[h * CHUNK_SIZE + row0 + Output::row(t, i)], 0.f));

    // Y += S x, 64 tokens j at a time
    for (int j = 0; j < item.j_tiles; ++j) {
      const int j0 = j * TILE_TOKENS;
      float s[8][4] = {};  // raw C B^T, 16 rows x 64 tokens
      for (int k = 0; k < K_TILES; ++k) {
        const X* tile = next_tile();
        if (j0 > row0 + 15) continue;  // above the diagonal for this warp
#pragma unroll K_UNROLL
        for (int kk = 0; kk < BLOCK_STATE; kk += 16) {
          const FragmentA<X> c = load_a(c_rows + k * BLOCK_STATE + kk, C_LD);
#pragma unroll
          for (int t = 0; t < 8; t += 2) {
            if (j0 + t * 8 > row0 + 15) continue;
            const FragmentB2<X> b = load_b(tile + t * 8 * H_LD + kk, H_LD);
            multiply_add(s[t], c, b.pair[0]);
            multiply_add(s[t + 1], c, b.pair[1]);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < BLOCK_H; ++h) {
        const X* tile = next_tile();
        if (j0 > row0 + 15) continue;
        const float* g = g_tile + h * CHUNK_SIZE;
        const float* dt = dt_tile + h * CHUNK_SIZE + j0;
        const float g_row[2] = {g[row0 + lane_row()], g[row0 + lane_row() + 8]};
        float low_row[2] = {0.f, 0.f};
        if (LOW) {
          low_row[0] = g[BLOCK_H * CHUNK_SIZE + row0 + lane_row()];
          low_row[1] = g[BLOCK_H * CHUNK_SIZE + row0 + lane_row() + 8];
        }
#pragma unroll
        for (int t = 0; t < 8; t += 2) {
          if (j0 + t * 8 > row0 + 15) continue;
          // Above the diagonal the exponent may be large and positive: select before exp2.
          FragmentA<X> a;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = (t + half) * 8 + lane_column();
            const float2 gj = *reinterpret_cast<const float2*>(g + j0 + column);
            float2 lj = make_float2(0.f, 0.f);
            if (LOW) lj = *reinterpret_cast<const float2*>(g + BLOCK_H * CHUNK_SIZE + j0 + column);
            const float2 dj = *reinterpret_cast<const float2*>(dt + column);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const int below = row0 + lane_row() + r * 8 - j0 - column;  // i - j of the pair's first element
              const float first = below >= 0 ? s[t + half][2 * r] * (ex2_approx(fminf(g_row[r] - gj.x + (low_row[r] - lj.x), 0.f)) * dj.x) : 0.f;
              const float second = below >= 1 ? s[t + half][2 * r + 1] * (ex2_approx(fminf(g_row[r] - gj.y + (low_row[r] - lj.y), 0.f)) * dj.y) : 0.f;
              a.pair[2 * half + r] = pack<X>(first, second);
            }
          }
          y[h].template multiply<true>(a, tile + t * 8 * X_LD, X_LD);
        }
      }
    }

#pragma unroll
    for (int h = 0; h < BLOCK_H; ++h) store_output(args, item, y[h], h, c_rows);
    cp_async_wait_group<0>();
    __syncthreads();  // before the next item's copies
  }
}
