// One step of SGD on clipped gradients and of the average beside it, as torch.optim.ASGD without decay. V: a scalar, or a
// vector of them.
#pragma once
#include "../host_device.h"

namespace fusedseq {

// What clip_grad_norm_ multiplies the gradients by: at most 1; NaN stays.
template <class T> HD T clip_factor(T norm, T max_norm) {
  const T factor = max_norm / (norm + T(1e-6));
  return factor > T(1) ? T(1) : factor;
}

template <class V> HD V nt_asgd_parameter(V p, V g, V clip, V lr, V weight_decay) {
  return p - lr * (clip * g + weight_decay * p);
}

// The mean of the parameters so far, p the k-th of them and mu = 1 / k.
template <class V> HD V nt_asgd_average(V average, V p, V mu) { return average + mu * (p - average); }

}  // namespace fusedseq
