// The arguments of the operators that compute each element, or each row, by itself.
#pragma once
#include "cpu/arguments/common.h"

namespace fusedseq::cpu {

struct Dropout {
  Type type;
  int64_t T, B, D;
  const void* x;  // (T, B, D)
  void* y;        // (T, B, D)
  Mask mask;      // (B, D), the same at every time step
};

// y[n] = W[ids[n]], scaled or zero if the whole embedding row is dropped.
struct Embedding {
  Type type;
  int64_t N, V, E;
  const int64_t* ids;   // (N,)  rows of W; if null, ids[n] = n
  const int64_t* keys;  // (V,)  the element of the mask for each row of W; if null, keys[v] = v
  const void* W;        // (V, E)
  void* y;              // (N, E)
  bool masked;
  Mask mask;  // (1, number of keys)
};

// alpha * sum(dropped^2) + beta * sum((raw[t + 1] - raw[t])^2).
struct ActivationRegularization {
  Type type;
  int64_t T;
  int64_t N;            // B * H, the elements of a time step
  const void* dropped;  // (T, N)  the output after dropout
  const void* raw;      // (T, N)  the output before dropout
  double alpha;         // already divided by T * N
  double beta;          // already divided by (T - 1) * N; 0 if T == 1
  void* ddropped;       // (T, N)  backward only
  void* draw;           // (T, N)  backward only
};

// y = LayerNorm(s), s = residual + dropout(x), row by row.
struct ResidualLayerNorm {
  Type type;
  int64_t M, D;
  const void* x;         // (M, D)
  const void* residual;  // (M, D) or null
  const void* weight;    // (D,) or null
  const void* bias;      // (D,) or null
  double eps;
  Mask mask;   // (M, D)  threshold 0: none
  void* y;     // (M, D)
  void* s;     // (M, D) or null if the caller does not use it
  void* mean;  // (M,)  in the type of computing
  void* rstd;  // (M,)  in the type of computing
};

struct ResidualLayerNormBackward {
  // The inputs, mean, rstd and s. If s is null it is recomputed from x and residual.
  ResidualLayerNorm forward;
  const void* dy;   // (M, D)
  const void* ds;   // (M, D) or null
  void* dx;         // (M, D) or null if not needed
  void* dresidual;  // (M, D) or null if not needed
  void* dweight;    // (D,)  in the type of computing, or null if not needed
  void* dbias;      // (D,)  in the type of computing, or null if not needed
};

enum class Activation { relu, gelu, gelu_tanh, tanh };

// y = dropout(activation(x + b)) and its gradients.
struct BiasActivationDropout {
  Type type;
  Activation activation;
  int64_t M, D;
  const void* x;  // (M, D)
  const void* b;  // (D,) or null
  void* y;        // (M, D)
  Mask mask;      // (M, D)  threshold 0: none
  bool backward;
  const void* dy;  // (M, D)  backward only
  void* dx;        // (M, D)  backward only, null if not needed
  void* db;        // (D,)  backward only, in the type of computing, null if not needed
};

// y = x * factor.
struct Scale {
  Type type;  // of y
  Type of_x;  // the same, or the type of computing
  int64_t n;
  const void* x;  // (n,)
  double factor;
  void* y;  // (n,)
};

}  // namespace fusedseq::cpu
