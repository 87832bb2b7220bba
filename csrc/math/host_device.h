// Scalar functions for code that both the C++ compiler and nvcc compile: the cells, the optimizer's
// arithmetic and Philox in csrc/math/.
//
// csrc/cpu/ is compiled once per instruction set. On the host these functions are therefore always
// inlined: the linker keeps only one out-of-line copy of a function, and that copy might use
// instructions that another instruction set's kernels must not execute.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HD __host__ __device__ __forceinline__
#else
#define HD inline __attribute__((always_inline))
#endif

namespace fusedseq {

HD float sigmoid(float x) {
  return 1.f / (1.f + ::expf(-x));
}
HD double sigmoid(double x) {
  return 1. / (1. + ::exp(-x));
}
HD float tanh_(float x) {
  return ::tanhf(x);
}
HD double tanh_(double x) {
  return ::tanh(x);
}

// Returns a if m > 0, b if m < 0 and the mean of both if m == 0, as torch.minimum's gradient does
// when its two arguments are equal.
HD float select_by_sign(float m, float a, float b) {
  return m > 0 ? a : m < 0 ? b : .5f * (a + b);
}
HD double select_by_sign(double m, double a, double b) {
  return m > 0 ? a : m < 0 ? b : .5 * (a + b);
}

// Returns max(x, 0), and NaN for NaN.
HD float relu(float x) {
  return x < 0 ? 0.f : x;
}
HD double relu(double x) {
  return x < 0 ? 0. : x;
}
// Returns a if m > 0, 0 if m <= 0, and a if m is NaN, as in the gradient of torch.relu. a may be
// infinite.
HD float if_positive(float m, float a) {
  return m <= 0 ? 0.f : a;
}
HD double if_positive(double m, double a) {
  return m <= 0 ? 0. : a;
}

HD float min_(float a, float b) {
  return a < b ? a : b;
}
HD double min_(double a, double b) {
  return a < b ? a : b;
}

// The derivatives of sigmoid and tanh as functions of their output y, because the forward pass
// saves outputs, not inputs.
template <class V>
HD V dsigmoid(V y) {
  return y * (1.f - y);
}
template <class V>
HD V dtanh(V y) {
  return 1.f - y * y;
}

}  // namespace fusedseq
