// Vectors of the width this file is compiled for, on GCC's vector extension: AVX-512, AVX2, SSE2 or NEON from one
// source. Everything lives in the instruction set's own namespace; see host_device.h for why.
#pragma once
#include <cstring>
#include <initializer_list>
#include <type_traits>
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
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) return Vec(Raw(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)));
#endif
    T buffer[LANES<T>] = {};
    for (int64_t i = 0; i < n; ++i) buffer[i] = p[i];
    return load(buffer);
  }
  HD void store(T* p, int64_t n) const {
    if (n >= LANES<T>) return store(p);
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), __m512(v));
#endif
    T buffer[LANES<T>];
    store(buffer);
    for (int64_t i = 0; i < n; ++i) p[i] = buffer[i];
  }
};

// Past the caches, to an aligned address; `stream_fence` before another thread reads.
template <class T> HD void stream(T* p, Vec<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)x.v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)x.v);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)x.v);
#else
  x.store(p);
#endif
}
HD void stream_fence() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}
// A row that lies in the cache, to where it is wanted.
template <class S> HD void stream_row(const S* row, S* wanted, int64_t n) {
  const char* from = reinterpret_cast<const char*>(row);
  char* to = reinterpret_cast<char*>(wanted);
  const int64_t bytes = n * sizeof(S), before = -reinterpret_cast<uintptr_t>(to) % VECTOR_BYTES;
  int64_t i = before < bytes ? before : bytes;
  memcpy(to, from, i);
  for (; i + VECTOR_BYTES <= bytes; i += VECTOR_BYTES)
    stream(reinterpret_cast<float*>(to + i), Vec<float>::load(reinterpret_cast<const float*>(from + i)));
  memcpy(to + i, from + i, bytes - i);
}
// Whether a result is larger than the caches: a line of it, which is only written, need not be read first then.
template <class S> HD bool past_caches(int64_t elements) { return elements * int64_t(sizeof(S)) >= int64_t(8) << 20; }

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
template <class T> HD Vec<T> max_(Vec<T> a, Vec<T> b) { return select<T>(a.v > b.v, a, b); }
template <class T> HD Vec<T> abs_(Vec<T> a) { return max_(a, 0.f - a); }

// f(0), f(1), ... as a vector in memory: GCC 12 builds one that is filled lane by lane anew at every use.
template <class T> struct Lanes {
  alignas(VECTOR_BYTES) typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type at[LANES<T>];
  template <class F> constexpr explicit Lanes(F f) : at{} {
    for (int i = 0; i < LANES<T>; ++i) at[i] = f(i);
  }
  HD operator typename Vec<T>::Mask() const { return *reinterpret_cast<const typename Vec<T>::Mask*>(at); }
};
template <class T> HD typename Vec<T>::Mask lane_numbers() {
  static constexpr Lanes<T> lanes([](int i) { return i; });
  return lanes;
}
template <class T> HD Vec<T> as_numbers(typename Vec<T>::Mask m) { return Vec<T>(__builtin_convertvector(m, typename Vec<T>::Raw)); }

// Over each group of `Group` lanes, a power of two, in every lane of it; folded in halves.
template <int Group, class T, class F> HD Vec<T> fold(Vec<T> a, F f) {
  if constexpr (Group == 1) return a;
  else {
    static constexpr Lanes<T> partner([](int i) { return i ^ (Group / 2); });
    return fold<Group / 2>(f(a, Vec<T>(__builtin_shuffle(a.v, typename Vec<T>::Mask(partner)))), f);
  }
}
template <int Group, class T> HD Vec<T> sums(Vec<T> a) { return fold<Group>(a, [](Vec<T> x, Vec<T> y) { return x + y; }); }
template <int Group, class T> HD Vec<T> largest(Vec<T> a) { return fold<Group>(a, [](Vec<T> x, Vec<T> y) { return max_(x, y); }); }
template <class T> HD T sum(Vec<T> a) { return sums<LANES<T>>(a).v[0]; }
template <class T> HD T largest(Vec<T> a) { return largest<LANES<T>>(a).v[0]; }
template <class T> HD Vec<T> choose(Vec<T> m, Vec<T> a, Vec<T> b) {
  const Vec<T> zero(T(0));
  return select<T>(m.v > zero.v, a, select<T>(m.v < zero.v, b, .5f * (a + b)));
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
// log of positive normal floats, about 1 ulp: x = 2^n (1 + r), 1 + r in [sqrt(1/2), sqrt(2)), and a polynomial in r of
// minimax error 8e-10.
HD Vec<float> log_(Vec<float> x) {
  using V = Vec<float>;
  const V::Mask n = (V::Mask(x.v) - 0x3f3504f3) >> 23;
  const V r = V(V::Raw(V::Mask(x.v) - (n << 23))) - V(1.f), e = V(__builtin_convertvector(n, V::Raw));
  V q = V(6.746627251e-02f);
  for (const float c : {-1.167564824e-01f, 1.188816643e-01f, -1.240558977e-01f, 1.421955187e-01f, -1.666799579e-01f,
                        2.000211868e-01f, -2.500000960e-01f, 3.333331260e-01f})
    q = q * r + V(c);
  const V square = r * r;
  return e * V(0.693145752f) + (r + (square * r * q + (e * V(1.42860677e-6f) - .5f * square)));
}
// In double precision speed matters less than the last bit: libm, lane by lane.
HD Vec<double> log_(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i) x.v[i] = ::log(x.v[i]);
  return x;
}
HD Vec<double> exp_(Vec<double> x) {
  for (int i = 0; i < LANES<double>; ++i) x.v[i] = ::exp(x.v[i]);
  return x;
}
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

// Philox for a vector of counters, each word in the low half of 64 bits. The high halves may hold anything: a product
// reads the low ones only, so its low word need not be cut out.
constexpr int COUNTERS = VECTOR_BYTES / 8;
typedef uint64_t Wide __attribute__((vector_size(VECTOR_BYTES)));

template <int G> struct WideGroup {
  Wide v[G];
  HD WideGroup operator^(const WideGroup& b) const {
    WideGroup r;
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) r.v[g] = v[g] ^ b.v[g];
    return r;
  }
  HD WideGroup operator^(uint32_t k) const {
    WideGroup r;
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) r.v[g] = v[g] ^ k;
    return r;
  }
};

struct MultiplyWide {
  HD static Wide product(Wide a, uint32_t b) {
#if defined(__AVX512F__)
    return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
    return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
    return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
    for (int i = 0; i < COUNTERS; ++i) a[i] = uint64_t(uint32_t(a[i])) * b;
    return a;
#endif
  }
  template <int G> HD void operator()(const WideGroup<G>& a, uint32_t b, WideGroup<G>& hi, WideGroup<G>& lo) const {
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) lo.v[g] = product(a.v[g], b), hi.v[g] = lo.v[g] >> 32;
  }
};

// Which of the 2 * WORDS * G elements from element 4 * counter on are kept, as all-ones or zero words, in order. G vectors
// of counters in step, for one alone waits on its own latency (0.31 ns an element with one, 0.20 with four, AVX-512).
// Lane 2L + e of a vector has counter COUNTERS/2 * e + L: then interleaving neighbours in 128 bits gives the order.
template <int G> HD void keep_words(uint64_t key, uint64_t counter, uint64_t threshold, Word (&keep)[2 * G]) {
  if (threshold > 0xffffffffu) {
    for (int j = 0; j < 2 * G; ++j) keep[j] = Word{};
    return;
  }
  Wide lane, even, odd;
  for (int i = 0; i < COUNTERS; ++i) {
    lane[i] = COUNTERS / 2 * (i % 2) + i / 2;
    even[i] = i % 2 * COUNTERS + i / 2 * 2, odd[i] = even[i] + 1;
  }
  WideGroup<G> c[4] = {};
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) c[0].v[g] = lane + (counter + g * COUNTERS), c[1].v[g] = c[0].v[g] >> 32;
  philox(key, c, MultiplyWide{});
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    const Wide low = (c[0].v[g] & 0xffffffffu) | (c[1].v[g] << 32), high = (c[2].v[g] & 0xffffffffu) | (c[3].v[g] << 32);
    keep[2 * g] = Word(Word(__builtin_shuffle(low, high, even)) >= uint32_t(threshold));
    keep[2 * g + 1] = Word(Word(__builtin_shuffle(low, high, odd)) >= uint32_t(threshold));
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
