// Where threads wait for each other: barriers, collectives of a warp, and the end of a thread.
#include "machine.h"

namespace simt {

size_t at_grid_barrier;

namespace {

void release_barrier(Block& b, int id) {
  Barrier& at = b.barriers[id];
  if (id == 0 && at.threads == b.threads && b.alive != b.threads)
    fault_in_kernel("line %d: __syncthreads reached by %u threads, the other %u have ended",
                    at.line, b.alive, b.threads - b.alive);
  std::vector<Fiber*> met;
  for (Fiber* f : b.fibers)
    if (f->state == State::barrier && f->barrier == id) met.push_back(f);
  for (const Fiber* f : met)
    for (const Fiber* lane : f->warp->lane)
      if (lane && (lane->state != State::barrier || lane->barrier != id))
        fault_in_kernel("line %d: barrier %d reached by a part of a warp, without thread %u",
                        at.line, id, lane->number);
  join_clocks(met.data(), met.size());
  at.answer = at.predicates;
  at.predicates = at.waiting = 0;
  for (Fiber* f : met)
    make_ready(f);
  progress();
}

int wait_at(int id, unsigned threads, int line, bool predicate) {
  Fiber& f = current();
  Block& b = *f.owner;
  Barrier& at = b.barriers[id];
  if (at.waiting++ && at.threads != threads)
    fault_in_kernel(
        "threads of a block wait at barrier %d for %u threads at line %d, for %u at line %d", id,
        at.threads, at.line, threads, line);
  at.threads = threads;
  at.line = f.line = line;
  at.predicates += predicate;
  f.state = State::barrier;
  f.barrier = id;
  if (at.waiting == (threads == b.threads ? b.alive : threads)) release_barrier(b, id);
  to_scheduler();
  return int(at.answer);
}

void release_grid() {
  std::vector<Fiber*> met;
  for (const auto& b : blocks)
    if (b) met.insert(met.end(), b->fibers.begin(), b->fibers.end());
  for (const Fiber* f : met)
    if (f->state != State::grid)
      fault_in_kernel("line %d: grid.sync, which thread %u of block %u never reaches", met[0]->line,
                      f->number, f->owner->number);
  at_grid_barrier = 0;
  join_clocks(met.data(), met.size());
  for (Fiber* f : met)
    make_ready(f);
  progress();
}

// Runs the collective of the warp that a lane waits for, if all its lanes have arrived.
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
      fault_in_kernel(
          "lanes of a warp wait in different collectives: line %d for lanes %08x, line %d for %08x",
          asking.line, asking.lanes, f.line, f.lanes);
    arguments[l] = f.arguments;
    met[n++] = &f;
  }
  if (asking.collective)
    asking.collective(arguments, lanes);
  else
    join_clocks(met, n);
  w.waiting &= ~lanes;
  for (size_t i = 0; i < n; ++i)
    make_ready(met[i]);
  progress();
}

}  // namespace

void end_thread() {
  Fiber& f = current();
  Block& b = *f.owner;
  f.state = State::done;
  f.warp->alive &= ~(1u << f.lane);
  --b.alive;
  for (int id = 0; id < 16; ++id)
    if (const Barrier& at = b.barriers[id];
        at.waiting && at.threads == b.threads && at.waiting == b.alive)
      release_barrier(b, id);
  for (unsigned l = 0; l < 32; ++l)
    if (f.warp->waiting >> l & 1) try_warp(*f.warp, *f.warp->lane[l]);
  progress();
  to_scheduler();
}

int sync_block(int line, bool predicate) {
  const Block& b = *current().owner;
  if (b.barriers[0].waiting && b.barriers[0].line != line)
    fault_in_kernel("threads of a block wait at __syncthreads of line %d and of line %d",
                    b.barriers[0].line, line);
  return wait_at(0, b.threads, line, predicate);
}

void sync_named(int id, int threads, int line) {
  const int all = int(current().owner->threads);
  if (id < 0 || id > 15) fault_in_kernel("line %d: barrier %d, must be 0 to 15", line, id);
  if (threads != all && (threads <= 0 || threads > all || threads % 32))
    fault_in_kernel("line %d: barrier of %d threads, must be a multiple of 32 up to the block's %d",
                    line, threads, all);
  wait_at(id, unsigned(threads), line, false);
}

void sync_grid(int line) {
  Fiber& f = current();
  if (!cooperative) fault_in_kernel("line %d: grid.sync in a launch that is not cooperative", line);
  f.state = State::grid;
  f.line = line;
  if (++at_grid_barrier == blocks.size() * f.owner->threads) release_grid();
  to_scheduler();
}

void together(unsigned lanes, void* arguments, Collective work, int line) {
  Fiber& f = current();
  if (!(lanes >> f.lane & 1))
    fault_in_kernel("line %d: lane %u is not one of the lanes %08x that it names", line, f.lane,
                    lanes);
  f.state = State::warp;
  f.line = line;
  f.collective = work;
  f.lanes = lanes;
  f.arguments = arguments;
  f.warp->waiting |= 1u << f.lane;
  try_warp(*f.warp, f);
  to_scheduler();
}
void sync_warp(unsigned lanes, int line) {
  together(lanes, nullptr, nullptr, line);
}

}  // namespace simt
