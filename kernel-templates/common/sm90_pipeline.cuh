// What sm90_segment_state, sm90_fused_forward and sm90_chain_forward share: work items, the shared-memory ring, its producer, and the state update.
//
// A work item is one segment of one sequence for HEADS_BLOCK heads of a group. Warpgroup 0 produces, warpgroups 1..WARPGROUPS
// consume, HEADS heads each; with C a last warpgroup makes S for all of them (common/sm90_forward.cuh). With C and more than 128 of dstate two
// consumers share a head, half of dstate (a slice) each.
//
// Shared-memory tiles are boxes of 64 rows x 64 elements with the 128-byte swizzle of wgmma: row r is 128 bytes, its 16-byte unit u
// lies at u ^ (r % 8). A stage holds, in this order,
//   C  [DSTATE_BOXES boxes, 64 tokens each]      (WITH_C only)
//   B  [DSTATE_BOXES boxes]
//   x  [HEADS_BLOCK boxes, 64 tokens x headdim]
//   z  [HEADS_BLOCK boxes]                        (WITH_C and HAS_Z only)
//   vectors  [HEADS_BLOCK][VECTORS][64]
// Tokens past the tensor, dstate past DSTATE and headdim past HEADDIM are copied as zero, and tokens past a packed sequence are zeroed in B
// and x: NaN beyond a sequence cannot enter.
#pragma once

constexpr int SCORE_WARPGROUPS = WITH_C ? 1 : 0;

#include "common/sm90_states.cuh"

constexpr int SLICES = WITH_C && WARPGROUPS == 2 && DSTATE > 128 ? 2 : 1;  // launch.rs, sm90_slices
constexpr int SLICE_BYTES = DSTATE_BOXES / SLICES * BOX_BYTES;               // of B or C
constexpr int HEADS_BLOCK = HEADS * WARPGROUPS / SLICES / HALVES;
constexpr int STATE_REGISTERS = DSTATE_PADDED / SLICES / 2;  // of a thread, for one head or its slice

MAMBA2_REQUIRE(P02, HEADDIM <= 64 && (DSTATE_BOXES == 1 || DSTATE_BOXES == 2 || DSTATE_BOXES == 4), "one 64-row tile of headdim, 64, 128 or 256 of dstate");

constexpr int C_BYTES = WITH_C ? DSTATE_BOXES * BOX_BYTES : 0;
constexpr int B_OFFSET = C_BYTES;
constexpr int X_OFFSET = B_OFFSET + DSTATE_BOXES * BOX_BYTES;
constexpr bool WITH_Z = WITH_C && HAS_Z;
constexpr int Z_OFFSET = X_OFFSET + HEADS_BLOCK * BOX_BYTES;
constexpr int Z_BYTES = WITH_Z ? HEADS_BLOCK * BOX_BYTES : 0;
constexpr int VECTORS_OFFSET = Z_OFFSET + Z_BYTES;
constexpr int STAGE_BYTES = VECTORS_OFFSET + (HEADS_BLOCK * VECTORS_BYTES + 1023) / 1024 * 1024;
constexpr int BARRIERS_BYTES = 1024;
constexpr int TAIL_BARRIER_OFFSET = 496;
constexpr int SEGMENT_OFFSET = 896;  // behind the barriers: the block's Segment, which would cost registers
static_assert(SEGMENT_OFFSET + sizeof(Segment) <= BARRIERS_BYTES);
// Two blocks share a multiprocessor where the states of a lone consumer warpgroup are small enough.
constexpr int BLOCKS_PER_SM = !WITH_C && WARPGROUPS == 1 && HEADS * STATE_REGISTERS <= 64 ? 2 : 1;
// Registers after reallocation: what a block is launched with, moved from the producer to the
// consumers. In steps of eight; a thread has at most 240. rules.rs computes the same.
constexpr int LAUNCH_REGISTERS = 65536 / (BLOCKS_PER_SM * THREADS) > 248 ? 248 : 65536 / (BLOCKS_PER_SM * THREADS) / 8 * 8;
constexpr int PRODUCER_REGISTERS = WITH_C && WARPGROUPS == 1 ? 72 : 56;  // a lone consumer cannot have more than 240 anyway
constexpr int SCORE_REGISTERS = 104;
constexpr int CONSUMER_SHARE = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * PRODUCER_THREADS - SCORE_REGISTERS * SCORE_WARPGROUPS * 128) / (128 * WARPGROUPS) / 8 * 8;
constexpr int CONSUMER_REGISTERS = CONSUMER_SHARE > 240 ? 240 : CONSUMER_SHARE;

MAMBA2_REQUIRE(P03, HEADS * STATE_REGISTERS + (WITH_C ? 96 + (HEADS > 1 ? STATE_REGISTERS / 2 + (HAS_Z && X_DTYPE == 1 ? 24 : 0) : 0) : 40 + 16 * HEADS) <= CONSUMER_REGISTERS,
               "the states of a warpgroup, and what the products need beside them, must stay in registers");

// A consumer's heads are those of this number, HEADS each, and of them it has the slice of that.
__device__ __forceinline__ int heads_of(int consumer) { return consumer / SLICES; }
__device__ __forceinline__ int slice_of(int consumer) { return consumer % SLICES; }
__device__ __forceinline__ int first_dstate(int slice) { return slice * (DSTATE_PADDED / SLICES); }

__device__ __forceinline__ int first_head(const Segment& s) { return s.first_head + s.block * HEADS_BLOCK; }
__device__ __forceinline__ int end_head(const Segment& s) { return s.end_head; }

// A full and an empty barrier per stage, and one for the chunk in which a packed sequence ends.
struct Barriers {
  unsigned base;
  __device__ __forceinline__ unsigned full(int stage) const { return base + stage * 16; }
  __device__ __forceinline__ unsigned empty(int stage) const { return base + stage * 16 + 8; }
  __device__ __forceinline__ unsigned tail() const { return base + TAIL_BARRIER_OFFSET; }
  __device__ __forceinline__ void init() const {
#pragma unroll 1
    for (int s = 0; s < STAGES; ++s) {
      mbarrier_init(full(s), 1 + PRODUCER_THREADS / 32 * WARP_ARRIVALS);  // the copies, and each warp's vectors
      mbarrier_init(empty(s), 4 * (WARPGROUPS + SCORE_WARPGROUPS) * WARP_ARRIVALS);
    }
    mbarrier_init(tail(), 1);
    fence_mbarrier_init();
    fence_proxy_async();
  }
};

// The warp of the thread that makes the ring's barriers and starts the copies: mostly it has no vectors to make.
__device__ __forceinline__ bool copies() { return threadIdx.x / 32 == PRODUCER_THREADS / 32 - 1; }

// Calls the tensor maps, by that thread.
__device__ __forceinline__ void call_maps(const TensorMaps& maps) {
  one_thread_if(copies(), [&] {
    prefetch_tensor_map(&maps.b);
    prefetch_tensor_map(&maps.x);
    if (WITH_C) prefetch_tensor_map(&maps.c);
    if (WITH_Z) prefetch_tensor_map(&maps.z);
  });
}

// Copies one chunk's boxes; one thread. With copy_c, those of C and z too.
__device__ __forceinline__ void copy_stage(const TensorMaps& maps, const Segment& s, int token, unsigned stage, unsigned full, bool copy_c) {
  mbarrier_arrive_expect_tx(full, VECTORS_OFFSET - (copy_c ? 0 : C_BYTES + Z_BYTES));
#pragma unroll
  for (int box = 0; box < DSTATE_BOXES; ++box) {
    tma_load_4d(stage + B_OFFSET + box * BOX_BYTES, &maps.b, box * 64, s.group, token, s.row, full);
    if (WITH_C && copy_c) tma_load_4d(stage + box * BOX_BYTES, &maps.c, box * 64, s.group, token, s.row, full);
  }
#pragma unroll
  for (int h = 0; h < HEADS_BLOCK; ++h) {
    tma_load_4d(stage + X_OFFSET + h * BOX_BYTES, &maps.x, 0, first_head(s) + h, token, s.row, full);
    if (WITH_Z && copy_c) tma_load_4d(stage + Z_OFFSET + h * BOX_BYTES, &maps.z, 0, first_head(s) + h, token, s.row, full);
  }
}

// Zeroes the rows of B and x from `row` on: what follows a packed sequence is another's, or NaN. Rows past the end of C and z reach only
// rows of Y that are not stored. The whole producer warpgroup.
__device__ __forceinline__ void clear_tail(unsigned char* stage, int row) {
  constexpr int BOXES = DSTATE_BOXES + HEADS_BLOCK;  // x follows B
#pragma unroll 1
  for (int at = row * 128 + threadIdx.x * 16; at < BOX_BYTES; at += PRODUCER_THREADS * 16)
#pragma unroll
    for (int box = 0; box < BOXES; ++box) *reinterpret_cast<uint4*>(stage + B_OFFSET + box * BOX_BYTES + at) = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
}

// Warpgroup 0: fills the ring for every chunk of the segment, the last first if BACKWARD; then w decays to the segment's end. Warp w makes the
// vectors of head w.
template <bool BACKWARD>
struct Producer {
  static_assert(HEADS_BLOCK <= PRODUCER_THREADS / 32, "a warp makes the vectors of one head");
  static constexpr int DT_AHEAD = 4;  // chunks
  static constexpr int STEP = BACKWARD ? -CHUNK : CHUNK;
  const ForwardArgs& args;
  const TensorMaps& maps;
  const Segment s;
  const Barriers barriers;
  unsigned char* const ring;
  int token;  // of the chunk whose turn it is
  const RawDt* dt_at;
  RingPosition<STAGES> at;

  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ bool valid() const { return warp() < HEADS_BLOCK && first_head(s) + warp() < end_head(s); }
  __device__ __forceinline__ bool ends_inside(int chunk_token) const { return PACKED && s.tokens - chunk_token < CHUNK; }

  // dt of this lane's token e, `ahead` chunks after the one whose turn it is.
  __device__ __forceinline__ bool has_dt(int ahead, int e) const {
    const int of_chunk = token + ahead * STEP;
    return valid() && of_chunk >= 0 && of_chunk + 2 * lane() + e < s.tokens;
  }
  __device__ __forceinline__ const RawDt* dt_address(int ahead, int e) const { return dt_at + (ahead * STEP + e) * args.dt_strides.token; }
  __device__ __forceinline__ void load_dt(int ahead, RawDt (&to)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) to[e] = has_dt(ahead, e) ? *dt_address(ahead, e) : RawDt{};
  }
  __device__ __forceinline__ void call_dt(int ahead) const {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (has_dt(ahead, e)) prefetch_l2(dt_address(ahead, e));
  }
  __device__ __forceinline__ void copy(int chunk_token, int stage, unsigned full, bool copy_c) const {
    copy_stage(maps, s, s.first + chunk_token, smem_address(ring + stage * STAGE_BYTES), full, copy_c);
  }

  // dt is asked of device memory while the first boxes are. The ring is filled from `at`.
  __device__ __forceinline__ Producer(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, unsigned char* ring, const Barriers& barriers,
                                      const RingPosition<STAGES>& at = {})
      : args(args), maps(maps), s(s), barriers(barriers), ring(ring), token(BACKWARD ? (s.tokens - 1) / CHUNK * CHUNK : 0), at(at) {
    dt_at = static_cast<const RawDt*>(args.dt) + s.row * args.dt_strides.batch + (first_head(s) + warp()) * args.dt_strides.head +
            (s.first + token + 2 * lane()) * args.dt_strides.token;
    if (warp() >= HEADS_BLOCK) return;
#pragma unroll 1
    for (int ahead = 0; ahead < DT_AHEAD; ++ahead) call_dt(ahead);
  }

  // The chunk whose turn it is, from its dt; then `raw` is that of two chunks later, under way.
  __device__ __forceinline__ void fill(int chunk, RawDt (&raw)[2], float a, float bias, float& after, bool copy_c, int pass) {
    wait_barrier(barriers.empty(at.stage), at.parity ^ 1);
    const bool ends = ends_inside(token);
    one_thread_if(copies() && (ends || chunk >= STAGES), [&] { copy(token, at.stage, ends ? barriers.tail() : barriers.full(at.stage), copy_c); });
    unsigned char* stage = ring + at.stage * STAGE_BYTES;
    if (ends) {
      wait_barrier(barriers.tail(), pass);  // a segment ends once
      clear_tail(stage, s.tokens - token);
      if (threadIdx.x == 0) mbarrier_arrive(barriers.full(at.stage));  // in place of the copies
    }
    const RawDt now[2] = {raw[0], raw[1]};
    load_dt(2, raw);
    call_dt(DT_AHEAD);
    if (warp() < HEADS_BLOCK) {
      const float whole = make_vectors(args, now, a, bias, valid() ? s.tokens - token - 2 * lane() : 0, after,
                                       reinterpret_cast<float2*>(stage + VECTORS_OFFSET) + warp() * (VECTORS * CHUNK / 2) + lane());
      if constexpr (BACKWARD) after += whole;
    }
    arrive_warp(barriers.full(at.stage));
    at.advance();
    token += STEP;
    dt_at += STEP * args.dt_strides.token;
  }

  // All chunks, for the first time (pass 0) or the second; with copy_c, C and z of them too, and then done(token) for each whose stage has been
  // filled anew, and for the last ones at the end. Copies of the first ones are under way before anything waits for device memory. Raw dt is
  // loaded two chunks ahead, and called into L2 some chunks earlier: a loop that holds more of it in registers is unrolled further, and its
  // code, run once each, comes slower than the data.
  template <typename F>
  __device__ __forceinline__ void run(bool copy_c, int pass, F&& done) {
    if (copies()) {
      RingPosition<STAGES> to = at;
#pragma unroll 1
      for (int chunk = 0; chunk < STAGES && chunk * CHUNK < s.tokens; ++chunk, to.advance()) {
        wait_barrier(barriers.empty(to.stage), to.parity ^ 1);
        one_thread_if(!ends_inside(token + chunk * STEP), [&] { copy(token + chunk * STEP, to.stage, barriers.full(to.stage), copy_c); });
      }
    }
    RawDt even[2], odd[2];
    load_dt(0, even);
    load_dt(1, odd);
    const int head = first_head(s) + warp();
    const float a = valid() ? args.A[head] * LOG2_E : 0.f, bias = HAS_DT_BIAS && valid() ? args.dt_bias[head] : 0.f;
    float after = 0.f;
    const auto done_with = [&](int chunk) {
      if (copy_c && chunk >= 0 && chunk * CHUNK < s.tokens) done(chunk * CHUNK);
    };
#pragma unroll 1
    for (int chunk = 0; chunk * CHUNK < s.tokens; chunk += 2) {
      fill(chunk, even, a, bias, after, copy_c, pass);
      done_with(chunk - STAGES);
      if ((chunk + 1) * CHUNK >= s.tokens) break;
      fill(chunk + 1, odd, a, bias, after, copy_c, pass);
      done_with(chunk + 1 - STAGES);
    }
#pragma unroll 1
    for (int left = STAGES; left > 0; --left) done_with((s.tokens + CHUNK - 1) / CHUNK - left);
  }
};

__device__ __forceinline__ Vectors vectors_of(const unsigned char* stage, int h) {
  return {reinterpret_cast<const float*>(stage + VECTORS_OFFSET) + h * VECTORS * CHUNK};
}

// Where ldmatrix and stmatrix, transposing, find this lane's row of the warp's 16 headdim columns and the tokens 16 k .. 16 k + 15 of a box.
__device__ __forceinline__ unsigned transposed_at(const unsigned char* box, int k) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  return smem_address(box) + swizzled(k * 16 + lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2);
}

// An x or z box transposed as operand A: 64 headdim rows, 16 a warp; K = the tokens 16 k .. 16 k + 15. Also the map of an accumulator
// [headdim][tokens].
__device__ __forceinline__ FragmentA<X> load_transposed(const unsigned char* box, int k) {
  unsigned r[4];
  ldmatrix_x4_trans_at(r, transposed_at(box, k));
  return {{{r[0]}, {r[1]}, {r[2]}, {r[3]}}};
}
__device__ __forceinline__ void load_transposed(FragmentA<X> (&a)[4], const unsigned char* box) {
#pragma unroll
  for (int k = 0; k < 4; ++k) a[k] = load_transposed(box, k);
}

// (w x)^T from x^T.
__device__ __forceinline__ void weigh(FragmentA<X> (&a)[4], const FragmentA<X> (&x)[4], const float* w) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 even = *reinterpret_cast<const float2*>(w + k * 16 + lane % 4 * 2);
    const float2 odd = *reinterpret_cast<const float2*>(w + k * 16 + 8 + lane % 4 * 2);
    a[k] = x[k];
    scale_along_k(a[k], even, odd);
  }
}

// Starts H += (w x)^T B, H already scaled by exp2(G_last), B the boxes of the consumer's slice. The caller commits and waits.
template <int COUNT>
__device__ __forceinline__ void start_state_update(float (&state)[COUNT], const FragmentA<X> (&a)[4], const unsigned char* b_boxes) {
  const WgmmaDescriptor<128> b(smem_address(b_boxes), BOX_BYTES);
#pragma unroll
  for (int k = 0; k < 4; ++k) multiply_registers<1>(state, a[k], b.at(k * 16 * 128), 1);
}

// Multiplies the state by the decay of a chunk.
template <int COUNT>
__device__ __forceinline__ void scale_state(float (&state)[COUNT], const Vectors& v) {
  const float decay = ex2_approx(fminf(v.g[CHUNK - 1], 0.f));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) state[i] *= decay;
}
