// Checks what two runs of a call left in guarded memory: what is no element must hold what it held before them, elements must have
// the same bits in both, and the distance of the second from a standard is summed in float64.
//
// The memory is one output with guards: unit u (of one element's size) is element [i0, i1, i2, i3] where u - lead =
// sum_k i_k strides[k] and every i_k < shape[k]; strides are of a row-major view, innermost 1. All other units are guards or gaps,
// and so are rows i0 that are to be skipped.
//
// Grid   any number of blocks; they loop. Block  THREADS threads
// Result one Found a thread, added up by whoever reads them: fixed grid, fixed order, so the same sums each time
#include "mamba2_config.cuh"

#include "common/args.cuh"
#include "common/dtypes.cuh"

using T = Element<X_DTYPE>;

template <int BYTES>
struct BitsOf {
  using type = unsigned;
};
template <>
struct BitsOf<2> {
  using type = unsigned short;
};
using Bits = BitsOf<sizeof(T)>::type;  // NaN equals itself

struct CompareArgs {
  const Bits* first;     // [units], what the first run left
  const Bits* second;    // as first
  const Bits* image;     // as first, what was there before each run
  const Bits* standard;  // as first, or null
  const int* skipped;    // [shape[0]]; rows with a negative number are to be skipped; or null
  void* found;           // Found [grid * THREADS]
  int64 units;
  int64 lead;
  int64 shape[4];
  int64 strides[4];
};

struct Found {
  double error;     // sum of (second - standard)^2
  double norm;      // sum of standard^2
  int64 outside;    // first unit that is no element and was written, -1 none
  int64 differing;  // elements with other bits in the second run
};

__device__ __forceinline__ bool is_element(const CompareArgs& args, int64 unit) {
  int64 rest = unit - args.lead;
  if (rest < 0) return false;
#pragma unroll
  for (int axis = 0; axis < 4; ++axis) {
    const int64 i = rest / args.strides[axis];
    if (i >= args.shape[axis]) return false;
    if (axis == 0 && args.skipped != nullptr && args.skipped[i] < 0) return false;
    rest -= i * args.strides[axis];
  }
  return true;
}

__device__ __forceinline__ double value(Bits bits) { return to_float(*reinterpret_cast<const T*>(&bits)); }

extern "C" __global__ void __launch_bounds__(THREADS) tool_compare(const __grid_constant__ CompareArgs args) {
  const int64 thread = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x, threads = static_cast<int64>(gridDim.x) * THREADS;
  Found found = {0., 0., -1, 0};
  for (int64 u = thread; u < args.units; u += threads) {
    const Bits first = args.first[u], second = args.second[u];
    if (is_element(args, u)) {
      found.differing += first != second;
      if (args.standard != nullptr) {
        const double want = value(args.standard[u]), error = value(second) - want;
        found.error += error * error;
        found.norm += want * want;
      }
    } else if (found.outside < 0) {
      const Bits before = args.image[u];
      if (first != before || second != before) found.outside = u;
    }
  }
  static_cast<Found*>(args.found)[thread] = found;
}
