// The scheduler of tests/simt: blocks, threads, barriers, warps, guarded memory. Compiled without sanitizers.
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "checker.h"

namespace simt {

Globals globals;
unsigned long seed;
Range stacks, shared, call;

namespace {

constexpr size_t STACK = 64 << 10, GUARD = 4096;
constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned long MOST_SWITCHES = 50'000'000;
constexpr uint64_t CANARY = 0x51A7C0DEF00DBEEF;

std::string text;   // what the last launch did wrong
bool failed;        // and nobody has asked yet
bool aborting;
void* scheduler;    // its stack
void (*run)(void*);
unsigned long switches;
uint64_t state;
std::vector<Fiber*> ready;
std::vector<Region> regions;

void record(const char* format, va_list arguments) {
  char line[512];
  vsnprintf(line, sizeof line, format, arguments);
  if (text.empty()) text = line;
  failed = true;
}
void fault(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(format, arguments);
  va_end(arguments);
}

// ---- fibers

extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
void to_scheduler() { simt_switch(&globals.current->stack, scheduler); }
void make_ready(Fiber* f) {
  f->state = State::ready;
  ready.push_back(f);
}

void release_block(Block& b) {
  if (b.alive != b.threads)
    fault_in_kernel("line %d: __syncthreads reached by %u threads, the other %u have ended", b.line, b.alive, b.threads - b.alive);
  b.answer = b.predicates;
  b.predicates = b.waiting = 0;
  ++b.barriers;
}

std::vector<Warp> warps;
Block block;
void release_threads() {
  for (Warp& w : warps)
    for (Fiber* f : w.lane)
      if (f && f->state == State::barrier) make_ready(f);
}

// Where all lanes of a collective have come, it happens.
void try_warp(Warp& w, const Fiber& asking) {
  const unsigned lanes = asking.lanes & w.alive;
  if (!lanes || (w.waiting & lanes) != lanes) return;
  void* arguments[32] = {};
  for (unsigned l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    const Fiber& f = *w.lane[l];
    if (f.collective != asking.collective || f.lanes != asking.lanes)
      fault_in_kernel("lanes of a warp wait in different collectives: line %d for lanes %08x, line %d for %08x", asking.line,
                      asking.lanes, f.line, f.lanes);
    arguments[l] = f.arguments;
  }
  reinterpret_cast<Collective>(const_cast<void*>(asking.collective))(arguments, lanes);
  check_warp(w, lanes);
  w.waiting &= ~lanes;
  for (unsigned l = 0; l < 32; ++l)
    if (lanes >> l & 1) make_ready(w.lane[l]);
}

void end_thread() {
  Fiber& f = *globals.current;
  f.state = State::done;
  f.warp->alive &= ~(1u << f.lane);
  if (--block.alive && block.waiting == block.alive) release_block(block), release_threads();
  for (unsigned l = 0; l < 32; ++l)
    if (f.warp->waiting >> l & 1) try_warp(*f.warp, *f.warp->lane[l]);
  to_scheduler();
}
void thread_main() {
  run(reinterpret_cast<void*>(call.p));
  end_thread();
}

Fiber* make_fiber(unsigned i) {  // at the top of its stack
  char* low = reinterpret_cast<char*>(stacks.p) + i * STACK;
  const uintptr_t top = (uintptr_t(low) + STACK - sizeof(Fiber) - i % 61 * 64) & ~uintptr_t(63);
  Fiber* f = new (reinterpret_cast<void*>(top)) Fiber{};
  *reinterpret_cast<uint64_t*>(low) = CANARY;
  void** stack = reinterpret_cast<void**>(top) - 8;
  std::fill(stack, stack + 8, nullptr);
  stack[6] = reinterpret_cast<void*>(thread_main);  // after the six registers
  f->stack = stack;
  return f;
}

// ---- memory: poison reads as NaN in every floating-point format, and differs from byte to byte

unsigned char poison(uintptr_t a) { return a & 1 ? 0xff : 0x81 | (a * 0x9E3779B1u >> 20 & 0x7e); }
void poison(uintptr_t p, size_t bytes) {
  for (uintptr_t a = p; a < p + bytes; ++a) *reinterpret_cast<unsigned char*>(a) = poison(a);
}
void check_guards() {
  for (const Region& r : regions)
    for (uintptr_t a = uintptr_t(r.base); a < uintptr_t(r.base) + r.base_bytes; ++a) {
      if (a == r.p) a += r.bytes;
      if (*reinterpret_cast<unsigned char*>(a) == poison(a)) continue;
      fault("the guard zone of a buffer of %zu bytes was written at its byte %td", r.bytes, ptrdiff_t(a - r.p));
      *reinterpret_cast<unsigned char*>(a) = poison(a);
    }
}

Range find_shared(const void* anchor) {
  struct Query { uintptr_t anchor; Range found; } query{uintptr_t(anchor), {}};
  dl_iterate_phdr([](dl_phdr_info* library, size_t, void* q) {
    Query& query = *static_cast<Query*>(q);
    for (int i = 0; i < library->dlpi_phnum; ++i) {
      const Range range{uintptr_t(library->dlpi_tls_data), library->dlpi_phdr[i].p_memsz};
      if (library->dlpi_phdr[i].p_type == PT_TLS && range.p && range.has(query.anchor)) query.found = range;
    }
    return 0;
  }, &query);
  return query.found;
}

// ---- a launch

void start_block(unsigned number, dim3 grid, dim3 threads) {
  const unsigned n = threads.x * threads.y * threads.z;
  block = Block{number, n, n, 0, 0, 0, 0, 0};
  warps.assign((n + 31) / 32, Warp{});
  poison(shared.p, shared.bytes);
  check_block();
  for (unsigned i = 0; i < n; ++i) {
    Fiber* f = make_fiber(i);
    f->thread = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    f->block = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    f->in = &block, f->warp = &warps[i / 32], f->number = i, f->lane = i % 32;
    f->warp->lane[f->lane] = f;
    f->warp->alive |= 1u << f->lane;
    f->seen[f->lane] = 1;
    make_ready(f);
  }
}

void report_deadlock() {
  for (const Warp& w : warps)
    for (const Fiber* f : w.lane)
      if (f && f->state != State::done)
        return fault("deadlock: %u threads wait at __syncthreads, thread %u of block %u at line %d", block.waiting, f->number,
                     block.number, f->line);
}

void run_block() {
  size_t head = 0;  // those before it have been taken
  while (head < ready.size() && !aborting) {
    if (++switches > MOST_SWITCHES) return fault("block %u comes to no end", block.number);
    if (seed) std::swap(ready[head], ready[head + random_below(ready.size() - head)]);
    globals.current = ready[head++];
    if (head > 4096) ready.erase(ready.begin(), ready.begin() + head), head = 0;
    simt_switch(&scheduler, globals.current->stack);
    globals.current = nullptr;
  }
  ready.clear();
  if (!aborting && block.alive) report_deadlock();
}

bool refused(const Launch& l) {
  const size_t threads = size_t(l.block.x) * l.block.y * l.block.z, blocks = size_t(l.grid.x) * l.grid.y * l.grid.z;
  if (!threads || threads > MOST_THREADS || l.block.z > 64) fault("%s: a block of %zu threads", l.name, threads);
  else if (!blocks || l.grid.x > 0x7fffffffu || l.grid.y > 65535 || l.grid.z > 65535)
    fault("%s: a grid of %u x %u x %u blocks", l.name, l.grid.x, l.grid.y, l.grid.z);
  else if (l.shared) fault("%s: tests/simt has no dynamic shared memory yet", l.name);
  else return false;
  return true;
}

void prepare(const Launch& l) {
  if (!stacks.p) {
    stacks.bytes = MOST_THREADS * STACK;
    stacks.p = uintptr_t(mmap(nullptr, stacks.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  text.clear();
  failed = aborting = false;
  switches = 0;
  state = seed * 0x9E3779B97F4A7C15 + 0x1234567;
  for (int i = 0; i < 8; ++i) random_below(2);
  run = l.run;
  call = {uintptr_t(l.call), l.bytes};
  shared = find_shared(l.anchor);
  globals.block = l.block, globals.grid = l.grid;
  check_launch(regions.data(), regions.size());
}

}  // namespace

unsigned random_below(unsigned n) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return unsigned(state >> 16) % n;
}

void fault_in_kernel(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(format, arguments);
  va_end(arguments);
  aborting = true;
  for (;;) to_scheduler();
}

void yield() {
  make_ready(globals.current);
  to_scheduler();
}

int sync_block(int line, bool predicate) {
  Fiber& f = *globals.current;
  if (block.waiting++ && block.line != line)
    fault_in_kernel("threads of a block wait at __syncthreads of line %d and of line %d", block.line, line);
  block.line = f.line = line;
  block.predicates += predicate;
  f.state = State::barrier;
  if (block.waiting == block.alive) release_block(block), release_threads();
  to_scheduler();
  return int(block.answer);
}

void sync_warp(unsigned lanes, void* arguments, Collective work, int line) {
  Fiber& f = *globals.current;
  if (!(lanes >> f.lane & 1)) fault_in_kernel("line %d: lane %u is not one of the lanes %08x that it names", line, f.lane, lanes);
  f.state = State::warp, f.line = line;
  f.collective = reinterpret_cast<void*>(work), f.lanes = lanes, f.arguments = arguments;
  f.warp->waiting |= 1u << f.lane;
  try_warp(*f.warp, f);
  to_scheduler();
}

void atomic(const volatile void* p, size_t bytes) {
  if (seed && random_below(4) == 0) yield();
  check_atomic(p, bytes, __builtin_return_address(0));
}

void launch(const Launch& l) {
  if (failed) return;  // as on a GPU, where nothing runs after a failed kernel
  prepare(l);
  if (refused(l)) return;
  const std::vector<unsigned char> before(reinterpret_cast<char*>(shared.p), reinterpret_cast<char*>(shared.p) + shared.bytes);
  std::vector<unsigned> order(size_t(l.grid.x) * l.grid.y * l.grid.z);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (size_t i = order.size(); seed && i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  for (size_t i = 0; i < order.size() && !failed; ++i) start_block(order[i], l.grid, l.block), run_block();
  for (unsigned i = 0; i < block.threads; ++i)
    if (*reinterpret_cast<uint64_t*>(stacks.p + i * STACK) != CANARY) fault("%s: a thread's stack overflows", l.name);
  check_guards();
  if (failed) text = std::string(l.name) + ": " + text;
  std::copy(before.begin(), before.end(), reinterpret_cast<unsigned char*>(shared.p));
}

const char* error() { return text.empty() ? nullptr : text.c_str(); }
const char* take_error() {
  const bool had = failed;
  failed = false;
  return had ? error() : nullptr;
}

}  // namespace simt

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void simt_seed(unsigned long s) { simt::seed = s; }

// Poisoned memory between guard zones, `misaligned` bytes after a multiple of 256.
EXPORT void* simt_allocate(size_t bytes, size_t misaligned) {
  using namespace simt;
  const size_t whole = (2 * GUARD + misaligned + bytes + 255) / 256 * 256;
  void* base = aligned_alloc(256, whole);
  poison(uintptr_t(base), whole);
  regions.push_back({uintptr_t(base) + GUARD + misaligned, bytes, base, whole});
  return reinterpret_cast<void*>(regions.back().p);
}
EXPORT void simt_free(void* p) {
  using namespace simt;
  const auto r = std::find_if(regions.begin(), regions.end(), [&](const Region& r) { return r.p == uintptr_t(p); });
  free(r->base);
  regions.erase(r);
}
