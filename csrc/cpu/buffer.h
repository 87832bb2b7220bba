// Workspaces of a call, from the caching allocator of cpu/memory.h.
#pragma once
#include "cpu/memory.h"
#include "cpu/simd/vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// n uninitialized elements of type T, or a null pointer if n is 0. 64 bytes more are allocated, so
// that a vector that starts at the last element may be loaded and stored whole.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n)
      : bytes_(n * sizeof(T) + 64), p_(n > 0 ? static_cast<T*>(cpu::allocate(bytes_)) : nullptr) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  HD Buffer(Buffer&& other) : bytes_(other.bytes_), p_(other.p_) { other.p_ = nullptr; }
  HD Buffer& operator=(Buffer&& other) {
    T* const p = p_;
    const size_t bytes = bytes_;
    p_ = other.p_;
    bytes_ = other.bytes_;
    other.p_ = p;
    other.bytes_ = bytes;
    return *this;
  }
  ~Buffer() { cpu::release(p_, bytes_); }
  HD operator T*() const { return p_; }

 private:
  size_t bytes_ = 0;
  T* p_ = nullptr;
};

// The length of a workspace's rows is whole vectors and 16 elements more, so that it is never a
// multiple of 4096 bytes, whose rows would all map to the same cache sets.
constexpr int64_t ROW_PADDING = 16;

template <class T>
HD int64_t leading_dimension(int64_t width) {
  return round_up<T>(width) + ROW_PADDING;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
