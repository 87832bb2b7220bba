// What the C++ compiler and nvcc both compile: cells/ and philox.h. The host copy is always inlined, because
// csrc/cpu/ is compiled once per instruction set: an out-of-line copy could be linked into another one's code.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HD __host__ __device__ __forceinline__
#else
#define HD inline __attribute__((always_inline))
#endif

namespace fusedseq {

HD float sigmoid(float x) { return 1.f / (1.f + ::expf(-x)); }
HD double sigmoid(double x) { return 1. / (1. + ::exp(-x)); }
HD float tanh_(float x) { return ::tanhf(x); }
HD double tanh_(double x) { return ::tanh(x); }

// a where m > 0, b where m < 0, their mean at m = 0: torch.minimum's gradient at a tie.
HD float choose(float m, float a, float b) { return m > 0 ? a : m < 0 ? b : .5f * (a + b); }
HD double choose(double m, double a, double b) { return m > 0 ? a : m < 0 ? b : .5 * (a + b); }
HD float min_(float a, float b) { return a < b ? a : b; }
HD double min_(double a, double b) { return a < b ? a : b; }

// Derivatives in terms of the outputs, which are what the forward pass saves.
template <class V> HD V dsigmoid(V y) { return y * (1.f - y); }
template <class V> HD V dtanh(V y) { return 1.f - y * y; }

}  // namespace fusedseq
