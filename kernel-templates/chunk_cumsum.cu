// chunk_cumsum, for every chunk slot c, head h, token l of the chunk:
//   dt_out[c, h, l]       = clamp(softplus(dt + dt_bias))
//   da_cumsum[c, h, l]    = G_l = sum_{k <= l} A_h log2(e) dt_out[c, h, k]          float32, log2 units; for float32 inputs two
//                           numbers, high and low (the low ones follow all high ones), so that differences keep their digits
//   state_weight[c, h, l] = dt_out[c, h, l] * exp2(G_last - G_l)                    the weight of token l in the chunk's state
//                           bf16 inputs: as high + low bf16 numbers of a pair of tokens, the high ones at the even token's place and the
//                           low ones at the odd one's: x * high + x * low rounds once, in two instructions a pair of elements
//
// Grid   slots * ceil(nheads / BLOCK_H) blocks, heads fastest; blocks loop if that exceeds the grid limit
// Block  BLOCK_H warps; warp w scans head w of the block, each lane CHUNK_SIZE / 32 consecutive tokens
// Shared dt [BLOCK_H][CHUNK_SIZE + 1], high and low G likewise: reads of dt and stores of layout bth run along heads, the scan along tokens
// Tail   tokens past the chunk's end have dt = 0: G stays G_last there and their weight is 0
// Source Dao and Gu 2024, listing 1 (segment sums); mamba_ssm ssd_chunk_state.py _chunk_cumsum_fwd
#include "mamba2_config.cuh"

#include "common/args.cuh"
#include "common/require.cuh"
#include "common/softplus.cuh"
#include "common/work.cuh"

static_assert(THREADS == 32 * BLOCK_H, "launch.rs gives one warp a head");
static_assert(SMEM_BYTES == 0, "shared memory is static here");

constexpr int LANE_TOKENS = CHUNK_SIZE / 32;
constexpr float LOG2_E = 1.4426950408889634f;

extern "C" __global__ void __launch_bounds__(THREADS, 1) chunk_cumsum(const __grid_constant__ ForwardArgs args) {
  __shared__ float dt_tile[BLOCK_H][CHUNK_SIZE + 1];
  __shared__ float g_tile[BLOCK_H][CHUNK_SIZE + 1];
  __shared__ float low_tile[BLOCK_H][CHUNK_SIZE + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned head_blocks = (args.nheads + BLOCK_H - 1) / BLOCK_H;

  for (unsigned work = blockIdx.x; work < args.work_items; work += gridDim.x) {
    const int slot = static_cast<int>(work / head_blocks);
    const int head0 = static_cast<int>(work % head_blocks) * BLOCK_H;
    const Chunk chunk = locate_chunk(args, slot);
    if (chunk.tokens == 0) continue;  // the same for the whole block

    const int64 dt_base = chunk.row * args.dt_strides.batch + chunk.first * args.dt_strides.token;
    for (int i = threadIdx.x; i < CHUNK_SIZE * BLOCK_H; i += THREADS) {
      const int token = i / BLOCK_H, h = i % BLOCK_H, head = head0 + h;
      float dt = 0.f;
      if (token < chunk.tokens && head < args.nheads) {
        const float raw = load_element<DT_DTYPE>(args.dt, dt_base + token * args.dt_strides.token + head * args.dt_strides.head);
        dt = dt_pipeline(raw, HAS_DT_BIAS ? args.dt_bias[head] : 0.f, args.dt_min, args.dt_max);
      }
      dt_tile[h][token] = dt;
    }
    __syncthreads();

    const int head = head0 + warp;
    const float a = head < args.nheads ? args.A[head] * LOG2_E : 0.f;
    long long g[LANE_TOKENS];
    long long sum = 0;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; ++i) {
      sum += to_fixed(a * dt_tile[warp][lane * LANE_TOKENS + i]);
      g[i] = sum;
    }
    long long before = sum;  // inclusive scan over lanes of the lane totals
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const long long from = __shfl_up_sync(0xffffffffu, before, step);
      if (lane >= step) before += from;
    }
    before = __shfl_up_sync(0xffffffffu, before, 1);
    if (lane == 0) before = 0;
#pragma unroll
    for (int i = 0; i < LANE_TOKENS; ++i) {
      const float high = from_fixed(before + g[i]);
      g_tile[warp][lane * LANE_TOKENS + i] = high;
      low_tile[warp][lane * LANE_TOKENS + i] = from_fixed(before + g[i] - __float2ll_rn(high * 4294967296.f));
    }
    __syncthreads();

    for (int i = threadIdx.x; i < CHUNK_SIZE * BLOCK_H; i += THREADS) {
      const int token = LAYOUT == 0 ? i % CHUNK_SIZE : i / BLOCK_H;
      const int h = LAYOUT == 0 ? i / CHUNK_SIZE : i % BLOCK_H;
      if (head0 + h >= args.nheads) continue;
      const int64 at = vector_index(slot, head0 + h, token, args.nheads);
      const float dt = dt_tile[h][token], gt = g_tile[h][token], low = low_tile[h][token];
      args.dt_out[at] = dt;
      args.da_cumsum[at] = gt;
      if (X_DTYPE == 2) args.da_cumsum[low_offset(args) + at] = low;
      const auto weight = [&](int l) {
        const float rest = (g_tile[h][CHUNK_SIZE - 1] - g_tile[h][l]) + (low_tile[h][CHUNK_SIZE - 1] - low_tile[h][l]);
        return dt_tile[h][l] * ex2_approx(fminf(rest, 0.f));
      };
      if constexpr (X_DTYPE == 0) {
        const float even = weight(token & ~1), odd = weight(token | 1);
        const Pair<bf16> high = pack<bf16>(even, odd);
        const float2 kept = unpack(high);
        args.state_weight[at] = __uint_as_float(token % 2 == 0 ? high.bits : pack<bf16>(even - kept.x, odd - kept.y).bits);
      } else {
        args.state_weight[at] = weight(token);
      }
    }
    __syncthreads();
  }
}
