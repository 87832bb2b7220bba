// Types in memory and types to compute in, and N elements of memory in one load or store.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "cuda_type.h"

namespace fusedseq::cuda {

template <class S> struct Computing { using type = S; };
template <> struct Computing<__nv_bfloat16> { using type = float; };
template <> struct Computing<__half> { using type = float; };

// f(S{}) for the type S of the tensors.
template <class F> auto by_type(Type type, F f) {
  switch (type) {
    case Type::f32: return f(float{});
    case Type::f64: return f(double{});
    case Type::bf16: return f(__nv_bfloat16{});
    default: return f(__half{});
  }
}

template <class S, int N> struct alignas(sizeof(S) * N) Pack { S v[N]; };
template <int N, class S> __device__ bool aligned(const S* p) { return reinterpret_cast<uintptr_t>(p) % sizeof(Pack<S, N>) == 0; }

// The first n of N elements, zeros for the others; `wide` where p is aligned.
template <class S, class C, int N> __device__ void load(const S* p, int n, bool wide, C (&out)[N]) {
  if (wide && n >= N) {
    const Pack<S, N> pack = *reinterpret_cast<const Pack<S, N>*>(p);
    for (int i = 0; i < N; ++i) out[i] = C(pack.v[i]);
  } else {
    for (int i = 0; i < N; ++i) out[i] = i < n ? C(p[i]) : C(0);
  }
}
template <class S, class C, int N> __device__ void store(S* p, int n, bool wide, const C (&in)[N]) {
  if (wide && n >= N) {
    Pack<S, N> pack;
    for (int i = 0; i < N; ++i) pack.v[i] = S(in[i]);
    // By an intrinsic: what is assigned nvcc 13 takes apart, and stores element by element.
    using Word = std::conditional_t<sizeof(pack) < 8, std::conditional_t<sizeof(pack) == 2, unsigned short, unsigned>,
                                    std::conditional_t<sizeof(pack) == 8, uint2, uint4>>;
    Word words[sizeof(pack) / sizeof(Word)];
    memcpy(words, &pack, sizeof(pack));
    for (size_t i = 0; i < sizeof(pack) / sizeof(Word); ++i) __stwb(reinterpret_cast<Word*>(p) + i, words[i]);
  } else {
    for (int i = 0; i < N && i < n; ++i) p[i] = S(in[i]);
  }
}

// The GPU in use, and those that this file was compiled for.
inline const char* no_kernel_for_gpu() {
  static thread_local char text[256];
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  int n = std::snprintf(text, sizeof text, "no kernel for a GPU of compute capability %d.%d, this build has those for", major, minor);
  for (const int arch : {__CUDA_ARCH_LIST__})
    if (n > 0 && n < int(sizeof text)) n += std::snprintf(text + n, sizeof text - n, " %d.%d", arch / 100, arch / 10 % 10);
  return text;
}

// What was wrong with the launches before, or null.
inline const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice) return no_kernel_for_gpu();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace fusedseq::cuda
