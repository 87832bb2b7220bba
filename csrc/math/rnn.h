// The simple recurrent unit (Elman, 1990) of one hidden unit at one time step: h' = tanh(z) or
// h' = max(z, 0). V is a scalar or a vector of hidden units.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

// Returns h' from the pre-activation z.
template <bool rectified, class V>
HD V rnn_cell(V z) {
  if constexpr (rectified) return relu(z);
  return tanh_(z);
}

// Returns the gradient of the pre-activation z from h' and its gradient dh.
template <bool rectified, class V>
HD V rnn_cell_backward(V h, V dh) {
  if constexpr (rectified) return if_positive(h, dh);
  return dh * dtanh(h);
}

}  // namespace fusedseq
