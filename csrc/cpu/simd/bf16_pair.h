// Products of bfloat16 numbers by dot products of pairs: in each lane of 32 bits, the two products
// of a pair with a pair are added to a float. AVX-512 calls the instruction vdpbf16ps, aarch64
// bfdot. On a processor that lacks it, bfloat16 is converted to float and multiplied as such.
//
// What is rounded: the operands, to nearest even, where they are not bfloat16 numbers already. The
// products and their sums are in float; the instructions take subnormal numbers for zero.
//
// The products of csrc/cpu/gemm have a type of elements, Element: float, double or bf16_pair. A
// pair stands for two neighbours in the direction of the sum, so a sum over K numbers is one over
// depth<Element>(K) elements, of which the last pair may be half empty.
#pragma once
#include "cpu/simd/elements.h"
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The numbers in an element, and the number of elements that hold K numbers.
template <class Element>
constexpr int64_t NUMBERS = std::is_same<Element, bf16_pair>::value ? 2 : 1;
template <class Element>
HD int64_t depth(int64_t K) {
  return (K + NUMBERS<Element> - 1) / NUMBERS<Element>;
}

// c + a * b.
template <class T>
HD Vec<T> multiply_add(Vec<T> c, Vec<T> a, Vec<T> b) {
  return c + a * b;
}
#if defined(__AVX512BF16__)
HD Vec<float> multiply_add(Vec<float> c, Vec<bf16_pair> a, Vec<bf16_pair> b) {
  return Vec<float>(Vec<float>::Raw(_mm512_dpbf16_ps(__m512(c.v), __m512bh(a.v), __m512bh(b.v))));
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
HD Vec<float> multiply_add(Vec<float> c, Vec<bf16_pair> a, Vec<bf16_pair> b) {
  return Vec<float>(vbfdotq_f32(float32x4_t(c.v), vreinterpretq_bf16_u32(uint32x4_t(a.v)),
                                vreinterpretq_bf16_u32(uint32x4_t(b.v))));
}
#endif

#if defined(__AVX512BF16__)
// Pairs of number i and number 16 + i of a vector of 32 bfloat16 numbers.
HD Vec<bf16_pair> pair_halves(__m512i x) {
  static constexpr uint16_t ORDER[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                         21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                         11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return Vec<bf16_pair>(
      Vec<bf16_pair>::Raw(_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), x)));
}
#endif
// Pairs (first[i], second[i]) of the lanes of two vectors.
HD Vec<bf16_pair> pair_lanes(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  return pair_halves(__m512i(_mm512_cvtne2ps_pbh(__m512(second.v), __m512(first.v))));
#else
  return Vec<bf16_pair>(rounded_bits(first) | rounded_bits(second) << 16);
#endif
}
// The same of two vectors of bfloat16 numbers.
HD Vec<bf16_pair> pair_lanes(HalfVector first, HalfVector second) {
#if defined(__AVX512BF16__)
  const __m512i lower = _mm512_castsi256_si512(__m256i(first));
  return pair_halves(_mm512_maskz_inserti64x4(__mmask8(-1), lower, __m256i(second), 1));
#else
  return Vec<bf16_pair>(__builtin_convertvector(first, WordVector) |
                        __builtin_convertvector(second, WordVector) << 16);
#endif
}
// Pairs of neighbours among the lanes of two vectors, of which `first` comes first.
HD Vec<bf16_pair> pair_neighbours(Vec<float> first, Vec<float> second) {
#if defined(__AVX512BF16__)
  return Vec<bf16_pair>(
      Vec<bf16_pair>::Raw(_mm512_cvtne2ps_pbh(__m512(second.v), __m512(first.v))));
#else
  static constexpr LaneConstants<float> even([](int i) { return 2 * i; }),
      odd([](int i) { return 2 * i + 1; });
  const Vec<float>::Mask e = even, o = odd;
  return pair_lanes(Vec<float>(FUSEDSEQ_SHUFFLE(first.v, second.v, e)),
                    Vec<float>(FUSEDSEQ_SHUFFLE(first.v, second.v, o)));
#endif
}

// The first n of a vector's elements that follow each other in memory: numbers n and more are zero.
template <class Element, class Stored>
HD Vec<Element> load_along(const Stored* p, int64_t n) {
  constexpr int64_t lanes = LANES<Element>;
  if constexpr (!std::is_same<Element, bf16_pair>::value) {
    return load_up_to(p, n);
  } else if constexpr (std::is_same<Stored, bfloat16>::value) {
    Vec<bf16_pair> x;
    if (n >= 2 * lanes) {
      memcpy(&x.v, p, sizeof x.v);
    } else {
#if defined(__AVX512BF16__)
      return Vec<bf16_pair>(Vec<bf16_pair>::Raw(_mm512_maskz_loadu_epi16((1u << n) - 1, p)));
#endif
      uint16_t buffer[2 * lanes] = {};
      memcpy(buffer, p, n * sizeof(Stored));
      memcpy(&x.v, buffer, sizeof x.v);
    }
    return x;
  } else {
    const Vec<float> zero(0.f);
    return pair_neighbours(load_up_to(p, n), n > lanes ? load_up_to(p + lanes, n - lanes) : zero);
  }
}

// Elements made from the same column of up to NUMBERS<Element> rows, `ld` apart, for the first n
// columns; the others are zero. rows: how many rows there are left.
template <class Element, class Stored>
HD Vec<Element> load_across(const Stored* p, int64_t ld, int64_t rows, int64_t n) {
  if constexpr (!std::is_same<Element, bf16_pair>::value) {
    return load_up_to(p, n);
  } else {
    const Vec<float> zero(0.f);
    if constexpr (std::is_same<Stored, bfloat16>::value) {
      if (n >= LANES<Element> && rows > 1) {
        HalfVector first, second;
        memcpy(&first, p, sizeof first);
        memcpy(&second, p + ld, sizeof second);
        return pair_lanes(first, second);
      }
    }
    return pair_lanes(load_up_to(p, n), rows > 1 ? load_up_to(p + ld, n) : zero);
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
