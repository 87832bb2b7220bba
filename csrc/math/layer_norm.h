// Layer normalization (Ba et al., 2016) of the products of a recurrent cell, for one value. V is a
// scalar or a vector of hidden units.
//
// norm(v) = (v - mean(v)) rstd(v), over all pre-activations of a row and product together. The sums
// over rows are those of cpu/recurrence/layer_norm_row.h and cuda/recurrence/loop_layer_norm.cuh.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

template <class V>
HD V normalize(V v, V mean, V rstd) {
  return (v - mean) * rstd;
}

// Returns the gradient of v from n = normalize(v) and its gradient dn. The means are those of dn
// and of dn n over the units that are normalized together.
template <class V>
HD V normalize_backward(V n, V dn, V rstd, V mean_dn, V mean_dn_n) {
  return rstd * (dn - mean_dn - n * mean_dn_n);
}

}  // namespace fusedseq
