// What runtime.cpp and checker.cpp need of each other.
#pragma once
#include <cstddef>
#include <cstdint>

#include "runtime.h"

namespace simt {

struct Warp { unsigned alive, waiting; Fiber* lane[32]; };
struct Block { unsigned number, threads, alive, waiting, barriers, predicates, answer; int line; };
// Memory that kernels may use, and the guard zones around it: GUARD bytes on each side at least.
struct Region { uintptr_t p; size_t bytes; void* base; size_t base_bytes; };
struct Range {
  uintptr_t p;
  size_t bytes;
  bool has(uintptr_t a) const { return a - p < bytes; }
};

[[noreturn]] void fault_in_kernel(const char* format, ...) __attribute__((format(printf, 1, 2)));
void yield();                 // lets the other threads run
unsigned random_below(unsigned n);
extern unsigned long seed;    // 0: everything in order
extern Range stacks, shared;  // the fibers' stacks; the __shared__ variables
extern Range call;            // the launch in progress: its kernel and arguments

void check_launch(const Region* regions, size_t count);  // the checker forgets all it knew
void check_block();                                      // shared memory is fresh
void check_warp(Warp&, unsigned lanes);                  // these lanes have met
void check_atomic(const volatile void* p, size_t bytes, void* pc);

}  // namespace simt
