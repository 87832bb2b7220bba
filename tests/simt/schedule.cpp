// Which thread runs next. A CUDA thread is a fiber, and all fibers run on one thread of the
// machine. This file is compiled without sanitizers.
#include <algorithm>
#include <cstdio>
#include <new>

#include "machine.h"

namespace simt {

Globals globals;
std::vector<std::unique_ptr<Block>> blocks;

namespace {

constexpr unsigned long MAX_SWITCHES = 500'000'000;
constexpr unsigned TURN = 64;       // mean number of switches until another block runs
constexpr unsigned STARVATION = 8;  // mean number of turns for which a warp or block is starved
constexpr uint64_t CANARY = 0x51A7C0DEF00DBEEF;

void* scheduler;  // the scheduler's stack
void (*run)(void*);
unsigned long switches, spins;  // spins: calls of spin() since the last progress()
uint64_t state;                 // of the random numbers
size_t starved;                 // the slot of the block that is not scheduled for a while

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

void thread_main() {
  run(reinterpret_cast<void*>(call.p));
  end_thread();
}

// Fiber i lies at the top of its stack; a canary at the bottom detects an overflow.
Fiber* make_fiber(size_t i) {
  char* low = reinterpret_cast<char*>(stacks.p) + i * STACK;
  const uintptr_t top = (uintptr_t(low) + STACK - sizeof(Fiber) - i % 61 * 64) & ~uintptr_t(63);
  Fiber* f = new (reinterpret_cast<void*>(top)) Fiber{};
  *reinterpret_cast<uint64_t*>(low) = CANARY;
  void** stack = reinterpret_cast<void**>(top) - 8;
  std::fill(stack, stack + 8, nullptr);
  // simt_switch pops six registers and returns to thread_main.
  stack[6] = reinterpret_cast<void*>(thread_main);
  f->stack = stack;
  return f;
}

void draw_starved(Block& b) {
  const unsigned w = random_below(unsigned(b.warps.size()) + 1);
  b.starved = seed && w < b.warps.size() ? &b.warps[w] : nullptr;
}

std::unique_ptr<Block> start_block(unsigned number, unsigned slot) {
  const dim3 grid = globals.grid, threads = globals.block;
  auto b = std::make_unique<Block>();
  b->number = number;
  b->slot = slot;
  b->threads = b->alive = threads.x * threads.y * threads.z;
  b->warps.resize((b->threads + 31) / 32);
  draw_starved(*b);
  start_shared(*b);
  for (unsigned i = 0; i < b->threads; ++i) {
    Fiber* f = make_fiber(size_t(slot) * b->threads + i);
    f->thread = {i % threads.x, i / threads.x % threads.y, i / threads.x / threads.y};
    f->block = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
    f->shared = dynamic_shared(*b);
    f->owner = b.get();
    f->warp = &b->warps[i / 32];
    f->number = i;
    f->lane = i % 32;
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
    const char* low =
        reinterpret_cast<char*>(stacks.p) + (size_t(b.slot) * b.threads + f->number) * STACK;
    if (*reinterpret_cast<const uint64_t*>(low) != CANARY)
      fault("the stack of thread %u of block %u overflows", f->number, b.number);
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
  const char* where[] = {"run", "at a barrier of their block", "at grid.sync",
                         "for lanes of their warp", ""};
  std::string text;
  for (int s = 0; s < int(State::done); ++s) {
    if (!waiting[s]) continue;
    char part[160];
    snprintf(part, sizeof part, "%s%u threads wait %s, as thread %u of block %u at line %d",
             text.empty() ? "" : "; ", waiting[s], where[s], first[s]->number,
             first[s]->owner->number, first[s]->line);
    text += part;
  }
  fault("deadlock: %s", text.c_str());
}

// The next ready thread of a block; one of the starved warp only if no other is ready.
Fiber* take(Block& b) {
  const size_t n = b.ready.size() - b.taken, from = seed ? random_below(unsigned(n)) : 0;
  size_t at = b.taken + from;
  for (size_t i = 0; b.starved && i < n && b.ready[at]->warp == b.starved; ++i)
    at = b.taken + (from + i) % n;
  std::swap(b.ready[b.taken], b.ready[at]);
  Fiber* f = b.ready[b.taken++];
  if (b.taken > 4096) {
    b.ready.erase(b.ready.begin(), b.ready.begin() + b.taken);
    b.taken = 0;
  }
  return f;
}

// Runs threads of a block until all of them wait or it is another block's turn.
void run_block(Block& b) {
  show_variables(b);
  if (random_below(STARVATION) == 0) draw_starved(b);
  size_t left = seed ? 1 + random_below(2 * TURN) : b.ready.size() - b.taken;
  for (; left && b.taken < b.ready.size() && !failed; --left) {
    globals.current = take(b);
    if (++switches > MAX_SWITCHES)
      fault("block %u comes to no end; thread %u last waited at line %d", b.number,
            current().number, current().line);
    else
      simt_switch(&scheduler, current().stack);
    globals.current = nullptr;
  }
}

bool can_run(size_t slot) {
  return blocks[slot] && blocks[slot]->taken < blocks[slot]->ready.size();
}

// The slot of a block that can run: the next from `slot` on, or a random one under a seed; the
// starved block only if no other can run. Returns the number of slots if no block can run.
size_t next_block(size_t slot) {
  const size_t slots = blocks.size();
  if (seed) slot = random_below(unsigned(slots));
  if (seed && random_below(STARVATION) == 0) starved = random_below(unsigned(slots) + 1);
  for (size_t i = 0; i < slots; ++i)
    if (const size_t at = (slot + i) % slots; at != starved && can_run(at)) return at;
  return starved < slots && can_run(starved) ? starved : slots;
}

std::vector<unsigned> order_of(size_t n) {
  std::vector<unsigned> order(n);
  for (size_t i = 0; i < n; ++i)
    order[i] = unsigned(i);
  for (size_t i = n; seed && i > 1; --i)
    std::swap(order[i - 1], order[random_below(unsigned(i))]);
  return order;
}

}  // namespace

void to_scheduler() {
  simt_switch(&current().stack, scheduler);
}

void make_ready(Fiber* f) {
  f->state = State::ready;
  f->owner->ready.push_back(f);
}

void run_blocks(const Launch& l, unsigned slots) {
  const std::vector<unsigned> order = order_of(size_t(l.grid.x) * l.grid.y * l.grid.z);
  size_t begun = 0, alive = slots;
  run = l.run;
  switches = spins = at_grid_barrier = 0;
  starved = seed ? random_below(slots + 1) : slots;
  for (; begun < slots; ++begun)
    blocks.push_back(start_block(order[begun], unsigned(begun)));
  for (size_t slot = 0; alive && !failed; ++slot) {
    slot = next_block(slot);
    if (slot == slots) {
      report_deadlock();
      break;
    }
    run_block(*blocks[slot]);
    if (failed || blocks[slot]->alive) continue;
    end_block(*blocks[slot]);
    blocks[slot].reset();
    if (begun < order.size())
      blocks[slot] = start_block(order[begun++], unsigned(slot));
    else
      --alive;
  }
  for (const auto& b : blocks)
    if (b) end_block(*b);
  blocks.clear();
}

unsigned random_below(unsigned n) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return unsigned(state >> 16) % n;
}
void start_random() {
  state = seed * 0x9E3779B97F4A7C15 + 0x1234567;
  for (int i = 0; i < 8; ++i)
    random_below(2);
}

void fault_in_kernel(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  record(format, arguments);
  va_end(arguments);
  for (;;)
    to_scheduler();
}

void trap() {
  fault_in_kernel("thread %u of block %u: trap", current().number, current().owner->number);
}

void progress() {
  spins = 0;
}

void yield() {
  make_ready(&current());
  to_scheduler();
}

void spin(int line) {
  Fiber& f = current();
  f.line = line;
  if (++spins > 1000 * blocks.size() * f.owner->threads + 100'000)
    fault_in_kernel(
        "deadlock: thread %u of block %u waits in a loop at line %d that comes to no end", f.number,
        f.owner->number, line);
  yield();
}

}  // namespace simt
