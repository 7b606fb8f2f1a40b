#include "threads.h"

#include <cstring>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#include "memory_barriers.h"

namespace emulator {

Thread threads[MAX_THREADS];
int running = 0;
int threads_per_block = 0, blocks_per_cluster = 1;
Index first_block, grid;
long events = 0;
unsigned char* shared = static_cast<unsigned char*>(std::aligned_alloc(4096, std::size_t{16} * SHARED_BYTES));
std::map<std::uint64_t, MemoryBarrier> memory_barriers;

namespace {

std::function<void()> body;
Meeting meetings[16][3][64];
int cluster_arrived;
long cluster_round;

void thread_main() {
  body();
  current().done = true;
  ++events;
  for (;;) yield();
}

#if defined(__x86_64__)
// swapcontext asks the kernel for the signal mask each time; this only swaps the callee-saved registers.
extern "C" void emulator_switch(void** save, void* to);
asm(".globl emulator_switch\n"
    "emulator_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
void* scheduler;

void prepare(Thread& t) {
  void** top = reinterpret_cast<void**>(t.stack + STACK_BYTES);
  *--top = nullptr;  // keeps the stack aligned as after a call
  *--top = nullptr;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(thread_main);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  t.stack_pointer = top;
}
void resume(Thread& t) { emulator_switch(&scheduler, t.stack_pointer); }
void leave(Thread& t) { emulator_switch(&t.stack_pointer, scheduler); }
#else
ucontext_t scheduler, contexts[MAX_THREADS];

void prepare(Thread& t) {
  ucontext_t& c = contexts[&t - threads];
  getcontext(&c);
  c.uc_stack.ss_sp = t.stack;
  c.uc_stack.ss_size = STACK_BYTES;
  makecontext(&c, thread_main, 0);
}
void resume(Thread& t) { swapcontext(&scheduler, &contexts[&t - threads]); }
void leave(Thread& t) { swapcontext(&contexts[&t - threads], &scheduler); }
#endif

}  // namespace

void yield() { leave(current()); }

Meeting& meeting(Group group, int id) { return meetings[current().block][static_cast<int>(group)][id]; }

void cluster_arrive() {
  current().cluster_round = cluster_round;
  ++events;
  if (++cluster_arrived == threads_per_block * blocks_per_cluster) {
    cluster_arrived = 0;
    ++cluster_round;
  }
}
void cluster_wait() {
  while (current().cluster_round == cluster_round) yield();
}

void run_cluster(int block_threads, int blocks, const std::function<void()>& kernel) {
  body = kernel;
  threads_per_block = block_threads;
  blocks_per_cluster = blocks;
  memory_barriers.clear();
  cluster_arrived = 0;
  for (auto& block : meetings)
    for (auto& group : block)
      for (Meeting& m : group) m.arrived = 0;
  std::memset(shared, 0xff, static_cast<std::size_t>(blocks) * SHARED_BYTES);  // NaN, whatever the type
  const int count = block_threads * blocks;
  for (int i = 0; i < count; ++i) {
    Thread& t = threads[i];
    if (!t.stack) t.stack = static_cast<char*>(std::aligned_alloc(4096, STACK_BYTES));
    t.done = false;
    t.block = i / block_threads;
    t.index = {static_cast<unsigned>(i % block_threads), 0, 0};
    prepare(t);
  }
  int idle_rounds = 0;
  for (int left = count; left > 0;) {
    const long before = events;
    left = 0;
    for (int i = 0; i < count; ++i) {
      if (threads[i].done) continue;
      running = i;
      resume(threads[i]);
      left += !threads[i].done;
    }
    idle_rounds = events == before ? idle_rounds + 1 : 0;
    if (idle_rounds > 50) {
      std::fprintf(stderr, "deadlock in block %u; first threads of warps that wait:", first_block.x);
      for (int i = 0; i < count; i += 32)
        if (!threads[i].done) std::fprintf(stderr, " %d", i);
      std::fprintf(stderr, "\n");
      std::exit(3);
    }
  }
}

}  // namespace emulator
