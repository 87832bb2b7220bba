// Blocks and threads: which one runs, and where they wait. Compiled without sanitizers.
#include "machine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <new>
#include <string>

namespace simt {

Globals globals;

namespace {

constexpr unsigned long MOST_SWITCHES = 50'000'000;
constexpr unsigned TURN = 64;  // switches, on average, until another block has its turn
constexpr uint64_t CANARY = 0x51A7C0DEF00DBEEF;

void* scheduler;  // its stack
void (*run)(void*);
unsigned long switches, spins;  // spins: since something happened that others may wait for
uint64_t state;
std::vector<std::unique_ptr<Block>> blocks;  // those that have begun, by slot; null: ended
unsigned in_grid_barrier;

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
void to_scheduler() { simt_switch(&current().stack, scheduler); }
void make_ready(Fiber* f) {
  f->state = State::ready;
  f->in->ready.push_back(f);
}

// ---- barriers

void release_barrier(Block& b, int id) {
  Barrier& at = b.barriers[id];
  if (id == 0 && at.threads == b.threads && b.alive != b.threads)
    fault_in_kernel("line %d: __syncthreads reached by %u threads, the other %u have ended", at.line, b.alive, b.threads - b.alive);
  std::vector<Fiber*> met;
  for (Fiber* f : b.fibers)
    if (f->state == State::barrier && f->barrier == id) met.push_back(f);
  for (const Fiber* f : met)
    for (const Fiber* lane : f->warp->lane)
      if (lane && (lane->state != State::barrier || lane->barrier != id))
        fault_in_kernel("line %d: barrier %d reached by a part of a warp, without thread %u", at.line, id, lane->number);
  meet(met.data(), met.size());
  at.answer = at.predicates;
  at.predicates = at.waiting = 0;
  for (Fiber* f : met) make_ready(f);
  progress();
}

int wait_at(int id, unsigned threads, int line, bool predicate) {
  Fiber& f = current();
  Block& b = *f.in;
  Barrier& at = b.barriers[id];
  if (at.waiting++ && at.threads != threads)
    fault_in_kernel("threads of a block wait at barrier %d for %u threads at line %d, for %u at line %d", id, at.threads, at.line, threads, line);
  at.threads = threads, at.line = f.line = line;
  at.predicates += predicate;
  f.state = State::barrier, f.barrier = id;
  if (at.waiting == (threads == b.threads ? b.alive : threads)) release_barrier(b, id);
  to_scheduler();
  return int(at.answer);
}

void release_grid() {
  std::vector<Fiber*> met;
  for (const auto& b : blocks)
    if (b) met.insert(met.end(), b->fibers.begin(), b->fibers.end());
  for (const Fiber* f : met)
    if (f->state != State::grid) fault_in_kernel("line %d: grid.sync, which thread %u of block %u never reaches", met[0]->line, f->number, f->in->number);
  in_grid_barrier = 0;
  expose_all();
  meet(met.data(), met.size());
  for (Fiber* f : met) make_ready(f);
  progress();
}

// Where all lanes of a collective have come, it happens.
void try_warp(Warp& w, const Fiber& asking) {
  const unsigned lanes = asking.lanes & w.alive;
  if (!lanes || (w.waiting & lanes) != lanes) return;
  void* arguments[32] = {};
  Fiber* met[32];
  size_t n = 0;
  for (unsigned l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    Fiber& f = *w.lane[l];
    if (f.collective != asking.collective || f.lanes != asking.lanes)
      fault_in_kernel("lanes of a warp wait in different collectives: line %d for lanes %08x, line %d for %08x", asking.line,
                      asking.lanes, f.line, f.lanes);
    arguments[l] = f.arguments;
    met[n++] = &f;
  }
  if (asking.collective) asking.collective(arguments, lanes);
  else meet(met, n);
  w.waiting &= ~lanes;
  for (size_t i = 0; i < n; ++i) make_ready(met[i]);
  progress();
}

void end_thread() {
  Fiber& f = current();
  Block& b = *f.in;
  f.state = State::done;
  f.warp->alive &= ~(1u << f.lane);
  --b.alive;
  for (int id = 0; id < 16; ++id)
    if (const Barrier& at = b.barriers[id]; at.waiting && at.threads == b.threads && at.waiting == b.alive) release_barrier(b, id);
  for (unsigned l = 0; l < 32; ++l)
    if (f.warp->waiting >> l & 1) try_warp(*f.warp, *f.warp->lane[l]);
  progress();
  to_scheduler();
}
void thread_main() {
  run(reinterpret_cast<void*>(call.p));
  end_thread();
}

// ---- blocks

Fiber* make_fiber(size_t i) {  // at the top of its stack
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

std::unique_ptr<Block> start_block(unsigned number, unsigned slot) {
  const dim3 grid = globals.grid, threads = globals.block;
  auto b = std::make_unique<Block>();
  b->number = number, b->slot = slot;
  b->threads = b->alive = threads.x * threads.y * threads.z;
  b->warps.resize((b->threads + 31) / 32);
  start_shared(*b);
  for (unsigned i = 0; i < b->threads; ++i) {
    Fiber* f = make_fiber(size_t(slot) * b->threads + i);
    f->thread = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    f->block = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    f->shared = dynamic_shared(*b);
    f->in = b.get(), f->warp = &b->warps[i / 32], f->number = i, f->lane = i % 32;
    f->epoch = 1;
    f->warp->lane[f->lane] = f;
    f->warp->alive |= 1u << f->lane;
    b->fibers.push_back(f);
    make_ready(f);
  }
  return b;
}

void end_block(const Block& b) {
  for (Fiber* f : b.fibers) {
    const char* low = reinterpret_cast<char*>(stacks.p) + (size_t(b.slot) * b.threads + f->number) * STACK;
    if (*reinterpret_cast<const uint64_t*>(low) != CANARY) fault("the stack of thread %u of block %u overflows", f->number, b.number);
    f->~Fiber();
  }
  end_shared(b);
}

void report_deadlock() {
  unsigned waiting[5] = {};
  const Fiber* first[5] = {};
  for (const auto& b : blocks)
    for (size_t i = 0; b && i < b->threads; ++i) {
      const int s = int(b->fibers[i]->state);
      if (!waiting[s]++) first[s] = b->fibers[i];
    }
  const char* where[] = {"run", "at a barrier of their block", "at grid.sync", "for lanes of their warp", ""};
  std::string text;
  for (int s = 0; s < int(State::done); ++s) {
    if (!waiting[s]) continue;
    char part[160];
    snprintf(part, sizeof part, "%s%u threads wait %s, as thread %u of block %u at line %d", text.empty() ? "" : "; ", waiting[s], where[s],
             first[s]->number, first[s]->in->number, first[s]->line);
    text += part;
  }
  fault("deadlock: %s", text.c_str());
}

// Threads of a block, until all wait or it is another block's turn.
void run_block(Block& b, bool alone) {
  show_variables(b);
  for (size_t left = seed ? 1 + random_below(2 * TURN) : b.ready.size() - b.taken; b.taken < b.ready.size() && !failed; left -= !alone) {
    if (!left) return;
    if (++switches > MOST_SWITCHES) return fault("block %u comes to no end; it last waited at line %d", b.number, b.ready[b.taken]->line);
    if (seed) std::swap(b.ready[b.taken], b.ready[b.taken + random_below(unsigned(b.ready.size() - b.taken))]);
    globals.current = b.ready[b.taken++];
    if (b.taken > 4096) b.ready.erase(b.ready.begin(), b.ready.begin() + b.taken), b.taken = 0;
    simt_switch(&scheduler, current().stack);
    globals.current = nullptr;
  }
}

// The slot of one that can go on, from `slot` on; as many as there are slots where none can.
size_t next_block(size_t slot) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const size_t at = (slot + i) % blocks.size();
    if (blocks[at] && blocks[at]->taken < blocks[at]->ready.size()) return at;
  }
  return blocks.size();
}

std::vector<unsigned> order_of(size_t n) {
  std::vector<unsigned> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = unsigned(i);
  for (size_t i = n; seed && i > 1; --i) std::swap(order[i - 1], order[random_below(unsigned(i))]);
  return order;
}

}  // namespace

void run_blocks(const Launch& l, unsigned slots) {
  const std::vector<unsigned> order = order_of(size_t(l.grid.x) * l.grid.y * l.grid.z);
  size_t begun = 0, alive = slots;
  run = l.run;
  switches = spins = in_grid_barrier = 0;
  for (; begun < slots; ++begun) blocks.push_back(start_block(order[begun], unsigned(begun)));
  for (size_t slot = 0; alive && !failed; ++slot) {
    slot = next_block(seed ? random_below(slots) : slot);
    if (slot == slots) { report_deadlock(); break; }
    run_block(*blocks[slot], alive == 1);
    if (failed || blocks[slot]->alive) continue;
    end_block(*blocks[slot]);
    blocks[slot].reset();
    if (begun < order.size()) blocks[slot] = start_block(order[begun++], unsigned(slot));
    else --alive;
  }
  for (const auto& b : blocks)
    if (b) end_block(*b);
  blocks.clear();
}

unsigned random_below(unsigned n) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return unsigned(state >> 16) % n;
}
void start_random() {
  state = seed * 0x9E3779B97F4A7C15 + 0x1234567;
  for (int i = 0; i < 8; ++i) random_below(2);
}

void fault_in_kernel(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(format, arguments);
  va_end(arguments);
  for (;;) to_scheduler();
}

void progress() { spins = 0; }

void yield() {
  make_ready(&current());
  to_scheduler();
}

void spin(int line) {
  Fiber& f = current();
  f.line = line;
  if (++spins > 1000 * blocks.size() * f.in->threads + 100'000)
    fault_in_kernel("deadlock: thread %u of block %u waits in a loop at line %d that comes to no end", f.number, f.in->number, line);
  if (seed && random_below(16) == 0) expose_some();
  yield();
}

int sync_block(int line, bool predicate) {
  const Block& b = *current().in;
  if (b.barriers[0].waiting && b.barriers[0].line != line)
    fault_in_kernel("threads of a block wait at __syncthreads of line %d and of line %d", b.barriers[0].line, line);
  return wait_at(0, b.threads, line, predicate);
}

void sync_named(int id, int threads, int line) {
  const int all = int(current().in->threads);
  if (id < 0 || id > 15) fault_in_kernel("line %d: barrier %d, must be 0 to 15", line, id);
  if (threads != all && (threads <= 0 || threads > all || threads % 32))
    fault_in_kernel("line %d: barrier of %d threads, must be a multiple of 32 up to the block's %d", line, threads, all);
  wait_at(id, unsigned(threads), line, false);
}

void sync_grid(int line) {
  Fiber& f = current();
  if (!cooperative) fault_in_kernel("line %d: grid.sync in a launch that is not cooperative", line);
  f.state = State::grid, f.line = line;
  if (++in_grid_barrier == blocks.size() * f.in->threads) release_grid();
  to_scheduler();
}

void together(unsigned lanes, void* arguments, Collective work, int line) {
  Fiber& f = current();
  if (!(lanes >> f.lane & 1)) fault_in_kernel("line %d: lane %u is not one of the lanes %08x that it names", line, f.lane, lanes);
  f.state = State::warp, f.line = line;
  f.collective = work, f.lanes = lanes, f.arguments = arguments;
  f.warp->waiting |= 1u << f.lane;
  try_warp(*f.warp, f);
  to_scheduler();
}
void sync_warp(unsigned lanes, int line) { together(lanes, nullptr, nullptr, line); }

}  // namespace simt
