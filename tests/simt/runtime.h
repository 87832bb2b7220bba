// What the shim's CUDA headers (include/) ask of its runtime: a CUDA thread is a fiber, and all fibers are on the one thread
// that launches. machine.h is what the runtime's parts know of each other.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

// ---- threads (blocks.cpp)
struct Thread {
  uint3 thread, block;
  unsigned lane;
  char* shared;  // the block's dynamic shared memory
};
struct Globals { Thread* current; dim3 block, grid; };
extern Globals globals;

using Collective = void (*)(void** arguments, unsigned lanes);  // arguments: (32,), null where a lane takes no part
int sync_block(int line, bool predicate);                       // how many threads say true
void sync_named(int id, int threads, int line);
void sync_grid(int line);
void sync_warp(unsigned lanes, int line);                       // which orders what the lanes do before and after
void together(unsigned lanes, void* arguments, Collective work, int line);  // which does not
void spin(int line);                                            // lets other threads run, and counts
// d (4,) += a (4,) b (2,): csrc/ptx.cuh's fragments of bf16, or of f16 where `half`  (mma.cpp)
void mma(float* d, const uint32_t* a, const uint32_t* b, bool half, int line);

// ---- what blocks see of each other (exchange.cpp). pc: the kernel's, for a message
void load(const void* p, void* out, size_t bytes, bool acquire, int line, void* pc);
void store(void* p, const void* value, size_t bytes, bool release, void* pc);
void fence();                                                   // __threadfence
void atomic(const volatile void* p, size_t bytes, int line, void* pc);  // what comes before the access

// ---- launches (launch.cpp); the numbers are CUDA's
struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t shared;
  bool cooperative;
  void* anchor;  // a thread_local of the kernels' library, which shows where their __shared__ variables are
  void *call, (*run)(void* call);
  size_t bytes;  // of the call
};
int launch(const Launch&);
int last_error();  // and forget it
const char* error_text(int error);
const char* error_name(int error);
int device_attribute(int attribute, int* value);
int allow_shared(const void* kernel, size_t bytes);
int blocks_that_fit(const void* kernel, int threads, size_t shared, int* blocks);  // on a multiprocessor
int fill(void* p, int value, size_t bytes);
int copy(void* p, const void* from, size_t bytes);

static thread_local char anchor;

template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, bool cooperative, A&&... arguments) {
  struct Call { void (*kernel)(P...); std::tuple<P...> arguments; } call{kernel, {std::forward<A>(arguments)...}};
  anchor = 0;
  const auto run = [](void* c) { std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->arguments); };
  return launch({reinterpret_cast<const void*>(kernel), grid, block, shared, cooperative, &anchor, &call, run, sizeof call});
}

template <class... P> struct Launcher {
  void (*kernel)(P...);
  dim3 grid, block;
  size_t shared;
  template <class... A> void operator()(A&&... arguments) const {
    launch(kernel, grid, block, shared, false, std::forward<A>(arguments)...);
  }
};
// build.py writes kernel<<<grid, block, shared, stream>>>(...) as launcher(kernel, grid, block, shared, stream)(...)
template <class... P> Launcher<P...> launcher(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared = 0, void* = nullptr) {
  return {kernel, grid, block, shared};
}

}  // namespace simt
