// The random number generator Philox4x32-10 (Salmon et al., 2011), for one counter or for a vector
// of counters.
//
// Every random mask of the library follows one rule. Element (row, j) of a mask whose rows have S
// elements uses word j % 4 of one Philox block. The block's key is `seed`. The low two of the four
// words of its counter are row * ceil(S / 4) + j / 4, the third is the mask's stream, and the
// fourth is 0. The mask keeps the element if word >= round(p * 2^32).
#pragma once
#include "math/host_device.h"
#include "math/mask_stream.h"

namespace fusedseq {

// The 32 x 32 -> 64 bit product of Philox, as its high and low halves.
struct Multiply {
  HD void operator()(uint32_t a, uint32_t b, uint32_t& hi, uint32_t& lo) const {
    const uint64_t product = uint64_t(a) * b;
    hi = uint32_t(product >> 32);
    lo = uint32_t(product);
  }
};

// Replaces the counter c by its four random words. U is uint32_t or a vector of such words;
// multiply(U, uint32_t, U& hi, U& lo) multiplies them.
template <class U, class F>
HD void philox(uint64_t key, U (&c)[4], F multiply) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
#ifdef __CUDACC__
#pragma unroll
#else
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    U hi0, lo0, hi1, lo1;
    multiply(c[0], 0xD2511F53u, hi0, lo0);
    multiply(c[2], 0xCD9E8D57u, hi1, lo1);
    c[0] = hi1 ^ c[1] ^ k0;
    c[1] = lo1;
    c[2] = hi0 ^ c[3] ^ k1;
    c[3] = lo0;
  }
}

// Returns word `word` of the block at `counter` of a stream.
HD uint32_t philox_word(uint64_t key, MaskStream stream, uint64_t counter, int word) {
  uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), uint32_t(stream), 0};
  philox(key, c, Multiply{});
  return c[word];
}

}  // namespace fusedseq
