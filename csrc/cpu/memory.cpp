#include "cpu/memory.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

// Returns the bytes of memory that this process may use: the machine's, or less if a control group
// (a container) limits it. 0 if the system does not say.
size_t memory_of_the_machine() {
  size_t least = SIZE_MAX;
#ifdef _SC_PHYS_PAGES
  const long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  if (pages > 0 && page > 0) least = size_t(pages) * size_t(page);
#endif
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    size_t limit = 0;
    if (std::ifstream(path) >> limit) least = std::min(least, limit);  // "max" is no number
  }
  return least == SIZE_MAX ? 0 : least;
}

// Returns how many bytes of freed blocks are cached: FUSEDSEQ_CACHE_MB, or an eighth of the
// machine's memory, from 512 MiB to 4 GiB. A training step of a Transformer of 65 million
// parameters frees more than a GiB of blocks of the cached sizes.
size_t max_cached_bytes() {
  const char* mb = std::getenv("FUSEDSEQ_CACHE_MB");
  if (!mb || !*mb)
    return std::clamp(memory_of_the_machine() / 8, size_t(512) << 20, size_t(4) << 30);
  if (std::strspn(mb, "0123456789") != std::strlen(mb))
    throw std::runtime_error(
        std::string("FUSEDSEQ_CACHE_MB must be a whole number of MiB, at least 0, got ") + mb);
  const unsigned long long wanted = std::strtoull(mb, nullptr, 10);
  return wanted < (SIZE_MAX >> 20) ? size_t(wanted) << 20 : SIZE_MAX;
}

struct Block {
  size_t size;
  void* p;
  explicit operator bool() const { return p; }
};

// Freed blocks by size and age. Where a new block does not fit, the blocks that have been in the
// cache for the longest time go: they are those of shapes that no longer occur.
class Cache {
 public:
  // Returns the block of this rounded size that was released last, or null if there is none.
  void* take(size_t size) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto next = by_size_.lower_bound({size + 1, 0});
    if (next == by_size_.begin()) return nullptr;
    const auto found = std::prev(next);
    if (found->first.first != size) return nullptr;
    void* p = found->second;
    sizes_.erase(found->first.second);
    by_size_.erase(found);
    bytes_ -= size;
    return p;
  }

  // Caches a block, and frees the oldest ones until the cache has room for it. A block that alone
  // is too large, or for whose entry there is no memory, is freed.
  void put(Block block) noexcept {
    if (block.size > max_bytes_ || !enter(block)) return free_block(block.p, block.size);
    while (const Block oldest = take_beyond_limit())
      free_block(oldest.p, oldest.size);
  }

  // Removes all blocks and returns them, for the caller to free.
  std::vector<Block> clear() {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Block> removed;
    for (const auto& [key, p] : by_size_)
      removed.push_back({key.first, p});
    by_size_.clear();
    sizes_.clear();
    bytes_ = 0;
    return removed;
  }

  // Around a fork: the child has no other thread, which could unlock a mutex that it held.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  // Returns whether there was memory for the block's entry.
  bool enter(Block block) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    const std::pair<size_t, uint64_t> key{block.size, released_};
    try {
      by_size_[key] = block.p;
      sizes_[released_] = block.size;
    } catch (const std::bad_alloc&) {
      by_size_.erase(key);
      return false;
    }
    ++released_;
    bytes_ += block.size;
    return true;
  }

  // Removes the oldest block from a cache that is larger than its limit and returns it; no block
  // from another one.
  Block take_beyond_limit() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes_ <= max_bytes_) return {};
    const auto oldest = sizes_.begin();
    const auto found = by_size_.find({oldest->second, oldest->first});
    const Block block{oldest->second, found->second};
    bytes_ -= block.size;
    by_size_.erase(found);
    sizes_.erase(oldest);
    return block;
  }

  std::mutex mutex_;
  std::map<std::pair<size_t, uint64_t>, void*> by_size_;  // (size, number of the release) -> block
  std::map<uint64_t, size_t> sizes_;                      // number of the release -> size
  uint64_t released_ = 0;
  size_t bytes_ = 0;  // the sum of the blocks' sizes
  const size_t max_bytes_ = max_cached_bytes();
};

Cache& cache();

Cache* new_cache() {
  const auto lock = [] {
    cache().lock();
  };
  const auto unlock = [] {
    cache().unlock();
  };
  Cache* const made = new Cache;
  pthread_atfork(lock, unlock, unlock);
  return made;
}

Cache& cache() {
  static Cache* c = new_cache();  // never destroyed: tensors may outlive every static object
  return *c;
}

}  // namespace

void* allocate(size_t bytes) {
  if (bytes < LARGE) return allocate_from_malloc(bytes);
  const size_t size = rounded(bytes);
  if (void* p = cache().take(size)) return p;
  const auto allocate_new = size < MAPPED ? allocate_from_malloc : allocate_from_mmap;
  try {
    return allocate_new(size);
  } catch (const std::bad_alloc&) {
    if (!empty_cache()) throw;
    return allocate_new(size);
  }
}

void release(void* p, size_t bytes) noexcept {
  if (!p) return;
  if (bytes < LARGE) return std::free(p);
  cache().put({rounded(bytes), p});
}

size_t empty_cache() {
  size_t bytes = 0;
  for (const Block& block : cache().clear()) {
    free_block(block.p, block.size);
    bytes += block.size;
  }
  return bytes;
}

}  // namespace fusedseq::cpu
