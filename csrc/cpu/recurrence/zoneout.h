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
template <class T>
struct Update {
  const T *h, *c;
};

template <class T>
T* update_of(const cpu::Recurrence<T>& r, const cpu::Mask& mask, double p, Range units, int64_t row,
             T* update) {
  if (!mask.threshold) return nullptr;
  if (r.training)
    mask_values(mask, row, r.H, units.begin, units.end, T(1), T(0), update);
  else
    for (int64_t j = 0; j < units.size(); ++j)
      update[j] = T(1 - p);
  return update;
}

// The update of row b at step t. workspace: (2, ld), initialized
template <class T>
Update<T> update_of(const cpu::Recurrence<T>& r, Range units, int64_t t, int64_t b, T* workspace,
                    int64_t ld) {
  const int64_t row = mask_row(r, t, b);
  return {update_of(r, r.zoneout_h, r.zoneout_h_p, units, row, workspace),
          update_of(r, r.zoneout_c, r.zoneout_c_p, units, row, workspace + ld)};
}

// Returns factor * x, and 0 where the factor is 0, whatever x is: NaN or infinite, too.
template <class T>
HD Vec<T> part_of(Vec<T> factor, Vec<T> x) {
  const Vec<T> zero(T(0));
  return select<T>(factor.v != zero.v, factor * x, zero);
}

// Returns the state of the units from the j-th of the range on.
template <class T>
HD Vec<T> mix(const T* update, int64_t j, Vec<T> after, Vec<T> before) {
  if (!update) return after;
  const Vec<T> u = Vec<T>::load(update + j);
  return part_of(u, after) + part_of(1.f - u, before);
}

// Returns the part of the state's gradient d that bypasses the cell, and leaves the other part in
// d.
template <class T>
HD Vec<T> bypass(const T* update, int64_t j, Vec<T>& d) {
  if (!update) return Vec<T>(T(0));
  const Vec<T> u = Vec<T>::load(update + j), past = part_of(1.f - u, d);
  d = part_of(u, d);
  return past;
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
