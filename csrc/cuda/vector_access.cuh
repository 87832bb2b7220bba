// Loads and stores of N neighbouring elements in one access; the dtype in which a kernel computes;
// the calling of a kernel for a dtype that is known at run time.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cuda/type.h"

namespace fusedseq::cuda {

// The type in which a kernel computes on tensors of type S.
template <class S>
struct Computing {
  using type = S;
};
template <>
struct Computing<__nv_bfloat16> {
  using type = float;
};
template <>
struct Computing<__half> {
  using type = float;
};

// Returns f(S{}) for the C++ type S of a dtype.
template <class F>
auto by_type(Type type, F f) {
  switch (type) {
    case Type::f32:
      return f(float{});
    case Type::f64:
      return f(double{});
    case Type::bf16:
      return f(__nv_bfloat16{});
    default:
      return f(__half{});
  }
}

// The dtype of a C++ type.
template <class S>
constexpr Type type_of() {
  if constexpr (std::is_same_v<S, float>)
    return Type::f32;
  else if constexpr (std::is_same_v<S, double>)
    return Type::f64;
  else if constexpr (std::is_same_v<S, __half>)
    return Type::f16;
  else
    return Type::bf16;
}

template <class S, int N>
struct alignas(sizeof(S) * N) Pack {
  S v[N];
};
template <int N, class S>
__device__ bool aligned(const S* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Pack<S, N>) == 0;
}

// Loads the first n of N elements, and zeros for the others. wide: p is aligned for one access
template <class S, class C, int N>
__device__ void load(const S* p, int n, bool wide, C (&out)[N]) {
  if (wide && n >= N) {
    const Pack<S, N> pack = *reinterpret_cast<const Pack<S, N>*>(p);
    for (int i = 0; i < N; ++i)
      out[i] = C(pack.v[i]);
  } else {
    for (int i = 0; i < N; ++i)
      out[i] = i < n ? C(p[i]) : C(0);
  }
}

// Stores the first n of N elements.
template <class S, class C, int N>
__device__ void store(S* p, int n, bool wide, const C (&in)[N]) {
  if (wide && n >= N) {
    Pack<S, N> pack;
    for (int i = 0; i < N; ++i)
      pack.v[i] = S(in[i]);
    // Stored by an intrinsic, because nvcc 13 splits the assignment of a Pack into a store for each
    // element.
    using Word = std::conditional_t<sizeof(pack) < 8,
                                    std::conditional_t<sizeof(pack) == 2, unsigned short, unsigned>,
                                    std::conditional_t<sizeof(pack) == 8, uint2, uint4>>;
    Word words[sizeof(pack) / sizeof(Word)];
    memcpy(words, &pack, sizeof(pack));
    for (size_t i = 0; i < sizeof(pack) / sizeof(Word); ++i)
      __stwb(reinterpret_cast<Word*>(p) + i, words[i]);
  } else {
    for (int i = 0; i < N && i < n; ++i)
      p[i] = S(in[i]);
  }
}

}  // namespace fusedseq::cuda
