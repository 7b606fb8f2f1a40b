// Generated for state_update on sm_90a: every constant the templates take.
#pragma once
constexpr int SM_ARCH = 90; // compute capability, major * 10 + minor
constexpr int HEADDIM = 80; // elements of x per head
constexpr int DSTATE = 64; // state size
constexpr int X_DTYPE = 0; // -1 none, 0 bf16, 1 f16, 2 f32
constexpr int DT_DTYPE = 0; // -1 none, 0 bf16, 1 f16, 2 f32
constexpr int D_KIND = 1; // 0 none, 1 [nheads], 2 [nheads, headdim]
constexpr int HAS_Z = 0; // output gated by silu(z)
constexpr int HAS_DT_BIAS = 0; // dt + dt_bias
constexpr int DT_SOFTPLUS = 0; // softplus after the bias, identity above 20
constexpr int HAS_DT_LIMIT = 0; // clamp after softplus
constexpr int STATE_DTYPE = 0; // dtype of the state cache
constexpr int HAS_INDICES = 1; // slot of each row in state_batch_indices
constexpr int ONE_TOKEN = 0; // a call has one token a row
constexpr int EVERY_ROW = 1; // the grid has blocks for every row
constexpr int BLOCK_HEAD = 16; // tuned, elements of headdim
constexpr int ROW_THREADS = 8; // tuned, threads
constexpr int WARPS = 4; // tuned, warps
constexpr int THREADS = 128; // threads per block
constexpr int SMEM_BYTES = 0; // dynamic shared memory of a block
