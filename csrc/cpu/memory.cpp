#include "cpu/memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

namespace fusedseq::cpu {
namespace {

constexpr size_t HUGE_PAGE = size_t(1) << 21;

// Blocks of at least this many bytes have pages of their own from mmap; smaller ones come from
// malloc.
constexpr size_t MAPPED = size_t(1) << 20;

// Rounds a size up so that a slightly shorter sequence finds the same cached block: to an eighth of
// its power of two, and from MAPPED bytes on to whole huge pages.
size_t rounded(size_t bytes) {
  size_t step = bytes < MAPPED ? LARGE / 8 : HUGE_PAGE;
  while (step * 16 < bytes)
    step *= 2;
  return (bytes + step - 1) / step * step;
}

void* allocate_from_malloc(size_t bytes) {
  void* p = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return p;
}

// Maps `size` bytes aligned to a huge page. One huge page more is mapped, and the pages before and
// behind the aligned block are unmapped again.
void* allocate_from_mmap(size_t size) {
  char* p = static_cast<char*>(
      mmap(nullptr, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (p == MAP_FAILED) throw std::bad_alloc();
  const size_t before = (HUGE_PAGE - uintptr_t(p) % HUGE_PAGE) % HUGE_PAGE;
  if (before) munmap(p, before);
  munmap(p + before + size, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
  madvise(p + before, size, MADV_HUGEPAGE);
#endif
  return p + before;
}

void free_block(void* p, size_t size) {
  if (size < MAPPED)
    std::free(p);
  else
    munmap(p, size);
}

struct Cache {
  std::mutex mutex;
  std::multimap<size_t, void*> blocks;  // by rounded size
  size_t bytes = 0;                     // the sum of the blocks' sizes
  size_t max_bytes = size_t(512) << 20;

  Cache() {
    const char* mb = std::getenv("FUSEDSEQ_CACHE_MB");
    if (!mb || !*mb) return;
    if (std::strspn(mb, "0123456789") != std::strlen(mb))
      throw std::runtime_error(
          std::string("FUSEDSEQ_CACHE_MB must be a whole number of MiB, at least 0, got ") + mb);
    const unsigned long long wanted = std::strtoull(mb, nullptr, 10);
    max_bytes = wanted < (SIZE_MAX >> 20) ? size_t(wanted) << 20 : SIZE_MAX;
  }
};

Cache& cache() {
  static Cache* c = new Cache;  // never destroyed: tensors may outlive every static object
  return *c;
}

}  // namespace

void* allocate(size_t bytes) {
  if (bytes < LARGE) return allocate_from_malloc(bytes);
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
  return size < MAPPED ? allocate_from_malloc(size) : allocate_from_mmap(size);
}

void release(void* p, size_t bytes) {
  if (!p) return;
  if (bytes < LARGE) return std::free(p);
  const size_t size = rounded(bytes);
  Cache& c = cache();
  {
    const std::lock_guard<std::mutex> lock(c.mutex);
    if (c.bytes + size <= c.max_bytes) {
      c.blocks.emplace(size, p);
      c.bytes += size;
      return;
    }
  }
  free_block(p, size);
}

size_t empty_cache() {
  Cache& c = cache();
  const std::lock_guard<std::mutex> lock(c.mutex);
  for (const auto& [size, p] : c.blocks)
    free_block(p, size);
  c.blocks.clear();
  const size_t bytes = c.bytes;
  c.bytes = 0;
  return bytes;
}

}  // namespace fusedseq::cpu
