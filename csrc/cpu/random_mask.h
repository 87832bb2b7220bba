// Rows of a random mask, generated block by block where they are used.
#pragma once
#include <type_traits>

#include "cpu/arguments/common.h"
#include "cpu/simd/philox.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Calls block(j, keep, vectors) for consecutive elements [begin, end) of one mask row; begin must
// be a multiple of 4. `keep` has the words of `vectors` vectors (8 or 2) from element j on, all
// ones where the element is kept. The last block may extend beyond `end`.
template <class Function>
HD void each_mask_block(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end,
                        Function block) {
  const uint64_t first = row * ((S + 3) / 4);  // the row's first counter
  int64_t j = begin;
  for (; j + 8 * WORDS <= end; j += 8 * WORDS) {
    WordVector keep[8];
    keep_words<4>(mask.seed, mask.stream, first + j / 4, mask.threshold, keep);
    block(j, keep, std::integral_constant<int, 8>{});
  }
  for (; j < end; j += 2 * WORDS) {
    WordVector keep[2];
    keep_words<1>(mask.seed, mask.stream, first + j / 4, mask.threshold, keep);
    block(j, keep, std::integral_constant<int, 2>{});
  }
}

// out[j - begin] = keep ? one : zero, for j in [begin, end).
template <class T>
void mask_values(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end, T one,
                 T zero, T* out) {
  each_mask_block(mask, row, S, begin, end, [&](int64_t j, const WordVector* keep, auto vectors) {
    const uint32_t* word = reinterpret_cast<const uint32_t*>(keep);
    const int64_t n = end - j < vectors * WORDS ? end - j : vectors * WORDS;
    for (int64_t i = 0; i < n; ++i)
      out[j - begin + i] = word[i] ? one : zero;
  });
}

inline void keep_mask(const cpu::Mask& mask, int64_t row, int64_t S, int64_t begin, int64_t end,
                      uint8_t* keep) {
  mask_values<uint8_t>(mask, row, S, begin, end, 1, 0, keep);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
