// What blocks see of each other's stores. One that is relaxed is in memory at once, and the thread's own block sees it; a thread
// of another block sees the old bytes until releases and acquires put the store before what it does, or chance has shown it.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "machine.h"

namespace simt {
namespace {

constexpr size_t MOST_LATE = 1 << 16;  // lines of memory; with more, all is seen at once

struct Late {
  uintptr_t p;
  size_t bytes;
  unsigned char old[16];
  unsigned block, thread, epoch;
  bool has(uintptr_t a) const { return a - p < bytes; }
  bool overlaps(const Late& other) const { return has(other.p) || other.has(p); }
};
std::unordered_map<uintptr_t, std::vector<Late>> late;  // by line of 16 bytes, in the order of the stores
std::unordered_map<uintptr_t, Known> releases;          // what who reads there is to know
bool may_be_late;

bool is_past(const Late& l, const Fiber& f) { return before(l.block, l.thread, l.epoch, f); }

void hide(const Fiber& f, void* p, size_t bytes) {
  if (late.size() > MOST_LATE) late.clear();
  Late stored{uintptr_t(p), bytes, {}, f.in->number, f.number, f.epoch};
  std::memcpy(stored.old, p, bytes);
  auto& line = late[stored.p >> 4];
  const auto is_replaced = [&](const Late& l) { return l.overlaps(stored) && is_past(l, f); };
  line.erase(std::remove_if(line.begin(), line.end(), is_replaced), line.end());
  line.push_back(stored);
}

// What the fiber sees instead of what is in memory.
void undo(const Fiber& f, uintptr_t p, unsigned char* bytes, size_t n) {
  const auto at = late.find(p >> 4);
  if (at == late.end()) return;
  if (random_below(8) == 0) return void(late.erase(at));
  unsigned seen = 0;  // bytes of a store that it sees, and so none before it
  for (auto l = at->second.rbegin(); l != at->second.rend(); ++l) {
    const bool is_seen = l->block == f.in->number || is_past(*l, f);
    for (size_t i = 0; i < n; ++i) {
      if (!l->has(p + i) || seen >> i & 1) continue;
      if (is_seen) seen |= 1u << i;
      else bytes[i] = l->old[p + i - l->p];
    }
  }
}

void require_aligned(const void* p, size_t bytes, void* pc) {
  if (uintptr_t(p) % bytes) fault_in_kernel("a pointer that needs alignment to %zu bytes, %s", bytes, line_of(pc).c_str());
}

void acquire(Fiber& f, const void* p) {
  const auto release = releases.find(uintptr_t(p));
  if (release != releases.end()) f.known = joined(f.known, release->second);
}

}  // namespace

void start_exchange(bool late_) {
  late.clear();
  releases.clear();
  may_be_late = late_;
}

void load(const void* p, void* out, size_t bytes, bool acquires, int line, void* pc) {
  if (acquires) spin(line);
  else if (seed && random_below(16) == 0) yield();
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
    late.erase(uintptr_t(p) >> 4);
    releases[uintptr_t(p)] = published(f);
  } else {
    releases.erase(uintptr_t(p));
    if (may_be_late) hide(f, p, bytes);
  }
  std::memcpy(p, value, bytes);
  progress();
}

void fence() {
  Fiber& f = current();
  f.known = joined(f.known, f.received);
  f.fenced = published(f);
  if (seed) yield();
}

void atomic(const volatile void* p, size_t bytes, int line, void* pc) {
  Fiber& f = current();
  f.line = line;
  if (!seed || random_below(4) == 0) yield();
  check_access(const_cast<void*>(p), bytes, true, true, pc);
  late.erase(uintptr_t(p) >> 4);
  Known& release = releases[uintptr_t(p)];
  f.received = joined(f.received, release);
  release = joined(release, f.fenced);
}

}  // namespace simt
