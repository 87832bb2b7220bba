// Arithmetic on one row of n elements. S is a type in memory, C the type of computing.
#pragma once
#include "cpu/simd/elements.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// y = x * scale, in the type of x.
template <class S>
void scale_row(const S* x, S* y, int64_t n, double scale) {
  using C = RealOf<S>;
  constexpr int64_t step = VECTOR_BYTES / sizeof(C);
  int64_t i = 0;
  for (; i + step <= n; i += step)
    store_as(y + i, load_as(x + i) * Vec<C>(C(scale)));
  for (; i < n; ++i)
    store_scalar(y + i, load_scalar(x + i) * C(scale));
}

// out = x * scale, in the type of computing.
template <class S, class C>
void scale_row_as(const S* x, C* out, int64_t n, C scale) {
  int64_t i = 0;
  for (; i + LANES<C> <= n; i += LANES<C>)
    (load_as(x + i) * Vec<C>(scale)).store(out + i);
  for (; i < n; ++i)
    out[i] = load_scalar(x + i) * scale;
}

// out += x * scale, in the type of computing.
template <class S, class C>
void add_row(const S* x, C* out, int64_t n, C scale) {
  int64_t i = 0;
  for (; i + LANES<C> <= n; i += LANES<C>)
    (Vec<C>::load(out + i) + load_as(x + i) * Vec<C>(scale)).store(out + i);
  for (; i < n; ++i)
    out[i] += load_scalar(x + i) * scale;
}

// The sum of the lanes, in their order.
template <class C>
HD C sum_lanes(Vec<C> v) {
  C sum = 0;
  for (int i = 0; i < LANES<C>; ++i)
    sum += v.v[i];
  return sum;
}

// The sum over a row of n elements of f(j), which returns a vector for the elements from j on. Two
// accumulators, because a single one would wait for the latency of the additions.
template <class C, class F>
HD C sum_row(int64_t n, F f) {
  Vec<C> even(C(0)), odd(C(0));
  int64_t j = 0;
  for (; j + LANES<C> < n; j += 2 * LANES<C>) {
    even = even + f(j);
    odd = odd + f(j + LANES<C>);
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
