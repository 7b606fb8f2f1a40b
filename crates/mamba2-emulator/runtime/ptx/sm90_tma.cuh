// A tensor map holds what crates/mamba2-cuda/src/tensor_map.rs tells the driver. With EMULATOR_LATE set, boxes are stored as late as they may
// be, at the wait for their group.
#pragma once

#include "ptx/sm90_barrier.cuh"

struct alignas(64) TensorMap {
  const unsigned char* base;
  long long strides[4];  // bytes, innermost first
  int dims[4];
  int columns;  // of a box, 16-bit elements; its rows are swizzled as a whole
  int rows;
  unsigned char unused[128 - 8 - 32 - 16 - 8];
};
static_assert(sizeof(TensorMap) == 128, "as in the kernels' arguments");

namespace emulator {
// Swizzle by the address itself: rows of 128, 64 or 32 bytes, eight of them repeat.
inline unsigned swizzle(unsigned address, int row_bytes) { return address ^ (address >> 7 & static_cast<unsigned>(row_bytes / 16 - 1)) << 4; }
}  // namespace emulator

inline void mbarrier_arrive_expect_tx(unsigned barrier, unsigned bytes) {
  emulator::memory_barrier(barrier).bytes += bytes;
  mbarrier_arrive(barrier);
}
namespace emulator {
struct Box {
  const TensorMap* map;
  int at[4];
  unsigned smem;
};
// Calls f(element in the tensor or null, element in shared memory) for every element of a box.
template <typename F>
void for_each_element(const Box& box, F&& f) {
  const TensorMap& map = *box.map;
  const int row_bytes = map.columns * 2;
  if (box.smem % static_cast<unsigned>(row_bytes * 8)) fault("a box does not start where its swizzle repeats");
  for (int r = 0; r < map.rows; ++r)
    for (int e = 0; e < map.columns; ++e) {
      const int c[4] = {box.at[0] + e, box.at[1], box.at[2] + r, box.at[3]};
      bool inside = true;
      long long offset = 0;
      for (int axis = 0; axis < 4; ++axis) {
        inside = inside && c[axis] >= 0 && c[axis] < map.dims[axis];
        offset += c[axis] * map.strides[axis];
      }
      f(inside ? const_cast<unsigned char*>(map.base) + offset : nullptr,
        own_shared() + swizzle(box.smem + static_cast<unsigned>(r * row_bytes + e * 2), row_bytes));
    }
}
inline void store_box(const Box& box) {
  for_each_element(box, [](unsigned char* of_tensor, const unsigned char* of_box) {
    if (of_tensor) std::memcpy(of_tensor, of_box, 2);
  });
}

struct PendingStores {
  std::vector<Box> open;
  std::deque<std::vector<Box>> groups;
};
inline PendingStores pending_stores[MAX_THREADS];
}  // namespace emulator

inline void tma_load_4d(unsigned smem, const TensorMap* map, int c0, int c1, int c2, int c3, unsigned barrier) {
  emulator::for_each_element({map, {c0, c1, c2, c3}, smem}, [](const unsigned char* of_tensor, unsigned char* of_box) {
    if (of_tensor) {
      std::memcpy(of_box, of_tensor, 2);
    } else {
      std::memset(of_box, 0, 2);
    }
  });
  emulator::MemoryBarrier& b = emulator::memory_barrier(barrier);
  b.bytes -= map->rows * map->columns * 2;
  b.complete();
}
inline void tma_store_4d(const TensorMap* map, int c0, int c1, int c2, int c3, unsigned smem) {
  const emulator::Box box{map, {c0, c1, c2, c3}, smem};
  if (emulator::late) {
    emulator::pending_stores[emulator::running].open.push_back(box);
  } else {
    emulator::store_box(box);
  }
}
inline void bulk_commit_group() {
  emulator::PendingStores& p = emulator::pending_stores[emulator::running];
  p.groups.push_back(std::move(p.open));
  p.open.clear();
}
template <int PENDING>
inline void bulk_wait_group_read() {
  auto& groups = emulator::pending_stores[emulator::running].groups;
  for (; static_cast<int>(groups.size()) > PENDING; groups.pop_front())
    for (const emulator::Box& box : groups.front()) emulator::store_box(box);
}
inline void prefetch_tensor_map(const TensorMap*) {}
