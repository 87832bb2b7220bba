// The statistics of a row of logits that are known after some of its columns: enough to compute the
// log-sum-exp, the argmax and the label smoothing in one pass over the columns, block by block.
#pragma once
#include <cmath>
#include <cstdint>
#include <limits>

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The maximum of no logits. Not an infinity, because the difference of two infinities is NaN.
template <class Real>
constexpr Real LOWEST = std::numeric_limits<Real>::lowest();

template <class Real>
struct Statistics {
  Real max;         // the largest logit
  int64_t argmax;   // its first column
  double sum;       // the sum of exp(z - max)
  double weighted;  // the sum of class_weights * z
};

// Combines the statistics of two sets of columns; the columns of `to` come first. The sum that
// belongs to the smaller maximum is rescaled to the larger one.
template <class Real>
void combine(const Statistics<Real>& from, Statistics<Real>& to) {
  if (from.max > to.max) {
    to.sum = (to.sum != 0 ? to.sum * ::exp(double(to.max - from.max)) : 0) + from.sum;
    to.max = from.max;
    to.argmax = from.argmax;
  } else {
    to.sum += from.sum * ::exp(double(from.max - to.max));
  }
  to.weighted += from.weighted;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
