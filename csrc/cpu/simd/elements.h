// Element types in memory (float, double, bfloat16) and their conversion to the type of computing.
// bfloat16 is the upper half of a float and is computed in float; stores round to nearest even.
// Whole numbers of 8 bits, which are quantized weights, are loaded as floats and never stored.
#pragma once
#include "cpu/arguments/common.h"
#include "cpu/simd/streaming.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

using cpu::bfloat16;

// The type in which values of type T are computed, and in which their products are added.
template <class T>
struct RealTypeOf {
  using type = T;
};
template <>
struct RealTypeOf<bfloat16> {
  using type = float;
};
template <>
struct RealTypeOf<int8_t> {
  using type = float;
};
template <>
struct RealTypeOf<bf16_pair> {
  using type = float;
};
template <class T>
using RealOf = typename RealTypeOf<T>::type;

// Calls f with a value of the C++ type that corresponds to `type`.
template <class Function>
void by_type(cpu::Type type, Function f) {
  switch (type) {
    case cpu::Type::f32:
      return f(float());
    case cpu::Type::f64:
      return f(double());
    case cpu::Type::bf16:
      return f(bfloat16());
  }
}

// A vector of 32-bit words, and a vector of 16-bit words with as many lanes.
constexpr int WORDS = VECTOR_BYTES / 4;
typedef uint16_t HalfVector __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint32_t WordVector __attribute__((vector_size(VECTOR_BYTES)));

// Whole vectors: load_as converts the elements in memory to the type of computing, and store_as
// converts them back.
template <class Stored>
HD Vec<Stored> load_as(const Stored* p) {
  return Vec<Stored>::load(p);
}
template <class Stored>
HD void store_as(Stored* p, Vec<Stored> x) {
  x.store(p);
}
// The floats whose upper halves are h. GCC 12 makes two halves of a conversion by the vector
// extension on AVX2 and AVX-512: four shuffles in place of one.
HD Vec<float> widened(HalfVector h) {
#if defined(__AVX512F__)
  const WordVector w = WordVector(_mm512_maskz_cvtepu16_epi32(__mmask16(-1), __m256i(h)));
#elif defined(__AVX2__)
  const WordVector w = WordVector(_mm256_cvtepu16_epi32(__m128i(h)));
#else
  const WordVector w = __builtin_convertvector(h, WordVector);
#endif
  return Vec<float>(Vec<float>::Raw(w << 16));
}
HD Vec<float> load_as(const bfloat16* p) {
  HalfVector h;
  memcpy(&h, p, sizeof h);
  return widened(h);
}
HD Vec<float> load_as(const int8_t* p) {
#if defined(__AVX512F__)
  const __m128i q = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return as_numbers<float>(Vec<float>::Mask(_mm512_maskz_cvtepi8_epi32(__mmask16(-1), q)));
#elif defined(__AVX2__)
  const __m128i q = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return as_numbers<float>(Vec<float>::Mask(_mm256_cvtepi8_epi32(q)));
#else
  typedef int8_t Byte __attribute__((vector_size(VECTOR_BYTES / 4)));
  Byte q;
  memcpy(&q, p, sizeof q);
  return as_numbers<float>(__builtin_convertvector(q, Vec<float>::Mask));
#endif
}
// The bits of x rounded to bfloat16, in the low half of each lane.
HD WordVector rounded_bits(Vec<float> x) {
  const WordVector u = WordVector(x.v);
  const WordVector r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return x.v == x.v ? r : (u >> 16) | 0x40;  // a NaN must not round to infinity
}
HD HalfVector narrowed(Vec<float> x) {
#if defined(__AVX512BF16__)
  return HalfVector(_mm512_cvtneps_pbh(__m512(x.v)));
#else
  return __builtin_convertvector(rounded_bits(x), HalfVector);
#endif
}
HD void store_as(bfloat16* p, Vec<float> x) {
  const HalfVector h = narrowed(x);
  memcpy(p, &h, sizeof h);
}

// The streaming stores of simd/streaming.h, of whole vectors.
template <class Stored>
HD void stream_as(Stored* p, Vec<Stored> x) {
  stream(p, x);
}
HD void stream_as(bfloat16* p, Vec<float> x) {
  const HalfVector h = narrowed(x);
#if defined(__AVX512F__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), __m256i(h));
#elif defined(__AVX2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), __m128i(h));
#else
  memcpy(p, &h, sizeof h);
#endif
}

// Single elements.
template <class Stored>
HD void store_scalar(Stored* p, RealOf<Stored> x) {
  *p = x;
}
HD void store_scalar(bfloat16* p, float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  p->bits = uint16_t(x == x ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40);
}
template <class Stored>
HD RealOf<Stored> load_scalar(const Stored* p) {
  return RealOf<Stored>(*p);
}
HD float load_scalar(const bfloat16* p) {
  const uint32_t u = uint32_t(p->bits) << 16;
  float x;
  memcpy(&x, &u, 4);
  return x;
}

// The first n lanes, or all of them if n is larger. Lanes that are not loaded are zero.
template <class Stored>
HD Vec<RealOf<Stored>> load_up_to(const Stored* p, int64_t n) {
  using Real = RealOf<Stored>;
  if (n >= LANES<Real>) return load_as(p);
  if constexpr (std::is_same<Stored, Real>::value) return Vec<Real>::load(p, n);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (std::is_same<Stored, bfloat16>::value)
    return widened(HalfVector(_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p)));
#endif
  Real buffer[LANES<Real>] = {};
  for (int64_t i = 0; i < n; ++i)
    buffer[i] = load_scalar(p + i);
  return Vec<Real>::load(buffer);
}
template <class Stored>
HD void store_up_to(Stored* p, Vec<RealOf<Stored>> x, int64_t n) {
  using Real = RealOf<Stored>;
  if (n >= LANES<Real>) return store_as(p, x);
  if constexpr (std::is_same<Stored, Real>::value) return x.store(p, n);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (std::is_same<Stored, bfloat16>::value)
    return _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), __m256i(narrowed(x)));
#endif
  Real buffer[LANES<Real>];
  x.store(buffer);
  for (int64_t i = 0; i < n; ++i)
    store_scalar(p + i, buffer[i]);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
