// FUSEDSEQ_SHUFFLE(a, mask) and FUSEDSEQ_SHUFFLE(a, b, mask): a vector of the lanes of a, or of a
// and b, that an integer vector selects. Lane i is a[mask[i]], or b[mask[i] - lanes] where mask[i]
// is at least the number of lanes. This is GCC's __builtin_shuffle, which clang lacks: its
// __builtin_shufflevector takes the numbers of the lanes as arguments, not as a vector.
#pragma once
#include "math/host_device.h"

#if defined(__clang__)
#define FUSEDSEQ_SHUFFLE(...) ::fusedseq::FUSEDSEQ_ISA::shuffle(__VA_ARGS__)

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Lane by lane. Where the mask is a constant, which it is in every call, clang makes the loop one
// or two instructions.
template <class Vector, class Mask>
HD Vector shuffle(Vector a, Vector b, Mask mask) {
  constexpr int lanes = sizeof(Vector) / sizeof(a[0]);
  Vector result;
#pragma clang loop unroll(full)
  for (int i = 0; i < lanes; ++i)
    result[i] = mask[i] < lanes ? a[mask[i]] : b[mask[i] - lanes];
  return result;
}
template <class Vector, class Mask>
HD Vector shuffle(Vector a, Mask mask) {
  return shuffle(a, a, mask);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
#else
#define FUSEDSEQ_SHUFFLE(...) __builtin_shuffle(__VA_ARGS__)
#endif
