// The checked build: kernels compiled with -fsanitize=thread,bounds,alignment call the hooks at the end of this file,
// which replace the sanitizers' own runtimes. They see every access of a kernel: outside of a buffer, of shared memory that
// nobody wrote, or in a race, where two threads touch the same bytes, one of them writes, and neither a barrier of the
// block nor a meeting of the warp lies between. At some of the accesses the other threads run first.
//
// Not known yet: fences and flags between blocks. Accesses of two blocks race unless both are atomic.
#include "checker.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>

namespace simt {
namespace {

constexpr unsigned SWITCH_EVERY = 16;  // accesses, on average

// An access of some of a cell's bytes: by whom, and how far the block's barriers and the warp had come.
struct Access { unsigned block, barriers, seen; unsigned short thread; unsigned char bytes; bool atomic; void* pc; };
struct Cell { Access written, read[2]; unsigned char guarded, initialised; };  // of 4 bytes
struct Page { Cell cells[1024]; };
std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;

Cell& cell(uintptr_t a) {
  auto& page = pages[a >> 12];
  if (!page) page = std::make_unique<Page>();
  return page->cells[a >> 2 & 1023];
}

std::string line_of(void* pc) {  // of the source
  Dl_info library;
  if (!dladdr(pc, &library)) return "?";
  char text[512];
  snprintf(text, sizeof text, "addr2line -s -e '%s' %#zx", library.dli_fname, size_t(static_cast<char*>(pc) - static_cast<char*>(library.dli_fbase) - 1));
  FILE* process = popen(text, "r");
  std::string line = process && fgets(text, sizeof text, process) ? text : "?";
  if (process) pclose(process);
  return line.substr(0, line.find_first_of(" \n"));
}

bool before(const Access& a, const Fiber& f) {
  return a.block == f.in->number &&
         (a.thread == f.number || a.barriers < f.in->barriers || (a.thread / 32u == f.number / 32 && a.seen <= f.seen[a.thread % 32]));
}

void require_before(const Access& a, const Access& now, const char* what, bool is_shared) {
  const Fiber& f = *globals.current;
  if (!(a.bytes & now.bytes) || (a.atomic && now.atomic) || before(a, f)) return;
  fault_in_kernel("race on %s memory: thread %u of block %u at %s, then thread %u of block %u at %s, %s", is_shared ? "shared" : "global",
                  a.thread, a.block, line_of(a.pc).c_str(), f.number, f.in->number, line_of(now.pc).c_str(), what);
}

void see_cell(Cell& c, const Access& now, bool write, bool is_shared) {
  const char* what = write ? "writes" : "reads";
  if (c.guarded & now.bytes)
    fault_in_kernel("thread %u of block %u %s outside of a buffer at %s", now.thread, now.block, what, line_of(now.pc).c_str());
  if (!write && is_shared && (c.initialised & now.bytes) != now.bytes)
    fault_in_kernel("thread %u of block %u reads uninitialised shared memory at %s", now.thread, now.block, line_of(now.pc).c_str());
  require_before(c.written, now, what, is_shared);
  if (write) {
    for (const Access& read : c.read) require_before(read, now, what, is_shared);
    c.written = now;
    c.initialised |= now.bytes;
  } else {
    if (c.read[0].thread != now.thread || c.read[0].block != now.block) c.read[1] = c.read[0];
    c.read[0] = now;
  }
}

void see(uintptr_t a, size_t bytes, bool write, bool atomic, void* pc) {
  const Fiber& f = *globals.current;
  for (const uintptr_t end = a + bytes; a < end;) {
    const unsigned at = a & 3, n = std::min<size_t>(4 - at, end - a);
    see_cell(cell(a), {f.in->number, f.in->barriers, f.seen[f.lane], static_cast<unsigned short>(f.number),
                       static_cast<unsigned char>(((1u << n) - 1) << at), atomic, pc}, write, shared.has(a));
    a += n;
  }
}

bool is_private(uintptr_t a) { return stacks.has(a) || call.has(a) || Range{uintptr_t(&globals), sizeof globals}.has(a); }

void hook(void* p, size_t bytes, bool write, void* pc) {
  if (!globals.current || is_private(uintptr_t(p))) return;
  if (seed && random_below(SWITCH_EVERY) == 0) yield();
  see(uintptr_t(p), bytes, write, false, pc);
}

}  // namespace

void check_launch(const Region* regions, size_t count) {
  pages.clear();
  for (const Region* r = regions; r < regions + count; ++r)
    for (uintptr_t a = uintptr_t(r->base); a < uintptr_t(r->base) + r->base_bytes; ++a) {
      if (a == r->p) a += r->bytes;
      cell(a).guarded |= 1u << (a & 3);
    }
}

void check_block() {
  for (uintptr_t a = shared.p; a < shared.p + shared.bytes; a += 4) cell(a) = Cell{};
}

void check_warp(Warp& w, unsigned lanes) {  // each knows what any of them knew
  unsigned joint[32] = {};
  for (unsigned l = 0; l < 32; ++l)
    for (unsigned k = 0; lanes >> l & 1 && k < 32; ++k) joint[k] = std::max(joint[k], w.lane[l]->seen[k]);
  for (unsigned l = 0; l < 32; ++l) {
    if (!(lanes >> l & 1)) continue;
    std::copy(joint, joint + 32, w.lane[l]->seen);
    ++w.lane[l]->seen[l];
  }
}

void check_atomic(const volatile void* p, size_t bytes, void* pc) {
  if (!is_private(uintptr_t(p))) see(uintptr_t(p), bytes, true, true, pc);
}

}  // namespace simt

extern "C" {

#define HOOKS(n)                                                                                            \
  void __tsan_read##n(void* p) { simt::hook(p, n, false, __builtin_return_address(0)); }                    \
  void __tsan_write##n(void* p) { simt::hook(p, n, true, __builtin_return_address(0)); }                    \
  void __tsan_unaligned_read##n(void* p) { simt::hook(p, n, false, __builtin_return_address(0)); }          \
  void __tsan_unaligned_write##n(void* p) { simt::hook(p, n, true, __builtin_return_address(0)); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
void __tsan_read_range(void* p, size_t n) { simt::hook(p, n, false, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { simt::hook(p, n, true, __builtin_return_address(0)); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

struct Site {
  const char* path;
  unsigned line, column;
  const char* file() const { const char* slash = strrchr(path, '/'); return slash ? slash + 1 : path; }
};
void __ubsan_handle_out_of_bounds(Site* s, size_t index) {
  if (simt::globals.current) simt::fault_in_kernel("index %zd outside of its array, %s:%u", ssize_t(index), s->file(), s->line);
}
struct PointerSite { Site at; void* type; unsigned char log_alignment; };
void __ubsan_handle_type_mismatch_v1(PointerSite* s, size_t) {
  if (simt::globals.current)
    simt::fault_in_kernel("a pointer that needs alignment to %u bytes, %s:%u", 1u << s->log_alignment, s->at.file(), s->at.line);
}

}
