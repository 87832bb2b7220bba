// What comes before what: a thread counts how often it has let others know of it (its epoch), and knows of each thread up to
// which epoch all that this one did is before what it does itself. Vector clocks; threads that have met share one.
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
  std::vector<std::pair<unsigned, Epochs>> blocks_;             // ascending; those that anything is known of
};
using Known = std::shared_ptr<const Clock>;  // null: of nobody but itself

Known joined(const Known&, const Known&);
void meet(Fiber* const* fibers, size_t n);  // each knows what any of them knew and did
Known published(Fiber&);                    // all that it knows and did; what it does from here on is not in it
// Whether what a thread did is before what f does now.
bool before(unsigned block, unsigned thread, unsigned epoch, const Fiber& f);

}  // namespace simt
