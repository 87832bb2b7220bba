// Philox4x32-10 (Salmon et al., 2011), for one counter or a vector of them. The contract of every random mask:
// element (row, j) of rows of length S is word j % 4 of the block with key `seed` and counter
// row * ceil(S / 4) + j / 4, and is kept where word >= round(p * 2^32).
#pragma once
#include "host_device.h"

namespace fusedseq {

struct Multiply {
  HD void operator()(uint32_t a, uint32_t b, uint32_t& hi, uint32_t& lo) const {
    const uint64_t product = uint64_t(a) * b;
    hi = uint32_t(product >> 32), lo = uint32_t(product);
  }
};

// U: uint32_t or a vector of them, with its `multiply(U, uint32_t, U& hi, U& lo)`. c: in the counter, out four words.
template <class U, class F> HD void philox(uint64_t key, U (&c)[4], F multiply) {
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
    c[0] = hi1 ^ c[1] ^ k0, c[1] = lo1;
    c[2] = hi0 ^ c[3] ^ k1, c[3] = lo0;
  }
}

// Word `word` of the block at `counter`.
HD uint32_t philox_word(uint64_t key, uint64_t counter, int word) {
  uint32_t c[4] = {uint32_t(counter), uint32_t(counter >> 32), 0, 0};
  philox(key, c, Multiply{});
  return c[word];
}

}  // namespace fusedseq
