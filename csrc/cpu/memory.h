// Memory for large results and workspaces: on huge pages where the system gives them. A fresh page of 4 KiB costs a
// fault of one to two microseconds on a virtual machine, so that 190 MB of workspace cost more than the work in them.
#pragma once
#include <sys/mman.h>

#include <cstdlib>

namespace fusedseq::cpu {

constexpr size_t HUGE_PAGE = size_t(1) << 21, LARGE = 2 * HUGE_PAGE;

// Uninitialised; released by std::free. Null where there is none.
inline __attribute__((always_inline)) void* allocate(size_t bytes) {
  const size_t alignment = bytes < LARGE ? 64 : HUGE_PAGE;
  const size_t size = (bytes + alignment) / alignment * alignment;  // at least one byte past the end
  void* p = std::aligned_alloc(alignment, size);
#ifdef MADV_HUGEPAGE
  if (p && bytes >= LARGE) madvise(p, size, MADV_HUGEPAGE);
#endif
  return p;
}

}  // namespace fusedseq::cpu
