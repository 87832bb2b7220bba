// The arguments of the linear map, and of products with weights in 8 bits.
#pragma once
#include "cpu/arguments/common.h"

namespace fusedseq::cpu {

// y = x W^T + b and its gradients.
template <class Stored>
struct Linear {
  int64_t M, K, N;
  const Stored* x;   // (M, K)
  const Stored* W;   // (N, K)
  const Stored* b;   // (N,) or null
  Stored* y;         // (M, N)
  const Stored* dy;  // (M, N)  backward only
  Stored* dx;        // (M, K)  backward only, null if not needed
  Stored* dW;        // (N, K)  backward only, null if not needed
  Stored* db;        // (N,)  backward only, null if not needed
};

// C (M, N) (+)= A (M, K) W^T + bias, where row n of the weight is scale[n] times row n of W, whose
// numbers are whole and have 8 bits.
struct Int8Product {
  int64_t M, K, N;
  const float* A;  // (M, lda)
  int64_t lda;
  const int8_t* W;     // (N, K)
  const float* scale;  // (N,)
  const float* bias;   // (N,) or null
  float* C;            // (M, ldc)
  int64_t ldc;
  bool whole_vectors;  // whether to write zeros past column N of C, unless it accumulates
  bool accumulate;
};
// A function that computes such a product without converting W first.
struct Int8Rows {
  void (*multiply)(const Int8Product&);
  int64_t most;  // the most rows of A for which it is the fastest way
};

// y = x W^T + b, where row n of the weight is scale[n] times row n of W, as in Int8Product.
struct LinearInt8 {
  int64_t M, K, N;
  const float* x;      // (M, K)
  const int8_t* W;     // (N, K)
  const float* scale;  // (N,)
  const float* b;      // (N,) or null
  float* y;            // (M, N)
  Int8Rows rows;
};

}  // namespace fusedseq::cpu
