// What the parts of the runtime need of each other.
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

enum class State { ready, barrier, grid, warp, done };

struct Block;
struct Warp;
struct Fiber : Thread {
  void* stack;
  Block* in;
  Warp* warp;
  unsigned number;        // in the block
  State state;
  int line;               // where it waits
  int barrier;            // which one of the block's
  Collective collective;  // what a warp waits for: what does it (null: __syncwarp), the lanes, and this lane's arguments
  unsigned lanes;
  void* arguments;
  unsigned epoch;
  Known known;
  Known fenced, received;  // known at its last fence; what it has read of, which its next fence will make known
};
struct Warp { unsigned alive, waiting; Fiber* lane[32]; };
struct Barrier { unsigned waiting, threads, predicates, answer; int line; };
struct Block {
  unsigned number, slot, threads, alive;
  Barrier barriers[16];  // 0: __syncthreads
  std::vector<Warp> warps;
  const Warp* unlucky;    // passed over for a while
  std::vector<Fiber*> fibers, ready;
  size_t taken;                           // of those ready
  std::vector<unsigned char> variables;   // its __shared__ ones, while those of another block are in their place
};

struct Range {
  uintptr_t p;
  size_t bytes;
  bool has(uintptr_t a) const { return a - p < bytes; }
  bool has(uintptr_t a, size_t n) const { return n <= bytes && a - p <= bytes - n; }
};

// Memory that kernels may use, and that with the guard zones around it.
struct Region { Range inside, whole; };

inline Fiber& current() { return *static_cast<Fiber*>(globals.current); }

// launch.cpp
extern unsigned long seed;  // 0: everything in order
extern Range call;          // the launch in progress: its kernel and arguments
extern bool cooperative;
extern bool failed;         // the kernel did something wrong: it ends here
void record(const char* format, va_list arguments);  // what
void fault(const char* format, ...) __attribute__((format(printf, 1, 2)));

// schedule.cpp
extern std::vector<std::unique_ptr<Block>> blocks;  // those that have begun, by slot; null: ended
void run_blocks(const Launch&, unsigned slots);     // so many at a time
void make_ready(Fiber*);
void to_scheduler();        // the other threads run; this one when it is ready
void yield();               // the same, and it is
void progress();            // who spins may go on doing so
[[noreturn]] void fault_in_kernel(const char* format, ...) __attribute__((format(printf, 1, 2)));
unsigned random_below(unsigned n);
void start_random();

// waiting.cpp
extern size_t at_grid_barrier;  // threads
void end_thread();

// memory.cpp
extern Range stacks, variables;           // of the fibers; the __shared__ ones
extern size_t dynamic_bytes;              // of a block's dynamic shared memory
constexpr size_t STACK = 64 << 10;
void start_memory(const Launch&, unsigned slots);
void end_memory();                        // looks for what was written where it must not be
void start_shared(Block&);                // poisoned
char* dynamic_shared(const Block&);
bool is_shared(const void* p);
void show_variables(Block&);
void end_shared(const Block&);
const Region* region_of(const void* p);   // in it or in a guard zone of it; null: in none

// exchange.cpp
void start_exchange(bool late);           // late: stores may be

// source.cpp
std::string line_of(const void* pc);            // file:line
std::string function_of(const void* function);  // its name

// checker.cpp, which does nothing in the plain build
void check_launch();             // it forgets all it knew
void check_block(const Block&);  // shared memory is fresh
void check_access(const void* p, size_t bytes, bool write, bool atomic, void* pc);

}  // namespace simt
