// What blocks see of each other's stores. One that is relaxed is in memory at once, and the thread's own block sees it; other
// blocks see the old bytes until somebody to whom it is past releases, or by chance before.
#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "machine.h"

namespace simt {
namespace {

constexpr size_t MOST_LATE = 1 << 16;  // bytes of them in so many lines; more are seen at once

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

// A store is seen: so are those before it to the same bytes.
void expose(std::vector<Late>& line, size_t i) {
  const Late seen = line[i];
  const auto is_seen = [&](const Late& l) { return l.overlaps(seen); };
  line.erase(std::remove_if(line.begin(), line.begin() + i + 1, is_seen), line.begin() + i + 1);
}

void expose_past(const Fiber& f) {
  for (auto at = late.begin(); at != late.end();) {
    auto& line = at->second;
    for (size_t i = line.size(); i-- > 0;)
      if (i < line.size() && before(line[i].block, line[i].thread, line[i].epoch, f)) expose(line, i);
    at = line.empty() ? late.erase(at) : std::next(at);
  }
}

void hide(const Fiber& f, void* p, size_t bytes) {
  if (late.size() > MOST_LATE) late.clear();
  Late l{uintptr_t(p), bytes, {}, f.in->number, f.number, f.epoch};
  std::memcpy(l.old, p, bytes);
  late[l.p >> 4].push_back(l);
}

// What the fiber's block sees instead of what is in memory.
void undo(const Fiber& f, uintptr_t p, unsigned char* bytes, size_t n) {
  const auto at = late.find(p >> 4);
  if (at == late.end()) return;
  unsigned own = 0;  // bytes that this block has stored since
  for (auto l = at->second.rbegin(); l != at->second.rend(); ++l)
    for (size_t i = 0; i < n; ++i) {
      if (!l->has(p + i) || own >> i & 1) continue;
      if (l->block == f.in->number) own |= 1u << i;
      else bytes[i] = l->old[p + i - l->p];
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

void expose_some() {
  if (late.empty()) return;
  auto at = std::next(late.begin(), random_below(unsigned(late.size())));
  expose(at->second, random_below(unsigned(at->second.size())));
  if (at->second.empty()) late.erase(at);
}

void expose_all() { late.clear(); }

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
    const auto line = late.find(uintptr_t(p) >> 4);
    if (line != late.end()) late.erase(line);
    expose_past(f);
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
  expose_past(f);
  f.known = joined(f.known, f.received);
  f.fenced = published(f);
  if (seed) yield();
}

void atomic(const volatile void* p, size_t bytes, int line, void* pc) {
  Fiber& f = current();
  f.line = line;
  if (!seed || random_below(4) == 0) yield();
  check_access(const_cast<void*>(p), bytes, true, true, pc);
  const auto at = late.find(uintptr_t(p) >> 4);
  if (at != late.end()) late.erase(at);
  Known& release = releases[uintptr_t(p)];
  f.received = joined(f.received, release);
  release = joined(release, f.fenced);
}

}  // namespace simt
