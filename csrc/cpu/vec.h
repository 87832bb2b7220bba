// Vectors of the width this file is compiled for, on GCC's vector extension: AVX-512, AVX2, SSE2 or NEON from one
// source. Everything lives in the instruction set's own namespace; see host_device.h for why.
#pragma once
#include <cstring>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#include "../host_device.h"
#include "../philox.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T> constexpr int LANES = VECTOR_BYTES / sizeof(T);

template <class T> struct Types;
template <> struct Types<float> {
  typedef float Raw __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t Mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
};
template <> struct Types<double> {
  typedef double Raw __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t Mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef double Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
};

template <class T> struct Vec {
  using Raw = typename Types<T>::Raw;
  using Mask = typename Types<T>::Mask;
  using Unaligned = typename Types<T>::Unaligned;
  Raw v;

  HD Vec() {}
  HD Vec(Raw raw) : v(raw) {}
  HD Vec(T s) : v(s - Raw{}) {}
  static HD Vec load(const T* p) { return Vec(Raw(*reinterpret_cast<const Unaligned*>(p))); }
  HD void store(T* p) const { *reinterpret_cast<Unaligned*>(p) = v; }
  // The first n lanes, the others zero.
  static HD Vec load(const T* p, int64_t n) {
    if (n >= LANES<T>) return load(p);
    T buffer[LANES<T>] = {};
    for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
    return load(buffer);
  }
  HD void store(T* p, int64_t n) const {
    if (n >= LANES<T>) return store(p);
    T buffer[LANES<T>];
    store(buffer);
    for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
  }
};

#define FUSEDSEQ_BINARY(op)                                                                        \
  template <class T> HD Vec<T> operator op(Vec<T> a, Vec<T> b) { return Vec<T>(a.v op b.v); }      \
  template <class T> HD Vec<T> operator op(float a, Vec<T> b) { return Vec<T>(T(a)) op b; }        \
  template <class T> HD Vec<T> operator op(Vec<T> a, float b) { return a op Vec<T>(T(b)); }
FUSEDSEQ_BINARY(+)
FUSEDSEQ_BINARY(-)
FUSEDSEQ_BINARY(*)
FUSEDSEQ_BINARY(/)
#undef FUSEDSEQ_BINARY

template <class T> HD Vec<T> select(typename Vec<T>::Mask m, Vec<T> a, Vec<T> b) { return Vec<T>(m ? a.v : b.v); }
template <class T> HD Vec<T> min_(Vec<T> a, Vec<T> b) { return select<T>(a.v < b.v, a, b); }
template <class T> HD Vec<T> choose(Vec<T> m, Vec<T> a, Vec<T> b) {
  const Vec<T> zero(T(0));
  return select<T>(m.v > zero.v, a, select<T>(m.v < zero.v, b, .5f * (a + b)));
}
template <class T> HD T sum(Vec<T> a) {
  T s = 0;
  for (int i = 0; i < LANES<T>; ++i) s += a.v[i];
  return s;
}

// exp on floats, about 1 ulp: x = n ln 2 + r, and a polynomial in r of minimax error 3e-9. NaN stays NaN.
HD Vec<float> exp_(Vec<float> x) {
  using V = Vec<float>;
  x = select<float>(x.v < V(-87.f).v, V(-87.f), select<float>(x.v > V(88.f).v, V(88.f), x));
  const V magic(12582912.f);  // 1.5 * 2^23: adding it leaves the rounded integer in the low bits
  const V shifted = x * V(1.44269504f) + magic;
  const V n = shifted - magic;
  const V r = x - n * V(0.693145752f) - n * V(1.42860677e-6f);
  V q = V(1.395048810e-03f);
  q = q * r + V(8.368887678e-03f);
  q = q * r + V(4.166620585e-02f);
  q = q * r + V(1.666651885e-01f);
  q = q * r + V(5.000000095e-01f);
  q = q * r * r + r + V(1.f);
  const V::Mask exponent = (V::Mask(shifted.v) + 127) << 23;
  return q * V(V::Raw(exponent));
}
HD Vec<float> sigmoid(Vec<float> x) { return 1.f / (1.f + exp_(0.f - x)); }
HD Vec<float> tanh_(Vec<float> x) {
  using V = Vec<float>;
  const V::Mask sign = V::Mask(x.v) & V::Mask(V(-0.f).v);
  const V a = V(V::Raw(V::Mask(x.v) ^ sign)), u = x * x;
  V small = V(-5.717044510e-03f);  // tanh(x)/x - 1 over x^2, minimax 4e-9 below .625
  small = small * u + V(2.065058678e-02f);
  small = small * u + V(-5.374349792e-02f);
  small = small * u + V(1.333149128e-01f);
  small = small * u + V(-3.333328393e-01f);
  small = small * u * a + a;
  const V large = 1.f - 2.f / (exp_(a + a) + 1.f);
  const V y = select<float>(a.v < V(.625f).v, small, large);
  return V(V::Raw(V::Mask(y.v) | sign));
}
// In double precision speed matters less than the last bit: libm, lane by lane.
HD Vec<double> sigmoid(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i) x.v[i] = fusedseq::sigmoid(double(x.v[i]));
  return x;
}
HD Vec<double> tanh_(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i) x.v[i] = ::tanh(x.v[i]);
  return x;
}

// bfloat16 in memory is the upper half of a float; rounding is to nearest even.
struct bfloat16 { uint16_t bits; };
constexpr int WORDS = VECTOR_BYTES / 4;
typedef uint16_t Half __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint32_t Word __attribute__((vector_size(VECTOR_BYTES)));

template <class S> struct Compute { using type = S; };
template <> struct Compute<bfloat16> { using type = float; };

template <class S> HD Vec<S> load_as(const S* p) { return Vec<S>::load(p); }
template <class S> HD void store_as(S* p, Vec<S> x) { x.store(p); }
HD Vec<float> load_as(const bfloat16* p) {
  Half h;
  memcpy(&h, p, sizeof h);
  return Vec<float>(Vec<float>::Raw(__builtin_convertvector(h, Word) << 16));
}
HD void store_as(bfloat16* p, Vec<float> x) {
  const Word u = Word(x.v);
  Word r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  r = x.v == x.v ? r : (u >> 16) | 0x40;  // a NaN must not round to infinity
  const Half h = __builtin_convertvector(r, Half);
  memcpy(p, &h, sizeof h);
}

// Philox for WORDS counters at once.
struct MultiplyWords {
  HD void operator()(Word a, uint32_t b, Word& hi, Word& lo) const {
#if defined(__AVX512F__)
    const __m512i x = (__m512i)a, m = _mm512_set1_epi32(b);
    const __m512i even = _mm512_mul_epu32(x, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), m);
    lo = (Word)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    hi = (Word)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
    const __m256i x = (__m256i)a, m = _mm256_set1_epi32(b);
    const __m256i even = _mm256_mul_epu32(x, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), m);
    lo = (Word)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    hi = (Word)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
    for (int i = 0; i < WORDS; ++i) {
      const uint64_t product = uint64_t(a[i]) * b;
      hi[i] = uint32_t(product >> 32), lo[i] = uint32_t(product);
    }
#endif
  }
};

// Which of the 4 * WORDS elements from element 4 * counter on are kept, as all-ones or zero words, in order.
// Lane 4L + j works on counter WORDS/4 * j + L, so that four interleaves within 128 bits give the elements in order.
HD void keep_words(uint64_t key, uint64_t counter, uint64_t threshold, Word (&keep)[4]) {
  Word lane;
  for (int i = 0; i < WORDS; ++i) lane[i] = WORDS / 4 * (i % 4) + i / 4;
  const Word low = lane + uint32_t(counter);
  const Word carry = Word(low < lane);  // all ones, that is -1, where the low word wrapped
  Word c[4] = {low, uint32_t(counter >> 32) - carry, Word{}, Word{}};
  philox(key, c, MultiplyWords{});
#if defined(__AVX512F__)
  const __m512i a = _mm512_unpacklo_epi32((__m512i)c[0], (__m512i)c[1]), b = _mm512_unpackhi_epi32((__m512i)c[0], (__m512i)c[1]);
  const __m512i d = _mm512_unpacklo_epi32((__m512i)c[2], (__m512i)c[3]), e = _mm512_unpackhi_epi32((__m512i)c[2], (__m512i)c[3]);
  const Word w[4] = {(Word)_mm512_unpacklo_epi64(a, d), (Word)_mm512_unpackhi_epi64(a, d),
                     (Word)_mm512_unpacklo_epi64(b, e), (Word)_mm512_unpackhi_epi64(b, e)};
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi32((__m256i)c[0], (__m256i)c[1]), b = _mm256_unpackhi_epi32((__m256i)c[0], (__m256i)c[1]);
  const __m256i d = _mm256_unpacklo_epi32((__m256i)c[2], (__m256i)c[3]), e = _mm256_unpackhi_epi32((__m256i)c[2], (__m256i)c[3]);
  const Word w[4] = {(Word)_mm256_unpacklo_epi64(a, d), (Word)_mm256_unpackhi_epi64(a, d),
                     (Word)_mm256_unpacklo_epi64(b, e), (Word)_mm256_unpackhi_epi64(b, e)};
#else
  Word w[4] = {};
  for (int j = 0; j < 4; ++j)
    for (int i = 0; i < WORDS; ++i) w[j][i] = c[i % 4][i / 4 * 4 + j];
#endif
  if (threshold > 0xffffffffu) {
    for (int j = 0; j < 4; ++j) keep[j] = Word{};
    return;
  }
  for (int j = 0; j < 4; ++j) keep[j] = Word(w[j] >= uint32_t(threshold));
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
