// One round of the Mogrifier (Melis et al., 2020): the operand scaled by twice a gate, s = sigmoid(z).
#pragma once
#include "../host_device.h"

namespace fusedseq {

template <class V> HD V mogrify(V s, V operand) { return 2.f * s * operand; }

// From the gradient of the result to dz; d becomes the gradient of the operand.
template <class V> HD V mogrify_backward(V s, V operand, V& d) {
  const V dz = d * 2.f * operand * dsigmoid(s);
  d = d * 2.f * s;
  return dz;
}

}  // namespace fusedseq
