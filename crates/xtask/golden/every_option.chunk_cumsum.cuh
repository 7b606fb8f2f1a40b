// Generated for chunk_cumsum on sm_90a: every constant the templates take.
#pragma once
constexpr int SM_ARCH = 90; // compute capability, major * 10 + minor
constexpr int HEADDIM = 80; // elements of x per head
constexpr int DSTATE = 256; // state size
constexpr int X_DTYPE = 1; // -1 none, 0 bf16, 1 f16, 2 f32
constexpr int DT_DTYPE = 2; // -1 none, 0 bf16, 1 f16, 2 f32
constexpr int D_KIND = 2; // 0 none, 1 [nheads], 2 [nheads, headdim]
constexpr int HAS_Z = 1; // output gated by silu(z)
constexpr int HAS_DT_BIAS = 1; // dt + dt_bias
constexpr int DT_SOFTPLUS = 1; // softplus after the bias, identity above 20
constexpr int HAS_DT_LIMIT = 1; // clamp after softplus
constexpr int INITIAL_DTYPE = 0; // dtype of initial_states, -1 none
constexpr int FINAL_DTYPE = 1; // dtype of final_states, -1 none
constexpr int PACKED = 1; // sequences packed in one row, offsets in cu_seqlens
constexpr int USE_TF32 = 0; // one TF32 product instead of three for f32
constexpr int ALIGNED = 0; // views allow 16-byte copies
constexpr int STATES_ROW = 256; // row of a chunk state in the workspace, elements
constexpr int STATE_ELEMS = 32768; // elements of a segment state in the workspace
constexpr int SEGMENTS_WITHOUT_SCAN = 4; // segments of a sequence that the forward pass adds up itself
constexpr int CHUNK_SIZE = 64; // tuned, tokens
constexpr int LAYOUT = 0; // tuned, bht: enum
constexpr int BLOCK_H = 4; // tuned, heads
constexpr int THREADS = 128; // threads per block
constexpr int SMEM_BYTES = 0; // dynamic shared memory of a block
