// Tiles in shared memory: [rows][columns + ROW_PAD]. The pad shifts each row by 16 bytes (32 for float32), so that the eight
// rows of an ldmatrix lie in different banks. Everything outside the tensor reads as zero.
#pragma once

#include "common/dtypes.cuh"
#include "ptx/cp_async.cuh"

constexpr int ROW_PAD = 8;  // ROW_PAD_ELEMS in launch.rs

constexpr int tile_elems(int rows, int columns) { return rows * (columns + ROW_PAD); }

// Starts copying rows x columns elements from `global` (rows `row_stride` elements apart) to `tile`; rows >= valid_rows and
// columns >= valid_columns become zero and are not read. VECTORS: base and stride are multiples of 16 bytes.
// The copy is done after this thread's next cp.async wait and a __syncthreads.
template <bool VECTORS, int ROWS, int COLUMNS, typename T>
__device__ __forceinline__ void copy_tile_async(T* tile, const T* global, long long row_stride, int valid_rows, int valid_columns) {
  constexpr int LD = COLUMNS + ROW_PAD;
  if constexpr (VECTORS) {
    constexpr int VECTOR = 16 / sizeof(T);
    constexpr int PER_ROW = COLUMNS / VECTOR;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PER_ROW; i += THREADS) {
      const int row = i / PER_ROW, column = i % PER_ROW * VECTOR;
      int elems = valid_columns - column;
      elems = row < valid_rows ? (elems < 0 ? 0 : elems > VECTOR ? VECTOR : elems) : 0;
      const T* from = elems > 0 ? global + row * row_stride + column : global;
      cp_async_cg_16(tile + row * LD + column, from, elems * static_cast<int>(sizeof(T)));
    }
  } else {
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
      const int row = i / COLUMNS, column = i % COLUMNS;
      T v{};
      if (row < valid_rows && column < valid_columns) v = global[row * row_stride + column];
      tile[row * LD + column] = v;
    }
  }
}
