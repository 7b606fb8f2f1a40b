// Tiles in shared memory: [rows][columns + ROW_PAD]. The pad shifts each row by 16 bytes (32 for float32), so that the eight
// rows of an ldmatrix lie in different banks. Everything outside the tensor reads as zero.
#pragma once

#include "common/dtypes.cuh"
#include "ptx/cp_async.cuh"

constexpr int ROW_PAD = 8;  // ROW_PAD_ELEMS in launch.rs

constexpr int tile_elems(int rows, int columns) { return rows * (columns + ROW_PAD); }

// Starts copying ROWS x COLUMNS elements from `global` (rows `row_stride` elements apart) to `tile`, whose rows are `LD` elements
// apart; rows >= valid_rows and columns >= valid_columns become zero and are not read. VECTORS: base and stride are multiples of
// 16 bytes. The copy is done after this thread's next cp.async wait and a __syncthreads.
// Loops have constant trip counts so that they unroll: a thread's pointers then step by constants.
template <bool VECTORS, int ROWS, int COLUMNS, int LD, typename T>
__device__ __forceinline__ void copy_tile_async(T* tile, const T* global, long long row_stride, int valid_rows, int valid_columns) {
  if constexpr (VECTORS) {
    constexpr int VECTOR = 16 / sizeof(T);
    constexpr int PER_ROW = COLUMNS / VECTOR;
    if constexpr (THREADS % PER_ROW == 0) {  // a thread keeps its column and steps down the rows
      constexpr int ROW_STEP = THREADS / PER_ROW;
      const int row = threadIdx.x / PER_ROW, column = threadIdx.x % PER_ROW * VECTOR;
      int elems = valid_columns - column;
      elems = elems < 0 ? 0 : elems > VECTOR ? VECTOR : elems;
      const T* from = global + row * row_stride + column;
      T* to = tile + row * LD + column;
#pragma unroll
      for (int i = 0; i < (ROWS + ROW_STEP - 1) / ROW_STEP; ++i) {
        if (ROWS % ROW_STEP == 0 || row + i * ROW_STEP < ROWS) {
          const int bytes = row + i * ROW_STEP < valid_rows ? elems * static_cast<int>(sizeof(T)) : 0;
          cp_async_cg_16(to + i * ROW_STEP * LD, bytes > 0 ? from : global, bytes);
        }
        from += ROW_STEP * row_stride;
      }
    } else {
#pragma unroll
      for (int i = 0; i < (ROWS * PER_ROW + THREADS - 1) / THREADS; ++i) {
        const int at = i * THREADS + threadIdx.x;
        if (ROWS * PER_ROW % THREADS != 0 && at >= ROWS * PER_ROW) break;
        const int row = at / PER_ROW, column = at % PER_ROW * VECTOR;
        int elems = valid_columns - column;
        elems = row < valid_rows ? (elems < 0 ? 0 : elems > VECTOR ? VECTOR : elems) : 0;
        cp_async_cg_16(tile + row * LD + column, elems > 0 ? global + row * row_stride + column : global, elems * static_cast<int>(sizeof(T)));
      }
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
