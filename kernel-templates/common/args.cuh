// What every kernel is given. Mirrored field by field in crates/mamba2-cuda/src/args.rs; the size is asserted on both sides.
#pragma once

using int64 = long long;

// Element strides of [batch, seqlen, heads or groups, innermost]; the innermost axis is contiguous.
struct Strides {
  int64 batch;
  int64 token;
  int64 head;
};

// A number known to the host, to divide by without a division.
struct Divisor {
  unsigned value;
  unsigned multiplier;  // 2^shift / value rounded up; shift is 31 + ceil(log2(value)), below 2^31: 31 for 1, at most 62
  unsigned shift;
  // n / value, n below 2^31.
  __device__ __forceinline__ unsigned divide(unsigned n) const { return static_cast<unsigned>(static_cast<unsigned long long>(n) * multiplier >> shift); }
};

// What says where a block works, and what its first loads wait for, is in the first 128 bytes: see StepArgs.
struct ForwardArgs {
  const void* dt;         // [batch, seqlen, nheads], DT_DTYPE
  const float* A;         // [nheads]
  const float* dt_bias;   // [nheads], or null
  const int* cu_seqlens;  // [sequences + 1], or null
  Strides dt_strides;
  int segment;  // tokens of a segment; 0: a block takes a whole sequence
  int seqlen;
  int nheads;
  int heads_per_group;
  int sequences;
  int chunk_slots;
  int scanned;         // 1: segment_scan turns what segments add into states; 0: the forward pass adds them up itself
  Divisor chunks_per_row;    // chunk slots, or segments, of one batch row, unset when packed; but the blocks of a chain in any case
  Divisor ngroups;
  Divisor blocks_per_group;  // of this launch, in one segment; Hopper kernels only
  float dt_min;
  float dt_max;
  int64 work_items;            // below 2^31
  const void* x;               // [batch, seqlen, nheads, headdim], X_DTYPE
  const void* B;               // [batch, seqlen, ngroups, dstate], X_DTYPE
  const void* C;               // as B
  const float* D;              // [nheads] or [nheads, headdim], or null
  const void* z;               // as x, or null
  const void* initial_states;  // [sequences, nheads, headdim, dstate], INITIAL_DTYPE, or null
  void* out;                   // as x
  void* final_states;          // [sequences, nheads, headdim, dstate], FINAL_DTYPE, or null
  float* dt_out;               // workspace, see launch.rs
  float* da_cumsum;            // workspace
  float* state_weight;         // workspace
  void* states;                // workspace: [slots, nheads, headdim, STATES_ROW], X_DTYPE; of segments [slots, nheads, STATE_ELEMS], float32
                               // in the order of common/sm90_chunk.cuh
  unsigned long long* flags;   // workspace, [slots, nheads, slices], see FLAG_READERS
  unsigned long long call;     // another number for each call, its lowest 16 bits zero
  Strides x_strides;
  Strides b_strides;
  Strides c_strides;
  Strides z_strides;
  Strides out_strides;
  int64 initial_strides[3];  // sequence, head, headdim
  int64 final_strides[3];    // sequence, head, headdim
  int64 d_head_stride;
};
static_assert(sizeof(ForwardArgs) == 18 * 8 + 18 * 8 + 6 * 8 + 2 * 8 + 18 * 4, "args.rs mirrors this struct");

// A flag is `call` when what it stands for is there, plus the number of blocks that have done with it; zero, or whatever the workspace held, before.
constexpr unsigned long long FLAG_READERS = 0xffff;

// Strides of a row's batch and head axes.
struct RowStrides {
  int64 batch;
  int64 head;
};

// All that a step of one token reads, but for the limits of dt, is in the first 240 bytes, what the first loads wait for in the first
// 48: parameters begin at byte 0x210, and constants that are not cached come 256 bytes at a time, then 64. Innermost axes are contiguous:
// heads of dt and of a D of rank 1, and the indices, have no stride.
struct StepArgs {
  void* state;                     // [slots, nheads, headdim, dstate], STATE_DTYPE, updated in place
  int64 state_strides[3];          // slot, head, headdim
  const int* state_batch_indices;  // [batch], or null; a negative index skips the row
  int slots;
  int aligned;                     // rows of state, B and C start on vectors: see StepProblem::vector_bytes
  const void* dt;                  // [batch, tokens, nheads], DT_DTYPE
  const float* A;                  // [nheads]
  const float* dt_bias;            // [nheads], or null
  int64 dt_row_stride;
  const void* x;                   // [batch, tokens, nheads, headdim], X_DTYPE
  const void* B;                   // [batch, tokens, ngroups, dstate], X_DTYPE
  const void* C;                   // as B
  const float* D;                  // [nheads] or [nheads, headdim], or null
  const void* z;                   // as x, or null
  void* out;                       // as x
  RowStrides x_strides;
  RowStrides b_strides;
  RowStrides c_strides;
  RowStrides z_strides;
  RowStrides out_strides;
  int64 d_head_stride;             // of a D of rank 2
  Divisor heads_per_group;
  int batch;
  int tokens;
  int64 dt_token_stride;
  int64 x_token_stride;
  int64 b_token_stride;
  int64 c_token_stride;
  int64 z_token_stride;
  int64 out_token_stride;
  float dt_min;
  float dt_max;
};
static_assert(sizeof(StepArgs) == 240 + 6 * 8 + 2 * 4, "args.rs mirrors this struct");
