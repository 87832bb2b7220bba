// Arithmetic on one row of n elements.
#pragma once
#include "cpu/simd/elements.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// y = x * scale, in the type of x.
template <class Stored>
void scale_row(const Stored* x, Stored* y, int64_t n, double scale) {
  using Real = RealOf<Stored>;
  constexpr int64_t step = VECTOR_BYTES / sizeof(Real);
  int64_t i = 0;
  for (; i + step <= n; i += step)
    store_as(y + i, load_as(x + i) * Vec<Real>(Real(scale)));
  for (; i < n; ++i)
    store_scalar(y + i, load_scalar(x + i) * Real(scale));
}

// out = x * scale, in the type of computing.
template <class Stored, class Real>
void scale_row_as(const Stored* x, Real* out, int64_t n, Real scale) {
  int64_t i = 0;
  for (; i + LANES<Real> <= n; i += LANES<Real>)
    (load_as(x + i) * Vec<Real>(scale)).store(out + i);
  for (; i < n; ++i)
    out[i] = load_scalar(x + i) * scale;
}

// out += x * scale, in the type of computing.
template <class Stored, class Real>
void add_row(const Stored* x, Real* out, int64_t n, Real scale) {
  int64_t i = 0;
  for (; i + LANES<Real> <= n; i += LANES<Real>)
    (Vec<Real>::load(out + i) + load_as(x + i) * Vec<Real>(scale)).store(out + i);
  for (; i < n; ++i)
    out[i] += load_scalar(x + i) * scale;
}

// The sum of the lanes, in their order.
template <class Real>
HD Real sum_lanes(Vec<Real> v) {
  Real sum = 0;
  for (int i = 0; i < LANES<Real>; ++i)
    sum += v.v[i];
  return sum;
}

// The sum over a row of n elements of f(j), which returns a vector for the elements from j on. Two
// accumulators, because a single one would wait for the latency of the additions.
template <class Real, class Function>
HD Real sum_row(int64_t n, Function f) {
  Vec<Real> even(Real(0)), odd(Real(0));
  int64_t j = 0;
  for (; j + LANES<Real> < n; j += 2 * LANES<Real>) {
    even = even + f(j);
    odd = odd + f(j + LANES<Real>);
  }
  if (j < n) even = even + f(j);
  return sum_lanes(even + odd);
}

// Prefetches a row. Where rows are short or in no order the hardware prefetcher does not know the
// next one, and each row would begin with the latency of memory.
HD void prefetch_row(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    __builtin_prefetch(static_cast<const char*>(row) + i);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
