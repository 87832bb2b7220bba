// A workspace cut into aligned buffers.
#pragma once
#include <cstdint>

namespace fusedseq::cuda {

// take() returns the next buffer of n elements. If base is null it only counts, and returns null:
// the same code then computes the size of the workspace.
struct Workspace {
  char* base;
  int64_t used = 0;
  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(base + used);
    used += (n * int64_t(sizeof(T)) + 255) / 256 * 256;
    return base ? p : nullptr;
  }
};

}  // namespace fusedseq::cuda
