// What the parts of one recurrence share: a barrier, ranges of columns, and memory taken once per call.
#pragma once
#include <sched.h>

#include <type_traits>

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

// The columns of [0, width) that parts [begin, end) of `parts` own: whole vectors, and of masks whole blocks of four.
template <class T> HD Range own_columns(int64_t width, int64_t begin, int64_t end, int64_t parts) {
  constexpr int64_t UNIT = LANES<T> < 4 ? 4 : LANES<T>;
  const int64_t units = (width + UNIT - 1) / UNIT;
  const int64_t first = units * begin / parts * UNIT, last = units * end / parts * UNIT;
  return {first < width ? first : width, last < width ? last : width};
}

template <class T> class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t n) : bytes_(n * sizeof(T) + 64), p_(n > 0 ? static_cast<T*>(cpu::allocate(bytes_)) : nullptr) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  HD Buffer(Buffer&& other) : bytes_(other.bytes_), p_(other.p_) { other.p_ = nullptr; }
  HD Buffer& operator=(Buffer&& other) {
    T* const p = p_;
    const size_t bytes = bytes_;
    p_ = other.p_, bytes_ = other.bytes_;
    other.p_ = p, other.bytes_ = bytes;
    return *this;
  }
  ~Buffer() { cpu::release(p_, bytes_); }
  HD operator T*() const { return p_; }

 private:
  size_t bytes_ = 0;
  T* p_ = nullptr;
};

// A workspace row length: whole vectors, and never a multiple of 4096 bytes, whose rows would share cache sets.
template <class T> HD int64_t stride(int64_t width) { return round_up<T>(width) + 16; }

// Calls block(j, keep, vectors) for elements [begin, end) of one mask row, begin a multiple of 4: keep has the words of
// `vectors` vectors, 8 or 2, from element j on; the last block may reach past the end.
template <class F>
HD void each_mask_block(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end, F block) {
  const uint64_t first = row * ((S + 3) / 4);
  int64_t j = begin;
  for (; j + 8 * WORDS <= end; j += 8 * WORDS) {
    Word keep[8];
    keep_words<4>(mask.seed, first + j / 4, mask.threshold, keep);
    block(j, keep, std::integral_constant<int, 8>{});
  }
  for (; j < end; j += 2 * WORDS) {
    Word keep[2];
    keep_words<1>(mask.seed, first + j / 4, mask.threshold, keep);
    block(j, keep, std::integral_constant<int, 2>{});
  }
}

// out[j - begin] = kept ? one : zero.
template <class T>
void mask_values(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end, T one, T zero, T* out) {
  each_mask_block(mask, row, S, begin, end, [&](int64_t j, const Word* keep, auto vectors) {
    const uint32_t* word = reinterpret_cast<const uint32_t*>(keep);
    const int64_t n = end - j < vectors * WORDS ? end - j : vectors * WORDS;
    for (int64_t i = 0; i < n; ++i) out[j - begin + i] = word[i] ? one : zero;
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
