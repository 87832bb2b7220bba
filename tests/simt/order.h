// The happens-before order of memory accesses, by vector clocks. The epoch of a thread is how often
// it has published its accesses. A clock holds an epoch for each thread: the accesses of that
// thread up to this epoch happen before those that the owner of the clock makes now. Threads that
// have synchronized share one clock.
#pragma once
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace simt {

struct Fiber;

class Clock {
 public:
  unsigned of(unsigned block, unsigned thread) const;
  void join(const Clock&);
  void set(unsigned block, unsigned threads, unsigned thread, unsigned epoch);

 private:
  using Epochs = std::shared_ptr<const std::vector<unsigned>>;  // (threads of the block,)
  // By number of the block, ascending; a block without an entry has epoch 0.
  std::vector<std::pair<unsigned, Epochs>> blocks_;
};
using SharedClock = std::shared_ptr<const Clock>;  // null: nothing of another thread is ordered

SharedClock joined(const SharedClock&, const SharedClock&);
// Synchronizes the threads: the accesses of each so far happen before those of all from now on.
void join_clocks(Fiber* const* fibers, size_t n);
// A clock that includes all accesses of the thread so far, and begins its next epoch.
SharedClock publish(Fiber&);
// Whether the access that a thread made in this epoch happens before what f does now.
bool happens_before(unsigned block, unsigned thread, unsigned epoch, const Fiber& f);

}  // namespace simt
