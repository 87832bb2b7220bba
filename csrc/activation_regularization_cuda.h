// What csrc/activation_regularization.cu gives csrc/activation_regularization.cpp.
#pragma once
#include <cstdint>

#include "cuda_type.h"

namespace fusedseq::cuda {

struct ActivationRegularization {
  Type type;
  int64_t T, N;           // N = B * H
  const void *dropped;    // (T, N)
  const void *raw;        // (T, N)
  double alpha, beta;     // alpha / (T N) and beta / ((T - 1) N)
  void* loss;             // ()  of the type; forward only
  double* partial;        // (2, activation_regularization_blocks(...)), forward only
  const void* dloss;      // ()  of the type; backward only, as what follows
  void *ddropped, *draw;  // (T, N)
};

// A message where a kernel could not be started, else null.
int64_t activation_regularization_blocks(Type type, int64_t T, int64_t N);
const char* activation_regularization(const ActivationRegularization& a, void* stream);
const char* activation_regularization_backward(const ActivationRegularization& a, void* stream);

}  // namespace fusedseq::cuda
