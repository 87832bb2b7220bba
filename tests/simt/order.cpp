#include "order.h"

#include <algorithm>

#include "machine.h"

namespace simt {
namespace {

template <class B>
auto position(B& blocks, unsigned block) {
  return std::lower_bound(blocks.begin(), blocks.end(), block,
                          [](const auto& b, unsigned n) { return b.first < n; });
}

}  // namespace

unsigned Clock::of(unsigned block, unsigned thread) const {
  const auto b = position(blocks_, block);
  return b == blocks_.end() || b->first != block ? 0 : (*b->second)[thread];
}

void Clock::join(const Clock& other) {
  for (const auto& [block, theirs] : other.blocks_) {
    const auto b = position(blocks_, block);
    if (b == blocks_.end() || b->first != block) {
      blocks_.insert(b, {block, theirs});
    } else if (b->second != theirs) {
      auto both = std::make_shared<std::vector<unsigned>>(*theirs);
      for (size_t i = 0; i < both->size(); ++i)
        (*both)[i] = std::max((*both)[i], (*b->second)[i]);
      b->second = both;
    }
  }
}

void Clock::set(unsigned block, unsigned threads, unsigned thread, unsigned epoch) {
  auto b = position(blocks_, block);
  if (b == blocks_.end() || b->first != block)
    b = blocks_.insert(b, {block, std::make_shared<std::vector<unsigned>>(threads)});
  else if (b->second.use_count() > 1)
    b->second = std::make_shared<std::vector<unsigned>>(*b->second);
  // No other clock shares this vector: use_count was checked above.
  const_cast<std::vector<unsigned>&>(*b->second)[thread] = epoch;
}

SharedClock joined(const SharedClock& a, const SharedClock& b) {
  if (!a || !b || a == b) return a ? a : b;
  auto both = std::make_shared<Clock>(*a);
  both->join(*b);
  return both;
}

void join_clocks(Fiber* const* fibers, size_t n) {
  auto joint =
      fibers[0]->clock ? std::make_shared<Clock>(*fibers[0]->clock) : std::make_shared<Clock>();
  for (size_t i = 1; i < n; ++i)  // most threads share the clock of the one before
    if (fibers[i]->clock && fibers[i]->clock != fibers[i - 1]->clock)
      joint->join(*fibers[i]->clock);
  for (size_t i = 0; i < n; ++i)
    joint->set(fibers[i]->owner->number, fibers[i]->owner->threads, fibers[i]->number,
               fibers[i]->epoch++);
  for (size_t i = 0; i < n; ++i)
    fibers[i]->clock = joint;
}

SharedClock publish(Fiber& f) {
  auto all = f.clock ? std::make_shared<Clock>(*f.clock) : std::make_shared<Clock>();
  all->set(f.owner->number, f.owner->threads, f.number, f.epoch++);
  return all;
}

bool happens_before(unsigned block, unsigned thread, unsigned epoch, const Fiber& f) {
  if (block == f.owner->number && thread == f.number) return true;
  return f.clock && epoch <= f.clock->of(block, thread);
}

}  // namespace simt
