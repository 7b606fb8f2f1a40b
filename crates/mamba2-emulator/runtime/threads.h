// CUDA threads as fibers of one operating system thread: each runs until it has to wait for others. Operations of several threads
// (shuffles, barriers, matrix products) collect each thread's operands; the last one to arrive does the work for all.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <vector>

namespace emulator {

constexpr int MAX_THREADS = 4096;                 // of a cluster
constexpr int SHARED_BYTES = 240 * 1024;          // of a block, more than any GPU has
constexpr std::size_t STACK_BYTES = 128 * 1024;   // of a thread

struct Index {
  unsigned x, y, z;
};

struct Thread {
  void* stack_pointer;
  char* stack;
  Index index;  // in its block
  int block;    // in its cluster
  bool done;
  long cluster_round;  // that it last arrived for
};

extern Thread threads[MAX_THREADS];
extern int running;            // index into threads
inline const bool late = std::getenv("EMULATOR_LATE") != nullptr;  // what is asynchronous happens as late as its waits allow
extern int threads_per_block, blocks_per_cluster;
extern Index first_block, grid;
extern long events;            // whatever may let a waiting thread go on
extern unsigned char* shared;  // of all blocks of the cluster

inline Thread& current() { return threads[running]; }
inline Index block_index() { return {first_block.x + static_cast<unsigned>(current().block), first_block.y, 0}; }
inline unsigned char* shared_of(int block) { return shared + static_cast<std::size_t>(block) * SHARED_BYTES; }
inline unsigned char* own_shared() { return shared_of(current().block); }

[[noreturn]] inline void fault(const char* what) {
  std::fprintf(stderr, "fault in block %u thread %u: %s\n", block_index().x, current().index.x, what);
  std::exit(3);
}

// Lets the other threads run.
void yield();

// Runs one cluster of blocks to its end; exits with a message if its threads wait for each other.
void run_cluster(int block_threads, int blocks, const std::function<void()>& kernel);

struct Meeting {
  int arrived = 0;
  long round = 0;
  void* operands[MAX_THREADS];
};
enum class Group { Warp, Warpgroup, Barrier };
Meeting& meeting(Group group, int id);  // of the current block

template <typename Operand, typename Work>
void meet(Meeting& m, int size, int slot, Operand* operand, Work&& work) {
  m.operands[slot] = operand;
  const long round = m.round;
  ++events;
  if (++m.arrived == size) {
    work(reinterpret_cast<Operand**>(m.operands));
    m.arrived = 0;
    ++m.round;
  } else {
    while (m.round == round) yield();
  }
}

template <typename Operand, typename Work>
void warp(Operand&& operand, Work&& work) {
  const int t = static_cast<int>(current().index.x);
  meet(meeting(Group::Warp, t / 32), 32, t % 32, &operand, work);
}
template <typename Operand, typename Work>
void warpgroup(Operand&& operand, Work&& work) {
  const int t = static_cast<int>(current().index.x);
  meet(meeting(Group::Warpgroup, t / 128), 128, t % 128, &operand, work);
}
inline void named_barrier(int id, int count) {
  int nothing = 0;
  meet(meeting(Group::Barrier, id), count, 0, &nothing, [](int**) {});
}
// The barrier of all threads of the cluster. A thread that arrives for the last time need not wait.
void cluster_arrive();
void cluster_wait();

}  // namespace emulator
