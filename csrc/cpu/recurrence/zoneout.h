// Zoneout (Krueger et al., 2017) of a row's state on the CPU: a part of each unit's new state, and
// the rest of the state before the step.
#pragma once
#include "cpu/arguments/recurrence.h"
#include "cpu/random_mask.h"
#include "cpu/simd/vec.h"
#include "math/step_order.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// For each unit of a range, the fraction of the new h (c) in the state: 1 or 0 in training,
// otherwise the expectation 1 - p. Null without zoneout of h (c).
template <class Real>
struct Update {
  const Real *h, *c;
};

template <class Real>
Real* update_of(const cpu::Recurrence<Real>& r, const cpu::Mask& mask, double p, Range units,
                int64_t row, Real* update) {
  if (!mask.threshold) return nullptr;
  if (r.training)
    mask_values(mask, row, r.H, units.begin, units.end, Real(1), Real(0), update);
  else
    for (int64_t j = 0; j < units.size(); ++j)
      update[j] = Real(1 - p);
  return update;
}

// The update of row b at step t. workspace: (2, ld), initialized
template <class Real>
Update<Real> update_of(const cpu::Recurrence<Real>& r, Range units, int64_t t, int64_t b,
                       Real* workspace, int64_t ld) {
  const int64_t row = mask_row(r, t, b);
  return {update_of(r, r.zoneout_h, r.zoneout_h_p, units, row, workspace),
          update_of(r, r.zoneout_c, r.zoneout_c_p, units, row, workspace + ld)};
}

// Returns factor * x, and 0 where the factor is 0, whatever x is: NaN or infinite, too.
template <class Real>
HD Vec<Real> part_of(Vec<Real> factor, Vec<Real> x) {
  const Vec<Real> zero(Real(0));
  return select<Real>(factor.v != zero.v, factor * x, zero);
}

// Returns the state of the units from the j-th of the range on.
template <class Real>
HD Vec<Real> mix(const Real* update, int64_t j, Vec<Real> after, Vec<Real> before) {
  if (!update) return after;
  const Vec<Real> u = Vec<Real>::load(update + j);
  return part_of(u, after) + part_of(1.f - u, before);
}

// Returns the part of the state's gradient d that bypasses the cell, and leaves the other part in
// d.
template <class Real>
HD Vec<Real> bypass(const Real* update, int64_t j, Vec<Real>& d) {
  if (!update) return Vec<Real>(Real(0));
  const Vec<Real> u = Vec<Real>::load(update + j), past = part_of(1.f - u, d);
  d = part_of(u, d);
  return past;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
