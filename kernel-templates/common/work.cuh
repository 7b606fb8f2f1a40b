// From a chunk slot or a sequence to its tokens. The chunk grid starts anew at each sequence.
#pragma once

#include "common/args.cuh"

struct Sequence {
  int64 row;        // index along the batch axis
  int64 first;      // first token, along the seqlen axis
  int tokens;       // 0 for an empty sequence
  int64 first_slot;  // its first chunk slot
};

__device__ __forceinline__ Sequence locate_sequence(const ForwardArgs& args, int sequence) {
  if (PACKED) {
    const int first = args.cu_seqlens[sequence];
    int end = args.cu_seqlens[sequence + 1];
    if (end > args.seqlen) end = args.seqlen;
    return {0, first, end > first ? end - first : 0, static_cast<int64>(first / CHUNK_SIZE) + sequence};
  }
  return {sequence, 0, args.seqlen, static_cast<int64>(sequence) * args.chunks_per_row.value};
}

struct Chunk {
  int64 row;    // index along the batch axis
  int64 first;  // first token, along the seqlen axis
  int tokens;   // valid tokens, 0 for a slot that holds no chunk
};

// Packed sequence s owns the slots from cu_seqlens[s] / CHUNK_SIZE + s, strictly increasing in s, at least as many as it has
// chunks; a slot's owner is found by bisection and slots past its last chunk are empty.
__device__ __forceinline__ Chunk locate_chunk(const ForwardArgs& args, int slot) {
  int sequence = PACKED ? 0 : static_cast<int>(args.chunks_per_row.divide(slot));
  if (PACKED) {
    int above = args.sequences;
    while (above - sequence > 1) {
      const int middle = (sequence + above) / 2;
      if (args.cu_seqlens[middle] / CHUNK_SIZE + middle <= slot) {
        sequence = middle;
      } else {
        above = middle;
      }
    }
  }
  const Sequence s = locate_sequence(args, sequence);
  const int64 at = (slot - s.first_slot) * CHUNK_SIZE;
  const int64 left = s.tokens - at;
  const int tokens = left < 0 ? 0 : left > CHUNK_SIZE ? CHUNK_SIZE : static_cast<int>(left);
  return {s.row, s.first + at, tokens};
}

// Index of (slot, head, token) in dt_out, da_cumsum and state_weight.
__device__ __forceinline__ int64 vector_index(int64 slot, int head, int token, int nheads) {
  return LAYOUT == 0 ? (slot * nheads + head) * CHUNK_SIZE + token : (slot * CHUNK_SIZE + token) * nheads + head;
}

// Where the low words of da_cumsum start (float32 inputs only).
__device__ __forceinline__ int64 low_offset(const ForwardArgs& args) {
  return static_cast<int64>(args.chunk_slots) * args.nheads * CHUNK_SIZE;
}
