// Random masks of the CUDA kernels, one element at a time: csrc/math/philox.h has the generator.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "math/philox.h"

namespace fusedseq::cuda {

// The four words of a Philox block, which belong to four neighbouring elements of a mask. A word is
// selected by comparisons: an index that is not a constant would put the words into local memory.
struct PhiloxBlock {
  uint32_t c[4];
  __device__ void make(uint64_t seed, uint64_t counter, MaskStream stream = MaskStream::single) {
    c[0] = uint32_t(counter);
    c[1] = uint32_t(counter >> 32);
    c[2] = uint32_t(stream);
    c[3] = 0;
    philox(seed, c, Multiply{});
  }
  __device__ uint32_t operator[](int i) const {
    return i < 2 ? (i ? c[1] : c[0]) : (i == 2 ? c[2] : c[3]);
  }
};

// Whether element i of a mask of one row is kept.
__device__ inline bool keep_in_row(uint64_t seed, uint64_t threshold, int64_t i) {
  PhiloxBlock words;
  words.make(seed, uint64_t(i / 4));
  return words[int(i % 4)] >= threshold;
}

}  // namespace fusedseq::cuda
