// Random masks in the persistent kernels, one element at a time. They are drawn again in backward
// from the same Philox counters instead of being saved.
#pragma once
#include "cuda/random_mask.cuh"
#include "cuda/recurrence/arguments.h"
#include "math/zoneout.h"

namespace fusedseq::cuda {

// Whether element (row, j) of a mask whose rows have `width` elements is kept.
__device__ __forceinline__ bool keep(const int64_t* seed, const Mask& m, int64_t row, int64_t j,
                                     int64_t width) {
  PhiloxBlock words;
  words.make(uint64_t(*seed), uint64_t(row * ((width + 3) / 4) + j / 4), m.stream);
  return words[int(j % 4)] >= m.threshold;
}

// Zoneout in training: whether a unit takes its new value, drawn at random. row: t * B + batch row.
__device__ __forceinline__ bool zoneout_draw(const Recurrence& r, const Mask& m, int64_t row,
                                             int64_t j) {
  return m.threshold && r.training && keep(r.seed, m, row, j, r.H);
}
// The weight of a unit's new value, of which the old value has the rest: 1 or 0 in training, else
// its expectation.
__device__ __forceinline__ float zoneout_update(const Recurrence& r, const Mask& m, bool draw) {
  return !r.training ? float(1 - m.p) : draw ? 1.f : 0.f;
}

// A unit's state after zoneout.
__device__ __forceinline__ float after_zoneout(const Recurrence& r, const Mask& m, bool draw,
                                               float after, float before) {
  return m.threshold ? mix(zoneout_update(r, m, draw), after, before) : after;
}

// Returns the part of the gradient d of a unit's state that bypasses the cell, and leaves the other
// part in d.
__device__ __forceinline__ float bypass_of_zoneout(const Recurrence& r, const Mask& m, bool draw,
                                                   float& d) {
  return m.threshold ? bypass(zoneout_update(r, m, draw), d) : 0.f;
}

// Element (row, j) of W_hh after weight drop.
template <class S>
__device__ __forceinline__ S dropped_weight(const Recurrence& r, int64_t row, int64_t j) {
  const S w = static_cast<const S*>(r.W_hh)[row * r.H + j];
  if (!r.weight.threshold) return w;
  const bool keep_weight =
      r.variational ? keep(r.seed, r.weight, 0, row, 4 * r.H) : keep(r.seed, r.weight, row, j, r.H);
  return keep_weight ? S(float(w) * float(r.weight.scale)) : S(0.f);
}

}  // namespace fusedseq::cuda
