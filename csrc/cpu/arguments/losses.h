// The arguments of linear_cross_entropy, forward and backward.
#pragma once
#include "cpu/arguments/common.h"

namespace fusedseq::cpu {

// The cross-entropy of logits z = (x W^T + b) / temperature, whose rows all have a target. S is the
// type in memory of the two large inputs, and of the gradient of W.
template <class T, class S = T>
struct LinearCrossEntropy {
  int64_t N, E, V;
  const S* x;              // (N, E)
  const S* W;              // (V, E)
  const T* b;              // (V,) or null
  const int64_t* target;   // (N,)  each in [0, V)
  const T* class_weights;  // (V,), or null if all weights are 1
  double weights_sum;      // the sum of class_weights, V if all are 1
  double label_smoothing, z_loss, temperature;
  bool statistics;      // true: compute loss, lse, log_prob and argmax; false: lse is an input
  T* loss;              // (N,)
  T* lse;               // (N,)
  T* log_prob;          // (N,)  of the target
  int64_t* argmax;      // (N,)
  double dloss_of_all;  // the gradient of every row's loss if dloss is null
  const T* dloss;       // (N,) or null
  const T* dlog_prob;   // (N,) or null
  const T* dlse;        // (N,) or null
  T* dx;                // (N, E) or null if not needed
  S* dW;                // (V, E) or null if not needed
  T* db;                // (V,) or null if not needed
};

}  // namespace fusedseq::cpu
