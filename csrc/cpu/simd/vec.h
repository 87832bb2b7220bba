// Vec<T>: a vector of floats, doubles or pairs, as wide as the instruction set that this file is
// compiled for allows. It is built on GCC's vector extension, which clang has too, so that AVX-512,
// AVX2, SSE2 and NEON code comes from one source.
//
// Everything is in the namespace of its instruction set and always inlined (HD); see
// math/host_device.h for the reason.
#pragma once
#include <cstring>
#include <type_traits>
#ifdef __SSE2__
#include <immintrin.h>
#endif
#include "cpu/simd/shuffle.h"
#include "math/host_device.h"

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace fusedseq {
namespace FUSEDSEQ_ISA {

template <class T>
constexpr int LANES = VECTOR_BYTES / sizeof(T);

// Returns n rounded up to whole vectors.
template <class T>
HD int64_t round_up(int64_t n) {
  return (n + LANES<T> - 1) / LANES<T> * LANES<T>;
}

// The compiler's vector types: Raw for values, Mask for the result of comparisons (all ones or
// zero in each lane), Unaligned for loads and stores at any address.
template <class T>
struct VectorTypes;
template <>
struct VectorTypes<float> {
  typedef float Raw __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t Mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef float Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
};
template <>
struct VectorTypes<double> {
  typedef double Raw __attribute__((vector_size(VECTOR_BYTES)));
  typedef int64_t Mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef double Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
};

// A pair of bfloat16 numbers, the first one in the low half: an element of the products that are
// computed by dot products of pairs, see bf16_pair.h. Its attributes allow pairs to be read from
// the memory of a bfloat16 tensor, at any even address.
struct __attribute__((packed, aligned(2), may_alias)) bf16_pair {
  uint32_t bits;
};
template <>
struct VectorTypes<bf16_pair> {
  typedef uint32_t Raw __attribute__((vector_size(VECTOR_BYTES)));
  typedef int32_t Mask __attribute__((vector_size(VECTOR_BYTES)));
  typedef uint32_t Unaligned __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
};

// What a vector holds in the lane of an element.
template <class T>
HD T lane_value(T x) {
  return x;
}
HD uint32_t lane_value(bf16_pair x) {
  return x.bits;
}

template <class T>
struct Vec {
  using Raw = typename VectorTypes<T>::Raw;
  using Mask = typename VectorTypes<T>::Mask;
  using Unaligned = typename VectorTypes<T>::Unaligned;
  Raw v;

  HD Vec() {}
  HD Vec(Raw raw) : v(raw) {}
  HD Vec(T s) : v(lane_value(s) - Raw{}) {}

  static HD Vec load(const T* p) { return Vec(Raw(*reinterpret_cast<const Unaligned*>(p))); }
  HD void store(T* p) const { *reinterpret_cast<Unaligned*>(p) = v; }

  // Loads the first n lanes and sets the others to zero; n may exceed the number of lanes.
  static HD Vec load(const T* p, int64_t n) {
    if (n >= LANES<T>) return load(p);
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4)
      return Vec(Raw(_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p)));
#endif
    T buffer[LANES<T>] = {};
    for (int64_t i = 0; i < n; ++i)
      buffer[i] = p[i];
    return load(buffer);
  }
  // Stores the first n lanes; n may exceed the number of lanes.
  HD void store(T* p, int64_t n) const {
    if (n >= LANES<T>) return store(p);
#ifdef __AVX512F__
    if constexpr (sizeof(T) == 4)
      return _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), __m512(v));
#endif
    T buffer[LANES<T>];
    store(buffer);
    for (int64_t i = 0; i < n; ++i)
      p[i] = buffer[i];
  }
};

#define FUSEDSEQ_BINARY(op)                   \
  template <class T>                          \
  HD Vec<T> operator op(Vec<T> a, Vec<T> b) { \
    return Vec<T>(a.v op b.v);                \
  }                                           \
  template <class T>                          \
  HD Vec<T> operator op(float a, Vec<T> b) {  \
    return Vec<T>(T(a)) op b;                 \
  }                                           \
  template <class T>                          \
  HD Vec<T> operator op(Vec<T> a, float b) {  \
    return a op Vec<T>(T(b));                 \
  }
FUSEDSEQ_BINARY(+)
FUSEDSEQ_BINARY(-)
FUSEDSEQ_BINARY(*)
FUSEDSEQ_BINARY(/)
#undef FUSEDSEQ_BINARY

// Returns a in the lanes where m is set and b in the others.
template <class T>
HD Vec<T> select(typename Vec<T>::Mask m, Vec<T> a, Vec<T> b) {
  return Vec<T>(m ? a.v : b.v);
}
// a < b ? a : b, and a > b ? a : b: b where either is NaN. The instructions of x86 compute just
// that, but GCC 12 makes a comparison and a selection of it if a or b is a constant.
template <class T>
HD Vec<T> min_(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return Vec<T>(
        typename Vec<T>::Raw(_mm512_maskz_min_ps(__mmask16(-1), __m512(a.v), __m512(b.v))));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return Vec<T>(typename Vec<T>::Raw(_mm256_min_ps(__m256(a.v), __m256(b.v))));
#endif
  return select<T>(a.v < b.v, a, b);
}
template <class T>
HD Vec<T> max_(Vec<T> a, Vec<T> b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    return Vec<T>(
        typename Vec<T>::Raw(_mm512_maskz_max_ps(__mmask16(-1), __m512(a.v), __m512(b.v))));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    return Vec<T>(typename Vec<T>::Raw(_mm256_max_ps(__m256(a.v), __m256(b.v))));
#endif
  return select<T>(a.v > b.v, a, b);
}
template <class T>
HD Vec<T> abs_(Vec<T> a) {
  return max_(a, 0.f - a);
}
// The scalar functions of math/host_device.h, lane by lane.
template <class T>
HD Vec<T> relu(Vec<T> x) {
  return max_(Vec<T>(T(0)), x);
}
template <class T>
HD Vec<T> if_positive(Vec<T> m, Vec<T> a) {
  const Vec<T> zero(T(0));
  return select<T>(m.v <= zero.v, zero, a);
}
template <class T>
HD Vec<T> select_by_sign(Vec<T> m, Vec<T> a, Vec<T> b) {
  const Vec<T> zero(T(0));
  return select<T>(m.v > zero.v, a, select<T>(m.v < zero.v, b, .5f * (a + b)));
}

// A vector of integers with lane i = f(i), as a constant in memory. (GCC 12 would fill a vector
// that is built lane by lane again at every use.)
template <class T>
struct LaneConstants {
  alignas(VECTOR_BYTES)
      typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type at[LANES<T>];
  template <class Function>
  constexpr explicit LaneConstants(Function f) : at{} {
    for (int i = 0; i < LANES<T>; ++i)
      at[i] = f(i);
  }
  HD operator typename Vec<T>::Mask() const {
    return *reinterpret_cast<const typename Vec<T>::Mask*>(at);
  }
};

// Returns 0, 1, 2, ... in the lanes.
template <class T>
HD typename Vec<T>::Mask lane_numbers() {
  static constexpr LaneConstants<T> lanes([](int i) { return i; });
  return lanes;
}
// Converts integer lanes to floating-point numbers.
template <class T>
HD Vec<T> as_numbers(typename Vec<T>::Mask m) {
  return Vec<T>(__builtin_convertvector(m, typename Vec<T>::Raw));
}

// Reduces each group of GROUP neighbouring lanes, a power of two, with the function f. Every lane
// of a group gets the group's result. Each stage combines a lane with its partner half a group
// away.
template <int GROUP, class T, class Function>
HD Vec<T> fold(Vec<T> a, Function f) {
  if constexpr (GROUP == 1)
    return a;
  else {
    static constexpr LaneConstants<T> partner([](int i) { return i ^ (GROUP / 2); });
    return fold<GROUP / 2>(f(a, Vec<T>(FUSEDSEQ_SHUFFLE(a.v, typename Vec<T>::Mask(partner)))), f);
  }
}
template <int GROUP, class T>
HD Vec<T> group_sums(Vec<T> a) {
  return fold<GROUP>(a, [](Vec<T> x, Vec<T> y) { return x + y; });
}
template <int GROUP, class T>
HD Vec<T> group_max(Vec<T> a) {
  return fold<GROUP>(a, [](Vec<T> x, Vec<T> y) { return max_(x, y); });
}

// The sum and the maximum of all lanes.
template <class T>
HD T sum(Vec<T> a) {
  return group_sums<LANES<T>>(a).v[0];
}
template <class T>
HD T max_lane(Vec<T> a) {
  return group_max<LANES<T>>(a).v[0];
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
