// The arithmetic of NT-ASGD: one SGD step on clipped gradients, and the running average of the
// parameters, as in torch.optim.ASGD without its decay term lambd. V is a scalar or a vector.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

// Returns the factor by which torch.nn.utils.clip_grad_norm_ multiplies the gradients: at most 1,
// and NaN if the norm is NaN.
template <class T>
HD T clip_factor(T norm, T max_norm) {
  const T factor = max_norm / (norm + T(1e-6));
  return factor > T(1) ? T(1) : factor;
}

// Returns the parameter p after one step with gradient g.
template <class V>
HD V nt_asgd_parameter(V p, V g, V clip, V lr, V weight_decay) {
  return p - lr * (clip * g + weight_decay * p);
}

// Returns the mean of the first k parameters, given the mean of the first k - 1, the k-th parameter
// p and mu = 1 / k.
template <class V>
HD V nt_asgd_average(V average, V p, V mu) {
  return average + mu * (p - average);
}

}  // namespace fusedseq
