// What sm90_split_segment_state and sm90_split_fused_forward share: units, slices, the shared-memory ring, its producer, the state update.
//
// A unit is 64 elements of one head's headdim, a slice up to 256 elements of dstate. A block takes one slice of WARPGROUPS units, a
// consumer warpgroup each: so the state of 64 x 512 in float32, twice what a warpgroup can hold, is in two multiprocessors, and each
// reads only its half of B and C. Warpgroup 0 produces, warpgroups 1..WARPGROUPS consume; with C a last one makes S.
//
// A stage holds, in boxes of 64 rows x 64 elements with the 128-byte swizzle, in this order,
//   C  [SLICE_BOXES boxes, 64 tokens each]   (WITH_C only)
//   B  [SLICE_BOXES boxes]
//   x  [WARPGROUPS boxes, 64 tokens x a unit]
// Vectors, [VECTOR_SLOTS][VECTOR_SETS][VECTORS][64], have a ring of their own behind everything else, so that those of later chunks can be made
// while something else is waited for.
// SHARE: the two units of a block are of one head, which has one set of vectors and one S.
// Tokens past the tensor, dstate past DSTATE and headdim past HEADDIM are copied as zero, and tokens past a packed sequence are zeroed in B
// and x: NaN beyond a sequence cannot enter. Units past the group read as a neighbour or zero and are not stored.
#pragma once

constexpr int SCORE_WARPGROUPS = 0;

#include "common/sm90_states.cuh"

constexpr int SLICES = (DSTATE + 255) / 256;
constexpr int SLICE_BOXES = DSTATE_BOXES > 2 ? 4 : DSTATE_BOXES;
// The state of a thread, in pieces of 128 dstate: ptxas takes no instruction with more accumulators than a launch of 512 threads has registers.
constexpr int PIECE_BOXES = SLICE_BOXES < 2 ? 1 : 2;
constexpr int PIECE_REGISTERS = PIECE_BOXES * 32;
constexpr int PIECES = SLICE_BOXES / PIECE_BOXES;
constexpr int STATE_REGISTERS = SLICE_BOXES * 32;
constexpr int P_TILES = (HEADDIM + 63) / 64;
constexpr bool SHARE = WARPGROUPS == 2 && P_TILES % 2 == 0;
constexpr int VECTOR_SETS = SHARE ? 1 : WARPGROUPS;

MAMBA2_REQUIRE(V01, DSTATE <= 512 && (HEADDIM > 64 || DSTATE > 256), "at most two slices of dstate, and more than one slice or unit: else sm90_fused is the same");

constexpr int C_BYTES = WITH_C ? SLICE_BOXES * BOX_BYTES : 0;
constexpr int B_OFFSET = C_BYTES;
constexpr int X_OFFSET = B_OFFSET + SLICE_BOXES * BOX_BYTES;
constexpr int STAGE_BYTES = X_OFFSET + WARPGROUPS * BOX_BYTES;
constexpr int VECTOR_SLOTS = 4;
constexpr int VECTORS_OFFSET = SMEM_BYTES - VECTOR_SLOTS * VECTOR_SETS * VECTORS_BYTES;
constexpr int BARRIERS_BYTES = 1024;
constexpr int TAIL_BARRIER_OFFSET = 496;
constexpr int SEGMENT_OFFSET = 896;  // behind the barriers: the block's Segment, which would cost registers
static_assert(SEGMENT_OFFSET + sizeof(Segment) <= BARRIERS_BYTES);

// What the tokens of a head have in common, for each set of vectors, read anew for each chunk: in registers it would be too much.
struct Constants {
  float a, bias, d;
  int tokens;  // of the segment, 0 for a unit past the group
};
constexpr int CONSTANTS_OFFSET = 832;
static_assert(CONSTANTS_OFFSET >= TAIL_BARRIER_OFFSET + 8 && CONSTANTS_OFFSET + 2 * sizeof(Constants) <= SEGMENT_OFFSET);
__device__ __forceinline__ volatile Constants& constants_of(unsigned char* ring, int set) {
  return reinterpret_cast<volatile Constants*>(ring - BARRIERS_BYTES + CONSTANTS_OFFSET)[set];
}

// Registers after reallocation, in steps of eight; a thread has at most 240.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS > 248 ? 248 : 65536 / THREADS / 8 * 8;
// Where the consumers can do with 208, the producer has room to hide latencies of shared memory.
constexpr bool ROOMY = SLICES > 1 && X_DTYPE == 0 && (INITIAL_DTYPE < 0 || INITIAL_DTYPE == 2);
constexpr int PRODUCER_REGISTERS = !WITH_C ? 56 : ROOMY ? 88 : 72;
constexpr int CONSUMER_SHARE = (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * PRODUCER_THREADS) / (128 * WARPGROUPS) / 8 * 8;
constexpr int CONSUMER_REGISTERS = CONSUMER_SHARE > 240 ? 240 : CONSUMER_SHARE;

// The block's slice of dstate, and what one of its consumers works on.
__device__ __forceinline__ int slice_of(const Segment& s) { return s.block % SLICES; }
struct Unit {
  int head;
  int p0;  // first headdim element
  bool valid;
};
__device__ __forceinline__ Unit locate_unit(const Segment& s, int consumer) {
  const int unit = s.block / SLICES * WARPGROUPS + consumer;
  const int head = s.first_head + unit / P_TILES;
  return {head, unit % P_TILES * 64, head < s.end_head};
}

// A full and an empty barrier per stage and per slot of vectors, and one for the chunk in which a packed sequence ends.
struct Barriers {
  unsigned base;
  __device__ __forceinline__ unsigned full(int stage) const { return base + stage * 16; }
  __device__ __forceinline__ unsigned empty(int stage) const { return base + stage * 16 + 8; }
  __device__ __forceinline__ unsigned vectors_full(int chunk) const { return base + 128 + chunk % VECTOR_SLOTS * 16; }
  __device__ __forceinline__ unsigned vectors_empty(int chunk) const { return base + 128 + chunk % VECTOR_SLOTS * 16 + 8; }
  __device__ __forceinline__ unsigned tail() const { return base + TAIL_BARRIER_OFFSET; }
  __device__ __forceinline__ void init() const {
    // By a thread of a warp each: one init waits for the one before.
    constexpr int READERS = 4 * (WARPGROUPS + (WITH_C ? 1 : 0)) * WARP_ARRIVALS;
    if (threadIdx.x == 0) {
      for (int s = 0; s < STAGES; ++s) {
        mbarrier_init(full(s), 1);
        mbarrier_init(empty(s), READERS);
      }
      mbarrier_init(tail(), 1);
      fence_mbarrier_init();
    } else if (threadIdx.x == 32) {
      for (int s = 0; s < VECTOR_SLOTS; ++s) {
        mbarrier_init(vectors_full(s), VECTOR_SETS * WARP_ARRIVALS);
        mbarrier_init(vectors_empty(s), READERS);
      }
      fence_mbarrier_init();
    }
  }
};
static_assert(STAGES * 16 <= 128);
__device__ __forceinline__ int parity_of_vectors(int chunk) { return chunk / VECTOR_SLOTS % 2; }

// The vectors of a set, of the at-th chunk.
__device__ __forceinline__ float* vectors_at(unsigned char* ring, int at, int set) {
  return reinterpret_cast<float*>(ring - BARRIERS_BYTES + VECTORS_OFFSET) + (at % VECTOR_SLOTS * VECTOR_SETS + set) * (VECTORS * CHUNK);
}

// Warp w of the producer makes the vectors of set w. A third starts the copies: the last one has the most of S to make.
constexpr int COPY_WARP = 2;
static_assert(VECTOR_SETS <= COPY_WARP);
constexpr int PRODUCER_BARRIER = 3;  // behind the consumers'
__device__ __forceinline__ bool copies() { return threadIdx.x / 32 == COPY_WARP; }

// Calls the tensor maps, by the thread that will need them.
__device__ __forceinline__ void call_maps(const TensorMaps& maps) {
  one_thread_if(copies(), [&] {
    prefetch_tensor_map(&maps.b);
    prefetch_tensor_map(&maps.x);
    if (WITH_C) prefetch_tensor_map(&maps.c);
  });
}

// Copies one chunk's boxes; one thread.
__device__ __forceinline__ void copy_stage(const TensorMaps& maps, const Segment& s, int token, unsigned stage, unsigned full) {
  const int row = s.row, group = s.group, first_box = slice_of(s) * SLICE_BOXES;
  mbarrier_arrive_expect_tx(full, STAGE_BYTES);
#pragma unroll
  for (int box = 0; box < SLICE_BOXES; ++box) {
    tma_load_4d(stage + B_OFFSET + box * BOX_BYTES, &maps.b, (first_box + box) * 64, group, token, row, full);
    if (WITH_C) tma_load_4d(stage + box * BOX_BYTES, &maps.c, (first_box + box) * 64, group, token, row, full);
  }
#pragma unroll
  for (int i = 0; i < WARPGROUPS; ++i) {
    const Unit unit = locate_unit(s, i);
    tma_load_4d(stage + X_OFFSET + i * BOX_BYTES, &maps.x, unit.p0, unit.head, token, row, full);
  }
}

// Zeroes the rows of B and x from `row` on: what follows a packed sequence is another's, or NaN. Rows past the end of C reach only rows of Y
// that are not stored. The whole warpgroup.
__device__ __forceinline__ void clear_tail(unsigned char* stage, int row) {
#pragma unroll 1
  for (int at = row * 128 + threadIdx.x * 16; at < BOX_BYTES; at += PRODUCER_THREADS * 16)
#pragma unroll
    for (int box = 0; box < SLICE_BOXES + WARPGROUPS; ++box)  // x follows B
      *reinterpret_cast<uint4*>(stage + B_OFFSET + box * BOX_BYTES + at) = make_uint4(0, 0, 0, 0);
  fence_proxy_async();
}

// Fills the ring, chunk after chunk of the segment, the last first if BACKWARD; then w decays to the segment's end. For the warps of one
// warpgroup.
template <bool BACKWARD>
struct Producer {
  bool makes;
  float after = 0.f;
  int copied = STAGES;  // chunks, in the warp that copies
  const RawDt* dt_at;   // of the next chunk, in the warps that make vectors

  // Anew at each use, because S leaves few registers.
  __device__ __forceinline__ static int thread() { return WITH_C ? volatile_tid_x() : static_cast<int>(threadIdx.x); }
  __device__ __forceinline__ static int warp() { return thread() / 32 % 4; }
  __device__ __forceinline__ static int token_of(const Segment& s, int copy) {
    return (BACKWARD ? (s.tokens + CHUNK - 1) / CHUNK - 1 - copy : copy) * CHUNK;
  }
  __device__ __forceinline__ static bool ends_inside(const Segment& s, int token) { return PACKED && s.tokens - token < CHUNK; }
  __device__ __forceinline__ static void copy(const TensorMaps& maps, const Segment& s, unsigned char* ring, int copy, unsigned barrier) {
    copy_stage(maps, s, s.first + token_of(s, copy), smem_address(ring + copy % STAGES * STAGE_BYTES), barrier);
  }
  // The copies of the first chunks are under way before anything waits for device memory.
  __device__ __forceinline__ Producer(const ForwardArgs& args, const TensorMaps& maps, const Segment& s, unsigned char* ring, const Barriers& barriers)
      : makes(warp() < VECTOR_SETS) {
    dt_at = static_cast<const RawDt*>(args.dt) + s.row * args.dt_strides.batch + (s.first + token_of(s, 0) + 2 * (thread() % 32)) * args.dt_strides.token +
            locate_unit(s, warp()).head * args.dt_strides.head;
#pragma unroll 1
    for (int at = 0; at < STAGES; ++at)
      one_thread_if(copies() && at * CHUNK < s.tokens && !ends_inside(s, token_of(s, at)), [&] { copy(maps, s, ring, at, barriers.full(at)); });
    if (makes) {
      constants_of(ring, warp()).tokens = locate_unit(s, warp()).valid ? s.tokens : 0;
      __syncwarp();
    }
  }
  // Starts the next copy if its stage is empty, or, with `wait`, once it is.
  __device__ __forceinline__ void copy_next(const TensorMaps& maps, const Segment& s, unsigned char* ring, const Barriers& barriers, bool wait = false) {
    const int slot = copied % STAGES, token = token_of(s, copied);
    if (!copies() || (BACKWARD ? token < 0 : token >= s.tokens)) return;
    const unsigned empty = barriers.empty(slot), parity = copied / STAGES % 2 ^ 1;
    if (wait) wait_barrier(empty, parity);
    const bool now = __shfl_sync(0xffffffffu, wait || mbarrier_test_wait_parity(empty, parity), 0);
    one_thread_if(now, [&] { copy(maps, s, ring, copied, ends_inside(s, token) ? barriers.tail() : barriers.full(slot)); });
    copied += now;
  }
  // After the first dt are asked for, because this waits for device memory.
  __device__ __forceinline__ void load_constants(const ForwardArgs& args, const Segment& s, unsigned char* ring) const {
    if (!makes) return;
    const Unit unit = locate_unit(s, warp());
    const float a = unit.valid ? args.A[unit.head] * LOG2_E : 0.f, bias = HAS_DT_BIAS && unit.valid ? args.dt_bias[unit.head] : 0.f;
    const float d = WITH_C && D_KIND == 1 && unit.valid ? args.D[unit.head * args.d_head_stride] : 0.f;
    volatile Constants& kept = constants_of(ring, warp());
    kept.a = a;
    kept.bias = bias;
    kept.d = d;
    __syncwarp();
  }
  // This lane's two dt of the at-th chunk. Chunks come one after the other.
  __device__ __forceinline__ void load_dt(const ForwardArgs& args, const Segment& s, unsigned char* ring, int at, RawDt (&to)[2]) {
    const int tokens = makes ? constants_of(ring, warp()).tokens : 0;
    const int token = token_of(s, at) + 2 * (thread() % 32);
#pragma unroll
    for (int e = 0; e < 2; ++e) to[e] = token >= 0 && e < tokens - token ? dt_at[e * args.dt_strides.token] : RawDt{};
    dt_at += (BACKWARD ? -CHUNK : CHUNK) * args.dt_strides.token;
  }
  // The vectors of the at-th chunk, from its dt.
  __device__ __forceinline__ void make(const ForwardArgs& args, const Segment& s, unsigned char* ring, const Barriers& barriers, int at, const RawDt (&raw)[2]) {
    if (!makes) return;
    wait_barrier(barriers.vectors_empty(at), parity_of_vectors(at) ^ 1);
    const int lane = thread() % 32;
    const volatile Constants& kept = constants_of(ring, warp());
    const float a = kept.a, bias = HAS_DT_BIAS ? kept.bias : 0.f;
    const float whole = make_vectors(args, raw, a, bias, kept.tokens - token_of(s, at) - 2 * lane, after,
                                     reinterpret_cast<float2*>(vectors_at(ring, at, warp())) + lane);
    if constexpr (BACKWARD) after += whole;
    arrive_warp(barriers.vectors_full(at));
  }
  // Sees to it that the at-th chunk will be there. The whole warpgroup.
  __device__ __forceinline__ void provide(const TensorMaps& maps, const Segment& s, unsigned char* ring, const Barriers& barriers, int at) {
    const int token = token_of(s, at);
    const bool ends = ends_inside(s, token);
    if (ends && at < STAGES) one_thread_if(copies(), [&] { copy(maps, s, ring, at, barriers.tail()); });
    if (copied <= at) copy_next(maps, s, ring, barriers, true);
    if (ends) {
      wait_barrier(barriers.tail(), 0);  // a segment ends once
      clear_tail(ring + at % STAGES * STAGE_BYTES, s.tokens - token);
      bar_sync(PRODUCER_BARRIER, PRODUCER_THREADS);
      if (threadIdx.x == 0) mbarrier_arrive(barriers.full(at % STAGES));  // in place of the copies
    }
  }
};

// Addresses are computed anew for each chunk where the state leaves few registers.
constexpr bool TIGHT = STATE_REGISTERS >= 128 && WITH_C;
__device__ __forceinline__ int thread_index() { return TIGHT ? volatile_tid_x() : static_cast<int>(threadIdx.x); }

// Where ldmatrix and stmatrix, transposing, find this lane's row of the warp's 16 headdim columns and the tokens 16 k .. 16 k + 15 of a box.
__device__ __forceinline__ unsigned transposed_at(const unsigned char* box, int k) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  return smem_address(box) + swizzled(k * 16 + lane % 8 + lane / 16 * 8, warp * 2 + lane / 8 % 2);
}

// An x or z box transposed as operand A: 64 headdim rows, 16 a warp; K = the tokens 16 k .. 16 k + 15. Also the map of an
// accumulator [headdim][tokens].
__device__ __forceinline__ FragmentA<X> load_transposed(const unsigned char* box, int k) {
  unsigned r[4];
  ldmatrix_x4_trans_at(r, transposed_at(box, k));
  return {{{r[0]}, {r[1]}, {r[2]}, {r[3]}}};
}

// (w x)^T from x^T.
__device__ __forceinline__ void weigh(FragmentA<X> (&x)[4], const float* w) {
  const int lane = thread_index() % 32;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float2 even = *reinterpret_cast<const float2*>(w + k * 16 + lane % 4 * 2);
    const float2 odd = *reinterpret_cast<const float2*>(w + k * 16 + 8 + lane % 4 * 2);
    scale_along_k(x[k], even, odd);
  }
}

// Starts H += (w x)^T B, H already scaled by exp2(G_last). The caller commits and waits.
__device__ __forceinline__ void start_state_update(float (&state)[PIECES][PIECE_REGISTERS], const FragmentA<X> (&a)[4], const unsigned char* b_boxes) {
  const WgmmaDescriptor<128> b(smem_address(b_boxes), BOX_BYTES);
#pragma unroll
  for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply_registers<1>(state[piece], a[k], b.at(piece * PIECE_BOXES * BOX_BYTES + k * 16 * 128), 1);
}
