// Philox for vectors of counters, and from it the elements that a random mask keeps.
//
// What limits it: the latency of the multiplications. With one vector of counters the generator
// takes 0.31 ns an element, with four vectors in lockstep 0.20 ns (AVX-512).
#pragma once
#include "cpu/simd/elements.h"
#include "math/philox.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// A 32-bit word is stored in the low half of a 64-bit lane. The high halves may hold anything: the
// product instruction reads the low halves only, so that the low word of a product need not be
// masked out.
constexpr int COUNTERS = VECTOR_BYTES / 8;  // in a vector
typedef uint64_t WideVector __attribute__((vector_size(VECTOR_BYTES)));

// VECTORS vectors of words, which the generator processes in lockstep.
template <int VECTORS>
struct WideGroup {
  WideVector v[VECTORS];
  HD WideGroup operator^(const WideGroup& b) const {
    WideGroup r;
#pragma GCC unroll 4
    for (int g = 0; g < VECTORS; ++g)
      r.v[g] = v[g] ^ b.v[g];
    return r;
  }
  HD WideGroup operator^(uint32_t k) const {
    WideGroup r;
#pragma GCC unroll 4
    for (int g = 0; g < VECTORS; ++g)
      r.v[g] = v[g] ^ k;
    return r;
  }
};

// The multiplication that math/philox.h needs, for groups of vectors.
struct MultiplyWide {
  HD static WideVector product(WideVector a, uint32_t b) {
#if defined(__AVX512F__)
    return (WideVector)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (WideVector)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (WideVector)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
    for (int i = 0; i < COUNTERS; ++i)
      a[i] = uint64_t(uint32_t(a[i])) * b;
    return a;
#endif
  }
  template <int VECTORS>
  HD void operator()(const WideGroup<VECTORS>& a, uint32_t b, WideGroup<VECTORS>& hi,
                     WideGroup<VECTORS>& lo) const {
#pragma GCC unroll 4
    for (int g = 0; g < VECTORS; ++g) {
      lo.v[g] = product(a.v[g], b);
      hi.v[g] = lo.v[g] >> 32;
    }
  }
};

// Computes which of the 2 * WORDS * VECTORS elements from element 4 * counter on the mask keeps:
// words of all ones (kept) or zero, in the order of the elements.
template <int VECTORS>
HD void keep_words(uint64_t key, MaskStream stream, uint64_t counter, uint64_t threshold,
                   WordVector (&keep)[2 * VECTORS]) {
  // p = 1: no 32-bit word reaches the threshold.
  if (threshold > 0xffffffffu) {
    for (int j = 0; j < 2 * VECTORS; ++j)
      keep[j] = WordVector{};
    return;
  }

  // Lane 2L + e of a vector gets counter COUNTERS/2 * e + L, so that interleaving neighbouring
  // lanes within 128 bits, at the end, restores the order of the elements.
  WideVector lane, even, odd;
  for (int i = 0; i < COUNTERS; ++i) {
    lane[i] = COUNTERS / 2 * (i % 2) + i / 2;
    even[i] = i % 2 * COUNTERS + i / 2 * 2;
    odd[i] = even[i] + 1;
  }
  WideGroup<VECTORS> c[4] = {};
#pragma GCC unroll 4
  for (int g = 0; g < VECTORS; ++g) {
    c[0].v[g] = lane + (counter + g * COUNTERS);
    c[1].v[g] = c[0].v[g] >> 32;
    c[2].v[g] = WideVector{} + uint32_t(stream);
  }
  philox(key, c, MultiplyWide{});

  // Pack the four words of each counter into two vectors, put them in order and compare.
#pragma GCC unroll 4
  for (int g = 0; g < VECTORS; ++g) {
    const WideVector low = (c[0].v[g] & 0xffffffffu) | (c[1].v[g] << 32);
    const WideVector high = (c[2].v[g] & 0xffffffffu) | (c[3].v[g] << 32);
    keep[2 * g] = WordVector(WordVector(FUSEDSEQ_SHUFFLE(low, high, even)) >= uint32_t(threshold));
    keep[2 * g + 1] =
        WordVector(WordVector(FUSEDSEQ_SHUFFLE(low, high, odd)) >= uint32_t(threshold));
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
