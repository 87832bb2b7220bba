// Zoneout (Krueger et al., 2017) of one unit: a part of its new state, and the rest of the state
// before the step. What has the weight 0 is left out, since it may be NaN or infinite.
#pragma once
#include "math/host_device.h"

namespace fusedseq {

template <class C>
HD C part_of(C weight, C x) {
  return weight == C(0) ? C(0) : weight * x;
}

// update: the weight of the new state, 1 or 0 in training, otherwise its expectation
template <class C>
HD C mix(C update, C after, C before) {
  return part_of(update, after) + part_of(C(1) - update, before);
}

// Returns the part of the state's gradient d that bypasses the cell, and leaves the other part in
// d.
template <class C>
HD C bypass(C update, C& d) {
  const C past = part_of(C(1) - update, d);
  d = part_of(update, d);
  return past;
}

}  // namespace fusedseq
