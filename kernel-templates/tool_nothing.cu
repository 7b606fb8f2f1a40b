// Does nothing, with as many bytes of parameters as a kernel that does something: what a launch costs.
//
// Grid   one block
#include "mamba2_config.cuh"

#include "common/args.cuh"

struct NothingArgs {
  int64 words[PARAMETER_BYTES / 8];
};

extern "C" __global__ void __launch_bounds__(THREADS) tool_nothing(const __grid_constant__ NothingArgs) {}
