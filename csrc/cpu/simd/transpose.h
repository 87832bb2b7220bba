// Transposing a square of LANES x LANES elements in registers, and summing the lanes of LANES
// vectors at once by the same shuffles.
#pragma once
#include "cpu/simd/vec.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The shuffles that interleave the first (low) or the second (high) halves of two vectors.
template <class T>
struct Interleave {
  static constexpr LaneConstants<T> low{[](int i) { return i / 2 + i % 2 * LANES<T>; }};
  static constexpr LaneConstants<T> high{
      [](int i) { return i / 2 + i % 2 * LANES<T> + LANES<T> / 2; }};
};

// Turns the rows a[i] of a square into its columns. There are log2(LANES) stages; in each, rows 2i
// and 2i + 1 of the result are the interleaved first and second halves of rows i and i + LANES/2.
template <class T>
HD void transpose(Vec<T> (&a)[LANES<T>]) {
  constexpr int lanes = LANES<T>;
  const typename Vec<T>::Mask low = Interleave<T>::low, high = Interleave<T>::high;
  for (int stage = 1; stage < lanes; stage *= 2) {
    Vec<T> b[lanes];
#pragma GCC unroll 8
    for (int i = 0; i < lanes / 2; ++i) {
      b[2 * i].v = FUSEDSEQ_SHUFFLE(a[i].v, a[i + lanes / 2].v, low);
      b[2 * i + 1].v = FUSEDSEQ_SHUFFLE(a[i].v, a[i + lanes / 2].v, high);
    }
    for (int i = 0; i < lanes; ++i)
      a[i] = b[i];
  }
}

// Returns the vector at place i after the stages of `transpose` that lead from LANES vectors to
// COUNT, where each stage adds the two vectors that `transpose` would produce.
template <int COUNT, class T>
HD Vec<T> pairwise_sums(const Vec<T> (&a)[LANES<T>], int i) {
  if constexpr (COUNT == LANES<T>)
    return a[i];
  else {
    const Vec<T> x = pairwise_sums<2 * COUNT>(a, i), y = pairwise_sums<2 * COUNT>(a, i + COUNT);
    const typename Vec<T>::Mask low = Interleave<T>::low, high = Interleave<T>::high;
    return Vec<T>(FUSEDSEQ_SHUFFLE(x.v, y.v, low)) + Vec<T>(FUSEDSEQ_SHUFFLE(x.v, y.v, high));
  }
}
// Returns a vector whose lane i is the sum of the lanes of a[i].
template <class T>
HD Vec<T> horizontal_sums(const Vec<T> (&a)[LANES<T>]) {
  return pairwise_sums<1>(a, 0);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
