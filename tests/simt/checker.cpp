// The checked build: kernels compiled with -fsanitize=thread,bounds,alignment call the hooks at the
// end of this file, which replace the sanitizers' runtimes. They check every memory access of a
// kernel and report accesses outside a buffer, reads of uninitialized shared memory, and races: two
// threads access the same bytes, at least one of them writes, not both by atomics, and order.h does
// not order the first access before the second. At random accesses the other threads run first.
//
// On request they also count how many sectors of global memory the loads of a warp touch.
#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>

#include "machine.h"

namespace simt {
namespace {

bool checked;                          // this is the checked build: kernels call the hooks
constexpr unsigned SWITCH_EVERY = 16;  // mean number of accesses until other threads run

// An access to some bytes of a cell (a bit mask), by a thread in one of its epochs.
struct Access {
  unsigned block, epoch;
  unsigned short thread;
  unsigned char bytes;
  bool atomic;
  void* pc;
};
// The last accesses to 4 bytes of memory, the latest first.
struct Cell {
  Access written[2], read[2];
  unsigned char initialized;
};
struct Page {
  Cell cells[1024];
};
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;

Cell& cell(uintptr_t a) {
  auto& page = pages[a >> 12];
  if (!page) page = std::make_unique<Page>();
  return page->cells[a >> 2 & 1023];
}

void require_before(const Access& a, const Access& now, const char* what, bool of_shared) {
  const Fiber& f = current();
  if (!(a.bytes & now.bytes) || (a.atomic && now.atomic) ||
      happens_before(a.block, a.thread, a.epoch, f))
    return;
  fault_in_kernel(
      "race on %s memory: thread %u of block %u at %s, then thread %u of block %u at %s, %s",
      of_shared ? "shared" : "global", a.thread, a.block, line_of(a.pc).c_str(), now.thread,
      now.block, line_of(now.pc).c_str(), what);
}

void see_cell(Cell& c, const Access& now, bool write, bool of_shared) {
  const char* what = write ? "writes" : "reads";
  if (!write && of_shared && (c.initialized & now.bytes) != now.bytes)
    fault_in_kernel("thread %u of block %u reads uninitialized shared memory at %s", now.thread,
                    now.block, line_of(now.pc).c_str());
  for (const Access& written : c.written)
    require_before(written, now, what, of_shared);
  if (write) {
    for (const Access& read : c.read)
      require_before(read, now, what, of_shared);
    // The older entry keeps the last write to other bytes of the four.
    if (c.written[0].bytes & ~now.bytes) c.written[1] = c.written[0];
    c.written[1].bytes &= ~now.bytes;
    c.written[0] = now;
    c.initialized |= now.bytes;
  } else {
    if (c.read[0].thread != now.thread || c.read[0].block != now.block) c.read[1] = c.read[0];
    c.read[0] = now;
  }
}

// The key of an address in `pages`. The __shared__ variables of all blocks have the same address,
// so each slot gets a range of its own.
uintptr_t place_of(uintptr_t a, const Block& b) {
  if (!variables.has(a)) return a;
  return (uintptr_t(1) << 60) + b.slot * ((variables.bytes + 7) & ~uintptr_t(3)) +
         (a - variables.p);
}

bool is_private(uintptr_t a) {
  return stacks.has(a) || call.has(a) || Range{uintptr_t(&globals), sizeof globals}.has(a);
}

// What the threads of a warp load by the same instruction, each for the same time, is one request
// to global memory. It takes as many sectors of 32 bytes as it touches.
struct Requests {
  bool counted = false;
  std::map<std::tuple<void*, unsigned, unsigned>, unsigned> loads;  // by instruction and thread
  // By instruction, block, warp and number: the sectors.
  std::map<std::tuple<void*, unsigned, unsigned, unsigned>, std::set<uintptr_t>> sectors;
} requests;

void count_load(const void* p, size_t bytes, void* pc) {
  const Fiber& f = current();
  const unsigned n = requests.loads[{pc, f.owner->number, f.number}]++;
  auto& sectors = requests.sectors[{pc, f.owner->number, f.number / 32, n}];
  for (uintptr_t a = uintptr_t(p) / 32; a <= (uintptr_t(p) + bytes - 1) / 32; ++a)
    sectors.insert(a);
}

}  // namespace

void access(const void* p, size_t bytes, bool write, void* pc) {
  if (!globals.current || is_private(uintptr_t(p))) return;
  if (seed && random_below(SWITCH_EVERY) == 0) {
    progress();
    yield();
  }
  check_access(p, bytes, write, false, pc);
  if (requests.counted && !write && !is_shared(p)) count_load(p, bytes, pc);
}

void check_accesses() {
  checked = true;
}

void check_launch() {
  pages.clear();
}

void check_block(const Block& b) {
  for (const Range& r : {variables, Range{uintptr_t(dynamic_shared(b)), dynamic_bytes}})
    for (uintptr_t a = r.p; checked && a < r.p + r.bytes; a += 4)
      cell(place_of(a, b)) = Cell{};
}

void check_access(const void* p, size_t bytes, bool write, bool atomic, void* pc) {
  if (!checked || is_private(uintptr_t(p))) return;
  const Fiber& f = current();
  const Region* r = region_of(p);
  if (r && !r->inside.has(uintptr_t(p), bytes))
    fault_in_kernel("thread %u of block %u %s outside of a buffer at %s", f.number, f.owner->number,
                    write ? "writes" : "reads", line_of(pc).c_str());
  const bool of_shared = is_shared(p);
  for (uintptr_t a = place_of(uintptr_t(p), *f.owner), end = a + bytes; a < end;) {
    const unsigned at = a & 3, n = std::min<size_t>(4 - at, end - a);
    see_cell(cell(a),
             {f.owner->number, f.epoch, static_cast<unsigned short>(f.number),
              static_cast<unsigned char>(((1u << n) - 1) << at), atomic, pc},
             write, of_shared);
    a += n;
  }
}

}  // namespace simt

#define EXPORT extern "C" __attribute__((visibility("default")))

// Starts the count of requests to global memory anew, or ends it.
EXPORT void simt_count_requests(bool on) {
  simt::requests = {};
  simt::requests.counted = on;
}

// The mean number of sectors of the requests that a line ("file:number") makes; 0 if there is none.
EXPORT double simt_sectors_of_request(const char* line) {
  std::map<void*, bool> is_of_line;
  double count = 0, sectors = 0;
  for (const auto& [key, touched] : simt::requests.sectors) {
    void* pc = std::get<0>(key);
    if (!is_of_line.count(pc)) is_of_line[pc] = simt::line_of(pc) == line;
    if (!is_of_line[pc]) continue;
    ++count;
    sectors += touched.size();
  }
  return count ? sectors / count : 0;
}

extern "C" {

#define HOOKS(n)                                            \
  void __tsan_read##n(void* p) {                            \
    simt::access(p, n, false, __builtin_return_address(0)); \
  }                                                         \
  void __tsan_write##n(void* p) {                           \
    simt::access(p, n, true, __builtin_return_address(0));  \
  }                                                         \
  void __tsan_unaligned_read##n(void* p) {                  \
    simt::access(p, n, false, __builtin_return_address(0)); \
  }                                                         \
  void __tsan_unaligned_write##n(void* p) {                 \
    simt::access(p, n, true, __builtin_return_address(0));  \
  }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16) void __tsan_read_range(void* p, size_t n) {
  simt::access(p, n, false, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t n) {
  simt::access(p, n, true, __builtin_return_address(0));
}
void __tsan_init() {
  simt::check_accesses();
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
// std::atomic of a pointer, which host code uses.
long __tsan_atomic64_load(const volatile long* p, int) {
  return __atomic_load_n(p, __ATOMIC_SEQ_CST);
}
void __tsan_atomic64_store(volatile long* p, long value, int) {
  __atomic_store_n(p, value, __ATOMIC_SEQ_CST);
}

struct Site {
  const char* path;
  unsigned line, column;
  const char* file() const {
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
  }
};
void __ubsan_handle_out_of_bounds(Site* s, size_t index) {
  if (simt::globals.current)
    simt::fault_in_kernel("index %zd outside of its array, %s:%u", ssize_t(index), s->file(),
                          s->line);
}
struct PointerSite {
  Site at;
  void* type;
  unsigned char log_alignment;
};
void __ubsan_handle_type_mismatch_v1(PointerSite* s, size_t) {
  if (simt::globals.current)
    simt::fault_in_kernel("a pointer that needs alignment to %u bytes, %s:%u",
                          1u << s->log_alignment, s->at.file(), s->at.line);
}
}
