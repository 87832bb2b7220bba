// Memory order between blocks. A relaxed store is written to memory at once, where the threads of
// its own block read it. A thread of another block reads the old bytes until releases and acquires
// order the store before its load, or until a random number decides that the store has arrived.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "machine.h"

namespace simt {
namespace {

constexpr size_t MAX_DELAYED = 1 << 16;  // lines of memory; with more, all stores become visible

struct DelayedStore {
  uintptr_t p;
  size_t bytes;
  unsigned char old[16];
  unsigned block, thread, epoch;
  bool has(uintptr_t a) const { return a - p < bytes; }
  bool overlaps(const DelayedStore& other) const { return has(other.p) || other.has(p); }
};
// By line of 16 bytes; the stores to a line in their order.
std::unordered_map<uintptr_t, std::vector<DelayedStore>> delayed;
// By address: the clock that a load_acquire or an atomic there receives.
std::unordered_map<uintptr_t, SharedClock> releases;
bool delays_stores;

bool is_ordered(const DelayedStore& l, const Fiber& f) {
  return happens_before(l.block, l.thread, l.epoch, f);
}

// Remembers the old bytes of a relaxed store that f is about to make.
void hide(const Fiber& f, void* p, size_t bytes) {
  if (delayed.size() > MAX_DELAYED) delayed.clear();
  DelayedStore stored{uintptr_t(p), bytes, {}, f.owner->number, f.number, f.epoch};
  std::memcpy(stored.old, p, bytes);
  auto& line = delayed[stored.p >> 4];
  const auto is_replaced = [&](const DelayedStore& l) {
    return l.overlaps(stored) && is_ordered(l, f);
  };
  line.erase(std::remove_if(line.begin(), line.end(), is_replaced), line.end());
  line.push_back(stored);
}

// Replaces in `bytes`, read from memory at p, what the fiber does not see yet by the old bytes.
// Returns these bytes: bit i is set if byte i was replaced.
unsigned undo(const Fiber& f, uintptr_t p, unsigned char* bytes, size_t n) {
  const auto at = delayed.find(p >> 4);
  if (at == delayed.end()) return 0;
  if (random_below(8) == 0) {
    delayed.erase(at);
    return 0;
  }
  unsigned replaced = 0;
  unsigned seen = 0;  // bit i: byte i is of a store that it sees, so older stores do not matter
  for (auto l = at->second.rbegin(); l != at->second.rend(); ++l) {
    const bool is_seen = l->block == f.owner->number || is_ordered(*l, f);
    for (size_t i = 0; i < n; ++i) {
      if (!l->has(p + i) || seen >> i & 1) continue;
      if (is_seen) {
        seen |= 1u << i;
      } else {
        bytes[i] = l->old[p + i - l->p];
        replaced |= 1u << i;
      }
    }
  }
  return replaced;
}

void require_aligned(const void* p, size_t bytes, void* pc) {
  if (uintptr_t(p) % bytes)
    fault_in_kernel("a pointer that needs alignment to %zu bytes, %s", bytes, line_of(pc).c_str());
}

void acquire(Fiber& f, const void* p) {
  const auto release = releases.find(uintptr_t(p));
  if (release != releases.end()) f.clock = joined(f.clock, release->second);
}

}  // namespace

void start_exchange(bool delays) {
  delayed.clear();
  releases.clear();
  delays_stores = delays;
}

void load(const void* p, void* out, size_t bytes, bool acquires, int line, void* pc) {
  if (acquires)
    spin(line);
  else if (seed && random_below(16) == 0)
    yield();
  require_aligned(p, bytes, pc);
  check_access(p, bytes, false, acquires, pc);
  std::memcpy(out, p, bytes);
  undo(current(), uintptr_t(p), static_cast<unsigned char*>(out), bytes);
  if (acquires) acquire(current(), p);
}

void store(void* p, const void* value, size_t bytes, bool releases_, void* pc) {
  Fiber& f = current();
  if (seed && random_below(16) == 0) yield();
  require_aligned(p, bytes, pc);
  check_access(p, bytes, true, releases_, pc);
  if (releases_) {
    delayed.erase(uintptr_t(p) >> 4);
    releases[uintptr_t(p)] = publish(f);
  } else {
    releases.erase(uintptr_t(p));
    if (delays_stores) hide(f, p, bytes);
  }
  std::memcpy(p, value, bytes);
  progress();
}

void load_words(const void* p, void* out, size_t bytes, int line, void* pc) {
  Fiber& f = current();
  if (seed && random_below(16) == 0) yield();
  require_aligned(p, bytes, pc);
  check_access(p, bytes, false, true, pc);
  std::memcpy(out, p, bytes);
  auto* own = static_cast<unsigned char*>(out);
  const unsigned replaced = undo(f, uintptr_t(p), own, bytes);
  bool is_empty = false;
  for (size_t i = 0; i < bytes; i += 4) {
    uint32_t word;
    std::memcpy(&word, own + i, 4);
    is_empty = is_empty || !word;
    const auto release = releases.find(uintptr_t(p) + i);
    if (!(replaced >> i & 15) && release != releases.end())
      f.received = joined(f.received, release->second);
  }
  if (is_empty) spin(line);
}

void store_words(void* p, const void* value, size_t bytes, void* pc) {
  Fiber& f = current();
  if (seed && random_below(16) == 0) yield();
  require_aligned(p, bytes, pc);
  check_access(p, bytes, true, true, pc);
  for (size_t i = 0; i < bytes; i += 4) {
    releases[uintptr_t(p) + i] = f.fenced;
    if (delays_stores) hide(f, static_cast<char*>(p) + i, 4);
  }
  std::memcpy(p, value, bytes);
  progress();
}

void fence() {
  Fiber& f = current();
  f.clock = joined(f.clock, f.received);
  f.fenced = publish(f);
  if (seed) yield();
}

void atomic(const volatile void* p, size_t bytes, int line, void* pc) {
  Fiber& f = current();
  f.line = line;
  if (!seed || random_below(4) == 0) yield();
  check_access(const_cast<void*>(p), bytes, true, true, pc);
  delayed.erase(uintptr_t(p) >> 4);
  SharedClock& release = releases[uintptr_t(p)];
  f.received = joined(f.received, release);
  release = joined(release, f.fenced);
}

}  // namespace simt
