// Generated for sm90_chain_forward on sm_90a: every constant the templates take.
#pragma once
constexpr int SM_ARCH = 90; // compute capability, major * 10 + minor
constexpr int HEADDIM = 64; // elements of x per head
constexpr int DSTATE = 128; // state size
constexpr int X_DTYPE = 0; // -1 none, 0 bf16, 1 f16, 2 f32
constexpr int DT_DTYPE = 0; // -1 none, 0 bf16, 1 f16, 2 f32
constexpr int D_KIND = 1; // 0 none, 1 [nheads], 2 [nheads, headdim]
constexpr int HAS_Z = 0; // output gated by silu(z)
constexpr int HAS_DT_BIAS = 0; // dt + dt_bias
constexpr int DT_SOFTPLUS = 0; // softplus after the bias, identity above 20
constexpr int HAS_DT_LIMIT = 0; // clamp after softplus
constexpr int INITIAL_DTYPE = 2; // dtype of initial_states, -1 none
constexpr int FINAL_DTYPE = 2; // dtype of final_states, -1 none
constexpr int PACKED = 0; // sequences packed in one row, offsets in cu_seqlens
constexpr int USE_TF32 = 0; // one TF32 product instead of three for f32
constexpr int ALIGNED = 1; // views allow 16-byte copies
constexpr int STATES_ROW = 128; // row of a chunk state in the workspace, elements
constexpr int STATE_ELEMS = 8192; // elements of a segment state in the workspace
constexpr int SEGMENTS_WITHOUT_SCAN = 4; // segments of a sequence that the forward pass adds up itself
constexpr int WARPGROUPS = 2; // tuned, warpgroups
constexpr int STAGES = 2; // tuned, chunks
constexpr int HALVES = 1; // tuned, halves
constexpr int THREADS = 512; // threads per block
constexpr int SMEM_BYTES = 171008; // dynamic shared memory of a block
