// Activation regularization (AR) and temporal activation regularization (TAR) of Merity et al.
// (2017): alpha * sum(dropped^2) + beta * sum((raw[t + 1] - raw[t])^2), both in one pass, and their
// gradients in another one. alpha and beta already contain the divisions of the means.
//
// What limits it: memory bandwidth.
#pragma once
#include "cpu/arguments/pointwise.h"
#include "cpu/buffer.h"
#include "cpu/simd/elements.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Sums are taken over blocks of this fixed size, and the blocks' sums are added in double precision
// and in order: the result does not depend on the number of threads.
constexpr int64_t AR_BLOCK = 8192;

// Computes into sums[0] and sums[1] the sums of squares of the elements [i0, i1): of `dropped`, and
// of the differences of `raw` to the next time step, for elements that have one.
template <class Stored>
HD void regularization_sums(const cpu::ActivationRegularization& a, int64_t i0, int64_t i1,
                            double* sums) {
  using Real = RealOf<Stored>;
  const Stored* dropped = static_cast<const Stored*>(a.dropped);  // (T, N)
  const Stored* raw = static_cast<const Stored*>(a.raw);          // (T, N)
  const int64_t with_next = (a.T - 1) * a.N;  // the elements before the last time step
  Vec<Real> ar(Real(0)), tar(Real(0));
  for (int64_t i = i0; i < i1; i += LANES<Real>) {
    const Vec<Real> d = load_up_to(dropped + i, i1 - i);
    ar = ar + d * d;
    const int64_t n = (i1 < with_next ? i1 : with_next) - i;
    if (n > 0) {
      const Vec<Real> step = load_up_to(raw + i + a.N, n) - load_up_to(raw + i, n);
      tar = tar + step * step;
    }
  }
  double ar_sum = 0, tar_sum = 0;
  for (int i = 0; i < LANES<Real>; ++i) {
    ar_sum += ar.v[i];
    tar_sum += tar.v[i];
  }
  sums[0] = ar_sum;
  sums[1] = tar_sum;
}

template <class Stored>
double activation_regularization_of_type(const cpu::ActivationRegularization& a,
                                         cpu::Parallel run) {
  const int64_t total = a.T * a.N, blocks = (total + AR_BLOCK - 1) / AR_BLOCK;
  Buffer<double> sums(2 * blocks);  // (blocks, 2)
  parallel(run, blocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t i0 = block * AR_BLOCK, i1 = i0 + AR_BLOCK < total ? i0 + AR_BLOCK : total;
      regularization_sums<Stored>(a, i0, i1, sums + 2 * block);
    }
  });
  double ar = 0, tar = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    ar += sums[2 * block];
    tar += sums[2 * block + 1];
  }
  return a.alpha * ar + (a.T > 1 ? a.beta * tar : 0.);
}

inline double activation_regularization(const cpu::ActivationRegularization& a, cpu::Parallel run,
                                        int) {
  double loss = 0;
  by_type(a.type,
          [&](auto number) { loss = activation_regularization_of_type<decltype(number)>(a, run); });
  return loss;
}

template <class Stored>
void activation_regularization_backward_of_type(const cpu::ActivationRegularization& a,
                                                double dloss, cpu::Parallel run) {
  using Real = RealOf<Stored>;
  const int64_t total = a.T * a.N, blocks = (total + AR_BLOCK - 1) / AR_BLOCK;
  const Stored* dropped = static_cast<const Stored*>(a.dropped);  // (T, N)
  const Stored* raw = static_cast<const Stored*>(a.raw);          // (T, N)
  Stored* ddropped = static_cast<Stored*>(a.ddropped);            // (T, N)
  Stored* draw = static_cast<Stored*>(a.draw);                    // (T, N)
  const Vec<Real> ar(Real(2 * a.alpha * dloss)), tar(Real(2 * a.beta * dloss));
  parallel(run, blocks, [&](int64_t begin, int64_t end) {
    const int64_t i1 = end * AR_BLOCK < total ? end * AR_BLOCK : total;
    for (int64_t i = begin * AR_BLOCK; i < i1;) {
      // Elements up to the end of their time step: either all of them have a previous step, or
      // none; and the same for the next step.
      const int64_t step_end = (i / a.N + 1) * a.N, stop = step_end < i1 ? step_end : i1;
      const bool has_previous = i >= a.N, has_next = i < total - a.N;
      for (; i < stop; i += LANES<Real>) {
        const int64_t n = stop - i;
        store_up_to<Stored>(ddropped + i, ar * load_up_to(dropped + i, n), n);
        const Vec<Real> x = load_up_to(raw + i, n);
        Vec<Real> d(Real(0));
        if (has_previous) d = d + (x - load_up_to(raw + i - a.N, n));
        if (has_next) d = d - (load_up_to(raw + i + a.N, n) - x);
        store_up_to<Stored>(draw + i, tar * d, n);
      }
      i = stop;
    }
  });
}

inline void activation_regularization_backward(const cpu::ActivationRegularization& a, double dloss,
                                               cpu::Parallel run, int) {
  by_type(a.type, [&](auto number) {
    activation_regularization_backward_of_type<decltype(number)>(a, dloss, run);
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
