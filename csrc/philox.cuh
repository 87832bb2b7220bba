// The words of a mask, one at a time.
#pragma once
#include "philox.h"

namespace fusedseq::cuda {

// The block of Philox at a counter. Its words are picked by conditions: an index would put them into local memory.
struct Words {
  uint32_t c[4];
  __device__ void make(uint64_t seed, uint64_t counter) {
    c[0] = uint32_t(counter), c[1] = uint32_t(counter >> 32), c[2] = c[3] = 0;
    philox(seed, c, Multiply{});
  }
  __device__ uint32_t operator[](int i) const { return i < 2 ? (i ? c[1] : c[0]) : (i == 2 ? c[2] : c[3]); }
};

// Whether element i of a mask of one row is kept.
__device__ inline bool kept_in_row(uint64_t seed, uint64_t threshold, int64_t i) {
  Words words;
  words.make(seed, uint64_t(i / 4));
  return words[int(i % 4)] >= threshold;
}

}  // namespace fusedseq::cuda
