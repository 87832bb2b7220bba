// The runtime of the simulation as its CUDA headers in include/ call it. A CUDA thread is a fiber,
// and all fibers run on the thread that launches. machine.h declares what the parts of the runtime
// share.
#pragma once
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace simt {

// ---- threads (schedule.cpp, waiting.cpp)
struct Thread {
  uint3 thread, block;
  unsigned lane;
  char* shared;  // the block's dynamic shared memory
};
struct Globals {
  Thread* current;
  dim3 block, grid;
};
extern Globals globals;

// The work of a collective of a warp. arguments: (32,), null for a lane that takes no part
using Collective = void (*)(void** arguments, unsigned lanes);
// line: the source line of the call, for error messages
int sync_block(int line, bool predicate);  // __syncthreads; returns how many predicates are true
void sync_named(int id, int threads, int line);  // a named barrier of a block
void sync_grid(int line);
void sync_warp(unsigned lanes, int line);  // __syncwarp; orders memory
// A shuffle, vote or mma: `work` runs when all lanes have come. It does not order memory.
void together(unsigned lanes, void* arguments, Collective work, int line);
[[noreturn]] void trap();  // ends the launch with an error
// One iteration of a waiting loop: lets other threads run, and reports a loop without end.
void spin(int line);
// d (4,) += a (4,) b (2,): fragments as in csrc/cuda/ptx.cuh, of f16 if `half`, otherwise of bf16.
void mma(float* d, const uint32_t* a, const uint32_t* b, bool half, int line);

// ---- memory accesses between blocks (exchange.cpp). pc: the address in the kernel, for messages
void load(const void* p, void* out, size_t bytes, bool acquire, int line, void* pc);
void store(void* p, const void* value, size_t bytes, bool release, void* pc);
// Words that other threads poll and store at the same time: relaxed accesses, which fences order. A
// load that sees an empty word (0) is one iteration of a waiting loop.
void load_words(const void* p, void* out, size_t bytes, int line, void* pc);
void store_words(void* p, const void* value, size_t bytes, void* pc);
void fence();                                                           // __threadfence
void atomic(const volatile void* p, size_t bytes, int line, void* pc);  // call before the access
// An ordinary access, which the checked build checks, by code that the sanitizers do not
// instrument.
void access(const void* p, size_t bytes, bool write, void* pc);
void check_accesses();  // makes this a checked build

// ---- launches (launch.cpp); errors and attributes have CUDA's numbers
struct Launch {
  const void* kernel;
  dim3 grid, block;
  size_t shared;
  bool cooperative;
  // A thread_local of the kernel's library: its __shared__ variables are in the same TLS segment.
  void* anchor;
  void *call, (*run)(void* call);  // the kernel with its arguments; run(call) calls it
  size_t bytes;                    // of the call
  void* const* arguments;          // (arity,)  their addresses
  const size_t* sizes;             // (arity,)  in bytes
  size_t arity;
};
int launch(const Launch&);
// Other code for a kernel, which a launch runs in place of the kernel's own: see tests/ptx. In a
// library with such code, kernels without it are not launched.
struct Translation {
  const void* kernel;
  void (*run)(void* const* arguments);
  size_t shared;  // bytes of its static shared memory, which lies before the dynamic one
  std::vector<size_t> sizes;  // of its parameters
};
bool translate(const Translation&);  // registers it
int last_error();                    // returns the last error and clears it
const char* error_text(int error);
const char* error_name(int error);
int device_attribute(int attribute, int* value);
int allow_shared(const void* kernel, size_t bytes);
// *blocks: how many blocks of the kernel fit on one multiprocessor.
int blocks_that_fit(const void* kernel, int threads, size_t shared, int* blocks);
int fill(void* p, int value, size_t bytes);
int copy(void* p, const void* from, size_t bytes);

static thread_local char anchor;

template <class... P, class... A>
int launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared, bool cooperative,
           A&&... arguments) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
  } call{kernel, {std::forward<A>(arguments)...}};
  anchor = 0;
  void* pointers[sizeof...(P) + 1];
  size_t sizes[sizeof...(P) + 1], arity = 0;
  std::apply([&](auto&... a) { ((pointers[arity] = &a, sizes[arity++] = sizeof a), ...); },
             call.arguments);
  const auto run = [](void* c) {
    std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->arguments);
  };
  return launch({reinterpret_cast<const void*>(kernel), grid, block, shared, cooperative, &anchor,
                 &call, run, sizeof call, pointers, sizes, arity});
}

template <class... P>
struct Launcher {
  void (*kernel)(P...);
  dim3 grid, block;
  size_t shared;
  template <class... A>
  void operator()(A&&... arguments) const {
    launch(kernel, grid, block, shared, false, std::forward<A>(arguments)...);
  }
};
// build.py replaces kernel<<<grid, block, shared, stream>>>(...) by
// launcher(kernel, grid, block, shared, stream)(...).
template <class... P>
Launcher<P...> launcher(void (*kernel)(P...), dim3 grid, dim3 block, size_t shared = 0,
                        void* = nullptr) {
  return {kernel, grid, block, shared};
}

}  // namespace simt
