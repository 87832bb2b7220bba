#include "cpu/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <new>

namespace fusedseq::cpu {
namespace {

constexpr size_t HUGE_PAGE = size_t(1) << 21;
constexpr size_t MAPPED = size_t(1) << 20;  // bytes of a block from where it has pages of its own; below it comes from malloc

// Sizes are rounded up to an eighth of their power of two, so that a sequence a little shorter finds the same block; from
// MAPPED on to whole huge pages.
size_t rounded(size_t bytes) {
  size_t step = bytes < MAPPED ? LARGE / 8 : HUGE_PAGE;
  while (step * 16 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

void* from_malloc(size_t bytes) {
  void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return p;
}

void* map(size_t size) {
  char* p = static_cast<char*>(mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (p == MAP_FAILED) throw std::bad_alloc();
  const size_t before = (HUGE_PAGE - uintptr_t(p) % HUGE_PAGE) % HUGE_PAGE;
  if (before) munmap(p, before);
  munmap(p + before + size, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
  madvise(p + before, size, MADV_HUGEPAGE);
#endif
  return p + before;
}

void give_back(void* p, size_t size) { size < MAPPED ? std::free(p) : void(munmap(p, size)); }

struct Cache {
  std::mutex mutex;
  std::multimap<size_t, void*> blocks;
  size_t bytes = 0, most = size_t(512) << 20;
  Cache() {
    if (const char* mb = std::getenv("FUSEDSEQ_CACHE_MB")) most = size_t(std::strtoull(mb, nullptr, 10)) << 20;
  }
};
Cache& cache() {
  static Cache* c = new Cache;  // never destroyed: tensors may outlive every static
  return *c;
}

}  // namespace

void* allocate(size_t bytes) {
  if (bytes < LARGE) return from_malloc(bytes);
  const size_t size = rounded(bytes);
  Cache& c = cache();
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    const auto found = c.blocks.find(size);
    if (found != c.blocks.end()) {
      void* p = found->second;
      c.blocks.erase(found);
      c.bytes -= size;
      return p;
    }
  }
  return size < MAPPED ? from_malloc(size) : map(size);
}

void release(void* p, size_t bytes) {
  if (!p) return;
  if (bytes < LARGE) return std::free(p);
  const size_t size = rounded(bytes);
  Cache& c = cache();
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    if (c.bytes + size <= c.most) {
      c.blocks.emplace(size, p);
      c.bytes += size;
      return;
    }
  }
  give_back(p, size);
}

size_t empty_cache() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  for (const auto& [size, p] : c.blocks) give_back(p, size);
  c.blocks.clear();
  const size_t bytes = c.bytes;
  c.bytes = 0;
  return bytes;
}

}  // namespace fusedseq::cpu
