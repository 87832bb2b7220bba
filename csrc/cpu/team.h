// What the parts of one recurrence share: a barrier, ranges of columns, and memory taken once per call.
#pragma once
#include <sched.h>

#include "gemm.h"
#include "kernels.h"
#include "memory.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Parts may come one to a thread, or several to one thread, which then arrives with their number.
class Barrier {
 public:
  explicit Barrier(int parts) : parts_(parts) {}
  void wait(int weight) {
    const int turn = __atomic_load_n(&turn_, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived_, weight, __ATOMIC_ACQ_REL) == parts_) {
      __atomic_store_n(&arrived_, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&turn_, turn + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&turn_, __ATOMIC_ACQUIRE) == turn; ++spins) {
      if (spins > 4000) sched_yield();  // more threads than cores: let the late one run
#ifdef __SSE2__
      else _mm_pause();
#endif
    }
  }

 private:
  int parts_;
  alignas(64) int arrived_ = 0;
  alignas(64) int turn_ = 0;
};

struct Range {
  int64_t begin, end;
  HD int64_t size() const { return end - begin; }
};

// The columns of [0, width) that parts [begin, end) of `parts` own: whole vectors, but for the last.
template <class T> HD Range own_columns(int64_t width, int64_t begin, int64_t end, int64_t parts) {
  const int64_t vectors = (width + LANES<T> - 1) / LANES<T>;
  const int64_t first = vectors * begin / parts * LANES<T>, last = vectors * end / parts * LANES<T>;
  return {first < width ? first : width, last < width ? last : width};
}

template <class T> class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : p_(n > 0 ? static_cast<T*>(cpu::allocate(n * sizeof(T) + 64)) : nullptr) {
    if (n > 0 && !p_) std::abort();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  HD Buffer(Buffer&& other) : p_(other.p_) { other.p_ = nullptr; }
  HD Buffer& operator=(Buffer&& other) {
    T* p = p_;
    p_ = other.p_, other.p_ = p;
    return *this;
  }
  ~Buffer() { std::free(p_); }
  HD operator T*() const { return p_; }

 private:
  T* p_ = nullptr;
};

// A workspace row length: whole vectors, and never a multiple of 4096 bytes, whose rows would share cache sets.
template <class T> HD int64_t stride(int64_t width) { return round_up<T>(width) + 16; }

// out[j - begin] = kept ? one : zero, for elements [begin, end) of one mask row; begin is a multiple of 4.
template <class T>
void mask_values(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end, T one, T zero, T* out) {
  for (int64_t j = begin; j < end; j += 4 * WORDS) {
    Word keep[4];
    keep_words(mask.seed, row * ((S + 3) / 4) + j / 4, mask.threshold, keep);
    const uint32_t* word = reinterpret_cast<const uint32_t*>(keep);
    for (int64_t i = 0; i < 4 * WORDS && j + i < end; ++i) out[j - begin + i] = word[i] ? one : zero;
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
