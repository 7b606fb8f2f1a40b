// One kernel, compiled with its config: reads a job (names and numbers) and a memory image, runs the grid, writes the image back.
//   kernel JOB IMAGE
// Lines of JOB: a field of ForwardArgs or StepArgs and its values; pointers are offsets into the image plus one, 0 is null. Also: grid
// (x and y), cluster, x_columns (of a box of x), axes (batch, seqlen or tokens, nheads, headdim, ngroups, dstate). A tool's arguments are 64-bit
// words, the pointers first: words, and pointers (how many).
#include "cuda.h"

#include <fstream>
#include <sstream>
#include <string>

// After cuda.h: these replace the templates' own instruction wrappers.
#include "ptx/sm90_cluster.cuh"
#include "ptx/sm90_tma.cuh"
#include "ptx/sm90_wgmma.cuh"

#include "kernel.cuh"  // the template, its name as KERNEL, and whether it takes tensor maps as TAKES_MAPS

#include "threads.cpp"

namespace {

std::map<std::string, std::vector<double>> job;
std::vector<unsigned char> image;
unsigned char* memory;

double number(const std::string& name, std::size_t i = 0) {
  const auto found = job.find(name);
  if (found == job.end() || found->second.size() <= i) {
    std::fprintf(stderr, "the job has no %s[%zu]\n", name.c_str(), i);
    std::exit(2);
  }
  return found->second[i];
}
template <typename T>
void pointer(T*& field, const char* name) {
  const auto at = static_cast<std::size_t>(number(name));
  field = at == 0 ? nullptr : reinterpret_cast<T*>(memory + at - 1);
}
void strides(Strides& field, const char* name) {
  field = {static_cast<int64>(number(name, 0)), static_cast<int64>(number(name, 1)), static_cast<int64>(number(name, 2))};
}
void strides(RowStrides& field, int64& token, const char* name) {
  field = {static_cast<int64>(number(name, 0)), static_cast<int64>(number(name, 2))};
  token = static_cast<int64>(number(name, 1));
}
void three(int64 (&field)[3], const char* name) {
  for (int i = 0; i < 3; ++i) field[i] = static_cast<int64>(number(name, static_cast<std::size_t>(i)));
}

// What the kernels of a forward pass and of a decode step share.
template <typename Args>
void fill_common(Args& a) {
  pointer(a.x, "x");
  pointer(a.dt, "dt");
  pointer(a.A, "A");
  pointer(a.B, "B");
  pointer(a.C, "C");
  pointer(a.D, "D");
  pointer(a.z, "z");
  pointer(a.dt_bias, "dt_bias");
  pointer(a.out, "out");
  a.d_head_stride = static_cast<int64>(number("d_head_stride"));
  a.dt_min = static_cast<float>(number("dt_min"));
  a.dt_max = static_cast<float>(number("dt_max"));
}
void divisor(Divisor& to, const char* name) {
  to = {static_cast<unsigned>(number(name, 0)), static_cast<unsigned>(number(name, 1)), static_cast<unsigned>(number(name, 2))};
}
void fill(ForwardArgs& a) {
  fill_common(a);
  strides(a.x_strides, "x_strides");
  strides(a.dt_strides, "dt_strides");
  strides(a.b_strides, "b_strides");
  strides(a.c_strides, "b_strides");
  strides(a.z_strides, "x_strides");
  strides(a.out_strides, "x_strides");
  a.work_items = static_cast<int64>(number("work_items"));
  a.nheads = static_cast<int>(number("axes", 2));
  pointer(a.initial_states, "initial_states");
  pointer(a.cu_seqlens, "cu_seqlens");
  pointer(a.final_states, "final_states");
  pointer(a.dt_out, "dt_out");
  pointer(a.da_cumsum, "da_cumsum");
  pointer(a.state_weight, "state_weight");
  pointer(a.states, "states");
  pointer(a.flags, "flags");
  a.call = static_cast<unsigned long long>(number("call"));
  three(a.initial_strides, "state_strides");
  three(a.final_strides, "state_strides");
  a.seqlen = static_cast<int>(number("axes", 1));
  a.sequences = static_cast<int>(number("sequences"));
  a.chunk_slots = static_cast<int>(number("chunk_slots"));
  divisor(a.chunks_per_row, "chunks_per_row");
  divisor(a.ngroups, "ngroups");
  a.heads_per_group = static_cast<int>(number("axes", 2) / number("axes", 4));
  divisor(a.blocks_per_group, "blocks_per_group");
  a.segment = static_cast<int>(number("segment"));
  a.scanned = static_cast<int>(number("scanned"));
}
void fill(StepArgs& a) {
  fill_common(a);
  strides(a.x_strides, a.x_token_stride, "x_strides");
  a.dt_row_stride = static_cast<int64>(number("dt_strides", 0));
  a.dt_token_stride = static_cast<int64>(number("dt_strides", 1));
  strides(a.b_strides, a.b_token_stride, "b_strides");
  strides(a.c_strides, a.c_token_stride, "b_strides");
  strides(a.z_strides, a.z_token_stride, "x_strides");
  strides(a.out_strides, a.out_token_stride, "x_strides");
  a.aligned = static_cast<int>(number("aligned"));
  a.batch = static_cast<int>(number("axes", 0));
  pointer(a.state, "state");
  pointer(a.state_batch_indices, "state_batch_indices");
  three(a.state_strides, "state_strides");
  divisor(a.heads_per_group, "heads_per_group");
  a.tokens = static_cast<int>(number("axes", 1));
  a.slots = static_cast<int>(number("slots"));
}
template <typename Args>
void fill(Args& a) {
  std::vector<int64> words;
  for (const double word : job["words"]) words.push_back(static_cast<int64>(word));
  for (std::size_t i = 0; i < static_cast<std::size_t>(number("pointers")); ++i)
    words[i] = words[i] == 0 ? 0 : reinterpret_cast<int64>(memory + words[i] - 1);
  if (words.size() * sizeof(int64) != sizeof(Args)) std::abort();
  std::memcpy(&a, words.data(), sizeof(Args));
}

// The first parameter of a kernel.
template <typename Args, typename... More>
Args first_parameter(void (*)(Args, More...)) {
  Args a{};
  fill(a);
  return a;
}

#if TAKES_MAPS
TensorMap map_of(const void* base, const Strides& s, int heads, int inner, int columns) {
  TensorMap m{};
  m.base = static_cast<const unsigned char*>(base);
  const long long step[4] = {2, s.head * 2, s.token * 2, s.batch * 2};
  const int dims[4] = {inner, heads, static_cast<int>(number("axes", 1)), static_cast<int>(number("axes", 0))};
  std::copy(step, step + 4, m.strides);
  std::copy(dims, dims + 4, m.dims);
  m.columns = columns;
  m.rows = 64;
  return m;
}
#endif

}  // namespace

int main(int, char** arguments) {
  std::ifstream lines(arguments[1]);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name, value;
    words >> name;
    while (words >> value) job[name].push_back(std::strtod(value.c_str(), nullptr));  // reads inf too
  }
  std::ifstream in(arguments[2], std::ios::binary);
  image.assign(std::istreambuf_iterator<char>(in), {});
  std::vector<unsigned char> aligned(image.size() + 1024);
  memory = aligned.data() + (1024 - reinterpret_cast<std::uintptr_t>(aligned.data()) % 1024);
  std::copy(image.begin(), image.end(), memory);

  const auto args = first_parameter(&KERNEL);
#if TAKES_MAPS
  const int groups = static_cast<int>(number("axes", 4)), dstate = static_cast<int>(number("axes", 5));
  TensorMaps maps;
  maps.x = map_of(args.x, args.x_strides, args.nheads, static_cast<int>(number("axes", 3)), static_cast<int>(number("x_columns")));
  maps.b = map_of(args.B, args.b_strides, groups, dstate, 64);
  maps.c = map_of(args.C, args.c_strides, groups, dstate, 64);
  maps.z = HAS_Z ? map_of(args.z, args.z_strides, args.nheads, static_cast<int>(number("axes", 3)), static_cast<int>(number("x_columns"))) : TensorMap{};
  maps.out = map_of(args.out, args.out_strides, args.nheads, static_cast<int>(number("axes", 3)), static_cast<int>(number("x_columns")));
  const auto kernel = [&] { KERNEL(args, maps); };
#else
  const auto kernel = [&] { KERNEL(args); };
#endif
  const auto cluster = static_cast<unsigned>(number("cluster"));
  emulator::grid = {static_cast<unsigned>(number("grid", 0)), static_cast<unsigned>(number("grid", 1)), 1};
  for (unsigned y = 0; y < emulator::grid.y; ++y) {
    for (unsigned x = 0; x < emulator::grid.x; x += cluster) {
      emulator::first_block = {x, y, 0};
      emulator::run_cluster(THREADS, static_cast<int>(cluster), kernel);
    }
  }
  std::ofstream out(arguments[2], std::ios::binary);
  out.write(reinterpret_cast<const char*>(memory), static_cast<std::streamsize>(image.size()));
  return out.good() ? 0 : 2;
}
