// One round of the Mogrifier (Melis et al., 2020): the operand (x or h) is multiplied by 2 s, where
// s = sigmoid(z) is the round's gate. V is a scalar or a vector.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

template <class V>
HD V mogrify(V s, V operand) {
  return 2.f * s * operand;
}

// Returns the gradient of the pre-activation z. d is the gradient of the result on entry and the
// gradient of the operand on return.
template <class V>
HD V mogrify_backward(V s, V operand, V& d) {
  const V dz = d * 2.f * operand * dsigmoid(s);
  d = d * 2.f * s;
  return dz;
}

}  // namespace fusedseq
