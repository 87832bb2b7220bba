// The declarations that the parts of the runtime share.
#pragma once
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "order.h"
#include "runtime.h"

namespace simt {

enum class State { ready, barrier, grid, warp, done };  // what a thread waits for

struct Block;
struct Warp;
struct Fiber : Thread {
  void* stack;
  Block* owner;
  Warp* warp;
  unsigned number;  // in the block
  State state;
  int line;     // of the source, where it waits
  int barrier;  // State::barrier: the barrier's number
  // State::warp: the work of the collective (null: __syncwarp), its lanes, this lane's arguments
  Collective collective;
  unsigned lanes;
  void* arguments;
  unsigned epoch;        // see order.h
  SharedClock clock;     // what is ordered before the thread's next access
  SharedClock fenced;    // its clock at its last fence, which its atomics publish
  SharedClock received;  // read by its atomics; its next fence joins it to the clock
};
struct Warp {
  unsigned alive, waiting;  // bit masks of lanes
  Fiber* lane[32];
};
struct Barrier {
  unsigned waiting, threads;    // threads that have arrived; threads that must
  unsigned predicates, answer;  // true predicates so far; those of the last completed barrier
  int line;
};
struct Block {
  unsigned number, slot, threads, alive;  // slot: its place among the resident blocks
  Barrier barriers[16];                   // 0: __syncthreads
  std::vector<Warp> warps;
  const Warp* starved;  // a warp that is not scheduled for a while, or null
  std::vector<Fiber*> fibers, ready;
  size_t taken;  // how many of `ready` have run
  // A copy of its __shared__ variables while those of another block are at their address.
  std::vector<unsigned char> variables;
};

struct Range {
  uintptr_t p;
  size_t bytes;
  bool has(uintptr_t a) const { return a - p < bytes; }
  bool has(uintptr_t a, size_t n) const { return n <= bytes && a - p <= bytes - n; }
};

// A buffer: the memory that kernels may use, and the same with its guard zones.
struct Region {
  Range inside, whole;
};

inline Fiber& current() {
  return *static_cast<Fiber*>(globals.current);
}

// launch.cpp
extern unsigned long seed;  // of the order of threads and blocks; 0: the order of their numbers
extern Range call;          // the kernel and its arguments of the launch in progress
extern bool cooperative;
extern bool failed;  // an error was recorded: the launch ends
// Records an error; its first message is reported.
void record(const char* format, va_list arguments);
void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// schedule.cpp
extern std::vector<std::unique_ptr<Block>> blocks;  // resident blocks, by slot; null: ended
void run_blocks(const Launch&, unsigned slots);     // with so many blocks resident at a time
void make_ready(Fiber*);
void to_scheduler();  // lets other threads run until this one is ready
void yield();         // makes this thread ready and lets others run
void progress();      // another thread may have waited for this: resets the limit of spin()
[[noreturn]] void fault_in_kernel(const char* format, ...) __attribute__((format(printf, 1, 2)));
unsigned random_below(unsigned n);
void start_random();

// waiting.cpp
extern size_t at_grid_barrier;  // how many threads wait there
void end_thread();

// memory.cpp
extern Range stacks, variables;  // the fibers' stacks; the __shared__ variables
extern size_t dynamic_bytes;     // of dynamic shared memory in a block
constexpr size_t STACK = 64 << 10;
void start_memory(const Launch&, unsigned slots);
void end_memory();          // reports writes to guard zones
void start_shared(Block&);  // poisons the block's shared memory
char* dynamic_shared(const Block&);
bool is_shared(const void* p);
void show_variables(Block&);  // puts the block's __shared__ variables at their address
void end_shared(const Block&);
const Region* region_of(const void* p);  // the buffer with p, also in a guard zone; null: none

// exchange.cpp
void start_exchange(bool delays);  // delays: other blocks may see relaxed stores late

// source.cpp
std::string line_of(const void* pc);            // file:line
std::string function_of(const void* function);  // the name of a kernel

// checker.cpp; these do nothing in the plain build
void check_launch();             // forgets the accesses of the last launch
void check_block(const Block&);  // marks shared memory as uninitialized
void check_access(const void* p, size_t bytes, bool write, bool atomic, void* pc);

}  // namespace simt
