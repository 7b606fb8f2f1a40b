// The forward pass of one segment, for sm90_fused_forward and sm90_chain_forward; include after common/sm90_pipeline.cuh's WITH_C = true.
//
// Two chains of work run beside each other: S of the next chunks, which needs no state, and H from chunk to chunk. The score warpgroup
// makes C B^T once for all heads of the block, and each head's S from it, into a ring of tiles; the consumers read them there. So the
// exponentials of S and the products of H hide each other, and neither's registers burden the other. Y of a lone head is stored by a warp of the
// producer, beside its part in filling the ring (OutputStore); consumers of a head each store theirs.
#pragma once

#include "common/sm90_pipeline.cuh"

// Tiles of S [64 x 64] that wait for the consumer or consumers of a head, and boxes of Y that they fill while the one before is stored.
constexpr int SETS = WARPGROUPS / SLICES;
constexpr int SCORE_SLOTS = 2;
constexpr int SCORES_BYTES = SETS * SCORE_SLOTS * BOX_BYTES;
constexpr int OUTPUT_SLOTS = 2;
constexpr int OUTPUT_BYTES = SETS * OUTPUT_SLOTS * BOX_BYTES;
// What the slices of a head hand each other: half of the tokens of their H C^T, float32.
constexpr int EXCHANGE_BYTES = SLICES == 1 ? 0 : 2 * BOX_BYTES;

// A full and an empty barrier per tile of S, behind the ring's.
struct ScoreBarriers {
  unsigned base;
  __device__ __forceinline__ unsigned full(int set, int slot) const { return base + (set * SCORE_SLOTS + slot) * 16; }
  __device__ __forceinline__ unsigned empty(int set, int slot) const { return full(set, slot) + 8; }
  __device__ __forceinline__ void init() const {
#pragma unroll 1
    for (int i = 0; i < SETS * SCORE_SLOTS; ++i) {
      mbarrier_init(full(0, i), 4 * WARP_ARRIVALS);
      mbarrier_init(empty(0, i), 4 * SLICES * WARP_ARRIVALS);
    }
    fence_mbarrier_init();
  }
};
constexpr int SCORE_BARRIERS_OFFSET = STAGES * 16;

// The same per box of Y of a lone head, behind those.
struct OutputBarriers {
  unsigned base;
  __device__ __forceinline__ unsigned full(int slot) const { return base + slot * 16; }
  __device__ __forceinline__ unsigned empty(int slot) const { return full(slot) + 8; }
  __device__ __forceinline__ void init() const {
#pragma unroll 1
    for (int i = 0; i < OUTPUT_SLOTS; ++i) {
      mbarrier_init(full(i), 4 * SLICES * WARP_ARRIVALS);
      mbarrier_init(empty(i), 1);
    }
    fence_mbarrier_init();
  }
};
constexpr int OUTPUT_BARRIERS_OFFSET = SCORE_BARRIERS_OFFSET + SETS * SCORE_SLOTS * 16;
static_assert(OUTPUT_BARRIERS_OFFSET + OUTPUT_SLOTS * 16 <= TAIL_BARRIER_OFFSET);
__device__ __forceinline__ unsigned char* score_tile(unsigned char* tiles, int set, int slot) { return tiles + (set * SCORE_SLOTS + slot) * BOX_BYTES; }

// D [64 x 64] (+)= the [64][K] boxes at `a` times the [64][K] boxes at `b` transposed, K = dstate.
__device__ __forceinline__ void start_product_over_dstate(float (&d)[32], const unsigned char* a, const unsigned char* b) {
  const WgmmaDescriptor<128> da(smem_address(a), 0), db(smem_address(b), 0);
#pragma unroll
  for (int k = 0; k < DSTATE_PADDED / 16; ++k) {
    const unsigned offset = k / 4 * BOX_BYTES + k % 4 * 32;
    multiply_tiles<0, 0>(d, da.at(offset), db.at(offset), k > 0);
  }
}

// Starts Y^T [headdim x 64 tokens] = H C^T, H the state rounded to X_DTYPE: its registers are operand A already. Then scales the state by the
// chunk's decay and starts H += (w x)^T B behind it, so that the tensor cores have work while Y is on its way through the rest. Two groups are
// in flight at the end, of which the first is Y. Large states go part by part, for the registers' sake. Of C and B the consumer's slice.
// MAY_END: H is not updated where nobody asks for it after this chunk.
template <bool MAY_END = false>
__device__ __forceinline__ void start_state_products(float (&y)[32], float (&state)[STATE_REGISTERS], const FragmentA<X> (&weighted_x)[4],
                                                     const unsigned char* stage, int slice, const Vectors& v, bool updates = true) {
  constexpr int STEPS = STATE_REGISTERS / 8, PART = HEADS * STATE_REGISTERS > 64 ? 4 : STEPS;
  const WgmmaDescriptor<128> c(smem_address(stage) + slice * SLICE_BYTES, 0);
#pragma unroll
  for (int part = 0; part < STEPS; part += PART) {
    FragmentA<X> h[PART];
#pragma unroll
    for (int k = 0; k < PART; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) h[k].pair[i] = pack<X>(state[8 * (part + k) + 2 * i], state[8 * (part + k) + 2 * i + 1]);
    if (part + PART == STEPS) scale_state(state, v);  // under the products ptxas would add a wait
    wgmma_fence();
#pragma unroll
    for (int k = part; k < part + PART; ++k) multiply_registers<0>(y, h[k - part], c.at(k / 4 * BOX_BYTES + k % 4 * 32), k > 0);
    wgmma_commit_group();
    if (part + PART < STEPS) wgmma_wait_group<0>();
  }
  if (!MAY_END || updates) {
    if (MAY_END) wgmma_fence();
    start_state_update(state, weighted_x, stage + B_OFFSET + slice * SLICE_BYTES);
  }
  wgmma_commit_group();
}

// D of the headdim rows lane / 4 and lane / 4 + 8 of the warp.
struct HeadD {
  float of_row[2];
  HeadD() = default;
  __device__ __forceinline__ HeadD(const ForwardArgs& args, const Segment& s, int head) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int p = warp * 16 + lane / 4 + 8 * r;
      of_row[r] = D_KIND > 0 && head < end_head(s) && (D_KIND == 1 || p < HEADDIM) ? args.D[head * args.d_head_stride + (D_KIND == 2 ? p : 0)] : 0.f;
    }
  }
};

// Adds D x, applies the gate, and leaves the tokens from 16 first on of Y [64 tokens x headdim] in a box of shared memory; x^T is theirs.
template <int STEPS>
__device__ __forceinline__ void finish_output(const HeadD& d, float (&y)[8 * STEPS], const FragmentA<X> (&x)[STEPS], int first, const unsigned char* x_box,
                                              unsigned char* box) {
  if constexpr (D_KIND > 0) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = unpack(x[k].pair[i]);
        y[8 * k + 2 * i] += d.of_row[i % 2] * v.x;
        y[8 * k + 2 * i + 1] += d.of_row[i % 2] * v.y;
      }
  }
  if constexpr (HAS_Z) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      const FragmentA<X> z = load_transposed(x_box + (Z_OFFSET - X_OFFSET), first + k);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 gate = silu(unpack(z.pair[i]));
        y[8 * k + 2 * i] *= gate.x;
        y[8 * k + 2 * i + 1] *= gate.y;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < STEPS; ++k) {
    const float* v = y + 8 * k;
    stmatrix_x4_trans(transposed_at(box, first + k), pack<X>(v[0], v[1]).bits, pack<X>(v[2], v[3]).bits, pack<X>(v[4], v[5]).bits, pack<X>(v[6], v[7]).bits);
  }
  fence_proxy_async();
}

// Stores the rows of a box that are the sequence's, element by element: what follows is the next sequence's. By `threads` threads, a multiple
// of eight, of which this is `thread`.
__device__ __forceinline__ void store_rows(const ForwardArgs& args, const Segment& s, const unsigned char* box, int head, int token, int thread, int threads) {
  X* to = static_cast<X*>(args.out) + s.row * args.out_strides.batch + (s.first + token + thread / 8) * args.out_strides.token +
          head * args.out_strides.head + thread % 8 * 8;
#pragma unroll 1
  for (int row = thread / 8; row < s.tokens - token; row += threads / 8, to += threads / 8 * args.out_strides.token) {
    const uint4 v = *reinterpret_cast<const uint4*>(box + swizzled(row, thread % 8));
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (thread % 8 * 8 + j < HEADDIM) to[j] = {static_cast<unsigned short>(words[j / 2] >> 16 * (j % 2))};
  }
}
__device__ __forceinline__ bool ends_inside(const Segment& s, int token) { return PACKED && s.tokens - token < CHUNK; }

// Who stores Y. That of a lone head goes to a warp of the producer that has nothing to do, and its consumer waits neither for all of its warps nor
// for the store's start: 4 % of 1 x 8192 x 128 heads. With two that were 4 % more, of which ncu says only that all wait longer for each other.
constexpr bool STORES_APART = HEADS_BLOCK == 1;

// The consumer's warpgroup stores a box. The box was stored from two calls ago: the thread that starts the stores has seen to it before the barrier
// of the last call.
__device__ __forceinline__ void store_output(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, int head, int token,
                                             const unsigned char* box, int barrier) {
  const bool stores = threadIdx.x % 128 == 0;
  if (stores) bulk_wait_group_read<0>();
  bar_sync(barrier, 128);  // rows are whole
  if (head >= end_head(s)) return;
  if (ends_inside(s, token)) {
    store_rows(args, s, box, head, token, threadIdx.x % 128, 128);
  } else if (stores) {
    tma_store_4d(&maps.out, 0, head, s.first + token, s.row, smem_address(box));
    bulk_commit_group();
  }
}

// The store warp's part.
struct OutputStore {
  const ForwardArgs& args;
  const TensorMaps& maps;
  const Segment& s;
  const unsigned char* const boxes;
  const OutputBarriers barriers;
  RingPosition<OUTPUT_SLOTS> at;

  __device__ __forceinline__ static bool is_here() { return STORES_APART && threadIdx.x / 32 == PRODUCER_THREADS / 32 - 2; }

  // Y of the chunk at `token`. Chunks come one after the other.
  __device__ __forceinline__ void store(int token) {
    wait_barrier(barriers.full(at.stage), at.parity);
    const unsigned char* box = boxes + at.stage * BOX_BYTES;
    const int head = first_head(s);
    if (ends_inside(s, token)) {
      store_rows(args, s, box, head, token, threadIdx.x % 32, 32);
      __syncwarp();
    } else {
      one_thread_if(true, [&] {
        tma_store_4d(&maps.out, 0, head, s.first + token, s.row, smem_address(box));
        bulk_commit_group();
      });
    }
    one_thread_if(true, [&] {
      bulk_wait_group_read<0>();
      mbarrier_arrive(barriers.empty(at.stage));
    });
    at.advance();
  }
};

// The score warpgroup's part: S of every chunk and head of the segment. The ring is read from `at`.
__device__ __forceinline__ void make_scores(const Segment& s, const unsigned char* ring, unsigned char* tiles, const Barriers& barriers,
                                            const ScoreBarriers& score_barriers, RingPosition<STAGES>& at) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int row = warp * 16 + lane % 16;
  const int chunks = (s.tokens + CHUNK - 1) / CHUNK;
  RingPosition<SCORE_SLOTS> to;
  // One chunk after the other: to start the next one's product before this one's decay would keep two stages of the ring.
  for (int chunk = 0; chunk < chunks; ++chunk, at.advance()) {
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    wait_barrier(barriers.full(at.stage), at.parity);
    float scores[32];  // raw C B^T, 64 rows x 64 tokens
    wgmma_fence();
    start_product_over_dstate(scores, stage, stage + B_OFFSET);
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll 1
    for (int h = 0; h < HEADS; ++h) {
#pragma unroll 1
      for (int set = 0; set < SETS; ++set) {
        wait_barrier(score_barriers.empty(set, to.stage), to.parity ^ 1);
        const unsigned tile = smem_address(score_tile(tiles, set, to.stage));
        decay_scores<true>(scores, vectors_of(stage, set * HEADS + h), threadIdx.x, 0, [&](int k, const FragmentA<X>& a) {
          stmatrix_x4(tile + swizzled(row, 2 * k + lane / 16), a.pair[0].bits, a.pair[1].bits, a.pair[2].bits, a.pair[3].bits);
        });
        fence_proxy_async();
        arrive_warp(score_barriers.full(set, to.stage));
      }
      to.advance();
    }
    arrive_warp(barriers.empty(at.stage));
  }
}

// Two slices: adds both parts of Y^T, each consumer for half of the tokens, which are `own` then. Each writes what is the other's, and waits: before,
// until that was read which it has written a chunk ago.
__device__ __forceinline__ void exchange_output(const float (&y)[32], float (&own)[16], int slice, float4* place, bool written_before) {
  constexpr int WRITTEN = WARPGROUPS + 1, READ = WARPGROUPS + 2, THREADS_OF_BOTH = 256;
  const int thread = threadIdx.x % 128;
  if (written_before) bar_sync(READ, THREADS_OF_BOTH);
  float4* to = place + slice * 512 + thread;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* low = y + 4 * i;
    const float* high = low + 16;
    to[i * 128] = slice == 0 ? make_float4(high[0], high[1], high[2], high[3]) : make_float4(low[0], low[1], low[2], low[3]);
  }
  bar_sync(WRITTEN, THREADS_OF_BOTH);
  const float4* from = place + (slice ^ 1) * 512 + thread;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* low = y + 4 * i;
    const float* high = low + 16;
    const float4 other = from[i * 128];
    own[4 * i] = (slice == 0 ? low[0] : high[0]) + other.x;
    own[4 * i + 1] = (slice == 0 ? low[1] : high[1]) + other.y;
    own[4 * i + 2] = (slice == 0 ? low[2] : high[2]) + other.z;
    own[4 * i + 3] = (slice == 0 ? low[3] : high[3]) + other.w;
  }
}

// The consumer's part: Y of every chunk of the segment, and the state at its end, from the state at its start. The ring is read from `at`; Y
// goes through the boxes at `output`, all consumers', behind which slices have their place of exchange.
__device__ __forceinline__ void forward_segment(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, const unsigned char* ring,
                                                unsigned char* tiles, unsigned char* output, const Barriers& barriers,
                                                const ScoreBarriers& score_barriers, const OutputBarriers& output_barriers, int consumer, const HeadD (&d)[HEADS], RingPosition<STAGES>& at,
                                                float (&state)[HEADS][STATE_REGISTERS]) {
  static_assert(SCORE_SLOTS == OUTPUT_SLOTS, "one position for both");
  static_assert(SLICES == 1 || (HEADS_BLOCK == 1 && STORES_APART), "two slices of one head");
  const int lane = threadIdx.x % 32, set = heads_of(consumer), slice = slice_of(consumer);
  RingPosition<SCORE_SLOTS> from;
  for (int token = 0; token < s.tokens; token += CHUNK, at.advance()) {
    const unsigned char* stage = ring + at.stage * STAGE_BYTES;
    wait_barrier(barriers.full(at.stage), at.parity);
#pragma unroll
    for (int h = 0; h < HEADS; ++h, from.advance()) {
      const Vectors v = vectors_of(stage, set * HEADS + h);
      const unsigned char* x_box = stage + X_OFFSET + (set * HEADS + h) * BOX_BYTES;
      float y[32];  // Y^T, 64 headdim rows x 64 tokens
      FragmentA<X> weighted_x[4];
      load_transposed(weighted_x, x_box);
      weigh(weighted_x, weighted_x, v.w());
      start_state_products(y, state[h], weighted_x, stage, slice, v);
      float2 rise[8];
#pragma unroll
      for (int t = 0; t < 8; ++t) rise[t] = *reinterpret_cast<const float2*>(v.rise() + t * 8 + lane % 4 * 2);
      wgmma_wait_group<1>();  // H C^T
      FragmentA<X> x[4];  // loaded anew: there are no registers for it beside H
      load_transposed(x, x_box);
#pragma unroll
      for (int t = 0; t < 8; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) y[4 * t + i] *= i % 2 ? rise[t].y : rise[t].x;

      unsigned char* box = output + (set * OUTPUT_SLOTS + from.stage) * BOX_BYTES;
      const auto add_scores = [&](auto& own) {  // those of its tokens
        wait_barrier(score_barriers.full(set, from.stage), from.parity);
        const WgmmaDescriptor<128> scores(smem_address(score_tile(tiles, set, from.stage)) + slice * (BOX_BYTES / SLICES), 0);
        pin(own);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) multiply_registers<0>(own, x[k], scores.at(k * 32), 1);
        wgmma_commit_group();
        wgmma_wait_group<0>();  // x^T S^T and the state update
        arrive_warp(score_barriers.empty(set, from.stage));
        if (!HAS_Z && h == HEADS - 1) arrive_warp(barriers.empty(at.stage));
        if constexpr (STORES_APART) wait_barrier(output_barriers.empty(from.stage), from.parity ^ 1);
      };
      if constexpr (SLICES == 1) {
        add_scores(y);
        finish_output(d[h], y, x, 0, x_box, box);
      } else {
        float own[16];
        exchange_output(y, own, slice, reinterpret_cast<float4*>(output + OUTPUT_BYTES), token > 0);
        add_scores(own);
        const FragmentA<X> own_x[2] = {slice == 0 ? x[0] : x[2], slice == 0 ? x[1] : x[3]};
        finish_output(d[h], own, own_x, slice * 2, x_box, box);
      }
      if constexpr (STORES_APART) {
        arrive_warp(output_barriers.full(from.stage));
      } else {
        store_output(args, maps, s, first_head(s) + consumer * HEADS + h, token, box, consumer + 1);
      }
      if (HAS_Z && h == HEADS - 1) arrive_warp(barriers.empty(at.stage));
    }
  }
  if (!STORES_APART && threadIdx.x % 128 == 0) bulk_wait_group_read<0>();  // before the block's shared memory is another's
}
