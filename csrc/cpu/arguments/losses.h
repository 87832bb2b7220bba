// The arguments of linear_cross_entropy, forward and backward.
#pragma once
#include "cpu/arguments/common.h"

namespace fusedseq::cpu {

// The cross-entropy of logits z = (x W^T + b) / temperature, whose rows all have a target. Stored
// is the type in memory of the two large inputs, x and W, and of the gradient of W.
template <class Real, class Stored = Real>
struct LinearCrossEntropy {
  int64_t N, E, V;
  const Stored* x;            // (N, E)
  const Stored* W;            // (V, E)
  const Real* b;              // (V,) or null
  const int64_t* target;      // (N,)  each in [0, V)
  const Real* class_weights;  // (V,), or null if all weights are 1
  double weights_sum;         // the sum of class_weights, V if all are 1
  double label_smoothing, z_loss, temperature;
  bool statistics;        // true: compute loss, lse, log_prob and argmax; false: lse is an input
  Real* loss;             // (N,)
  Real* lse;              // (N,)
  Real* log_prob;         // (N,)  of the target
  int64_t* argmax;        // (N,)
  double dloss_of_all;    // the gradient of every row's loss if dloss is null
  const Real* dloss;      // (N,) or null
  const Real* dlog_prob;  // (N,) or null
  const Real* dlse;       // (N,) or null
  Real* dx;               // (N, E) or null if not needed
  Stored* dW;             // (V, E) or null if not needed
  Real* db;               // (V,) or null if not needed
};

}  // namespace fusedseq::cpu
