// The kernels of activation_regularization: regularization.cu, called by
// csrc/ops/activation_regularization.cpp.
#pragma once
#include <cstdint>

#include "cuda/type.h"

namespace fusedseq::cuda {

struct ActivationRegularization {
  Type type;
  int64_t T, N;         // N = B * H
  const void* dropped;  // (T, N)
  const void* raw;      // (T, N)
  double alpha, beta;   // alpha / (T N) and beta / ((T - 1) N)
  // Forward only.
  void* loss;       // ()  of the type
  double* partial;  // (2, activation_regularization_blocks(...))
  // Backward only.
  const void* dloss;      // ()  of the type
  void *ddropped, *draw;  // (T, N)
};

// Return an error message if a kernel could not be launched, else null.
const char* activation_regularization(const ActivationRegularization& a, void* stream);
const char* activation_regularization_backward(const ActivationRegularization& a, void* stream);

int64_t activation_regularization_blocks(Type type, int64_t T, int64_t N);

}  // namespace fusedseq::cuda
