// What the shim's CUDA headers (include/) ask of its runtime (runtime.cpp): a CUDA thread is a fiber, all fibers are on
// the one thread that launches, and a block runs after the other.
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

struct Block;
struct Warp;
enum class State { ready, barrier, warp, done };

struct Fiber {
  void* stack;
  uint3 thread, block;
  Block* in;
  Warp* warp;
  unsigned number, lane;  // in the block, in the warp
  State state;
  int line;               // where it waits
  const void* collective;  // what a warp waits for: the function that does it, the lanes, and this lane's arguments
  unsigned lanes;
  void* arguments;
  unsigned seen[32];      // how far this lane knows each lane of its warp to have come
};
struct Globals { Fiber* current; dim3 block, grid; };
extern Globals globals;

using Collective = void (*)(void** arguments, unsigned lanes);  // arguments: (32,), null where a lane takes no part
int sync_block(int line, bool predicate);                       // how many threads say true
void sync_warp(unsigned lanes, void* arguments, Collective work, int line);
void atomic(const volatile void* p, size_t bytes);              // what comes before the access

struct Launch {
  const char* name;
  dim3 grid, block;
  size_t shared;
  void* anchor;  // a thread_local of the kernels' library, which shows where their __shared__ variables are
  void *call, (*run)(void* call);
  size_t bytes;  // of the call
};
void launch(const Launch&);
const char* error();       // of the last launch, or null
const char* take_error();  // and forget it

static thread_local char anchor;

template <class... P> struct Launcher {
  const char* name;
  void (*kernel)(P...);
  dim3 grid, block;
  size_t shared;
  template <class... A> void operator()(A&&... arguments) const {
    struct Call { void (*kernel)(P...); std::tuple<P...> arguments; } call{kernel, {std::forward<A>(arguments)...}};
    anchor = 0;
    const auto run = [](void* c) { std::apply(static_cast<Call*>(c)->kernel, static_cast<Call*>(c)->arguments); };
    launch({name, grid, block, shared, &anchor, &call, run, sizeof call});
  }
};
// build.py writes kernel<<<grid, block, shared, stream>>>(...) as launcher("kernel", kernel, grid, block, shared, stream)(...)
template <class... P>
Launcher<P...> launcher(const char* name, void (*kernel)(P...), dim3 grid, dim3 block, size_t shared = 0, void* = nullptr) {
  return {name, kernel, grid, block, shared};
}

}  // namespace simt
