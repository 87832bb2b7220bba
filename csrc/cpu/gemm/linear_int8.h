// y = x W^T + b with weights of 8 bits: row n of W is scale[n] times the whole numbers W[n].
//
// What limits it: for few rows reading W, a quarter as many bytes as in fp32. Hence two ways of
// computing y, by the number of rows M:
//   - at most MAX_DOT_ROWS rows: dot products as in dot_products.h, the numbers converted to floats
//     in registers, for each two rows of x again.
//   - all others: as in gemm.h, the numbers converted while they are packed.
// Both multiply by the scale at the end, when a sum is complete.
#pragma once
#include "cpu/gemm/linear.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// sums[m * DOT_COLUMNS + n] = A[m] . B[n], not yet summed over the lanes.
template <int M>
HD void dot_tile(int64_t K, const float* A, int64_t lda, const int8_t* const* B, Vec<float>* sums) {
  constexpr int N = DOT_COLUMNS<float>, L = LANES<float>;
  Vec<float> c[M][N];
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      c[m][n] = Vec<float>(0.f);
  const int64_t whole = K / L * L;
  for (int64_t k = 0; k < whole; k += L) {
    Vec<float> a[M];
#pragma GCC unroll 2
    for (int m = 0; m < M; ++m)
      a[m] = Vec<float>::load(A + m * lda + k);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      __builtin_prefetch(B[n] + k + N * K);  // the rows of the next tile
      const Vec<float> b = load_as(B[n] + k);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m)
        c[m][n] = multiply_add(c[m][n], a[m], b);
    }
  }
  if (whole < K) {
    Vec<float> a[M];
    for (int m = 0; m < M; ++m)
      a[m] = Vec<float>::load(A + m * lda + whole, K - whole);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec<float> b = load_up_to(B[n] + whole, K - whole);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m)
        c[m][n] = multiply_add(c[m][n], a[m], b);
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      sums[m * N + n] = c[m][n];
}

// Columns [begin, end) of y by dot products.
void linear_int8_dots(const cpu::LinearInt8& l, int64_t begin, int64_t end) {
  constexpr int COLUMNS = DOT_COLUMNS<float>;
  for (int64_t n0 = begin; n0 < end; n0 += COLUMNS) {
    // If fewer columns are left than a tile has, the first one takes the empty places.
    const int64_t columns = end - n0 < COLUMNS ? end - n0 : COLUMNS;
    const int8_t* rows[COLUMNS];
    for (int64_t n = 0; n < COLUMNS; ++n)
      rows[n] = l.W + (n0 + (n < columns ? n : 0)) * l.K;
    for (int64_t m0 = 0; m0 < l.M; m0 += DOT_ROWS) {
      // Two rows of x, or the last one alone.
      const bool two = m0 + DOT_ROWS <= l.M;
      Vec<float> sums[LANES<float>];
      if (two) {
        dot_tile<DOT_ROWS>(l.K, l.x + m0 * l.K, l.K, rows, sums);
      } else {
        dot_tile<1>(l.K, l.x + m0 * l.K, l.K, rows, sums);
        for (int i = COLUMNS; i < LANES<float>; ++i)
          sums[i] = Vec<float>(0.f);
      }
      float dots[LANES<float>];
      horizontal_sums(sums).store(dots);
      for (int64_t m = 0; m < (two ? DOT_ROWS : 1); ++m)
        for (int64_t n = 0; n < columns; ++n)
          l.y[(m0 + m) * l.N + n0 + n] =
              dots[m * COLUMNS + n] * l.scale[n0 + n] + (l.b ? l.b[n0 + n] : 0.f);
    }
  }
}

// Columns [begin, end) of y: packs these rows of W and multiplies.
void linear_int8_panels(const cpu::LinearInt8& l, int64_t begin, int64_t end, float* packed) {
  pack(l.W + begin * l.K, 1, l.K, l.K, end - begin, packed);
  gemm_to<float, float>(l.M, l.K, end - begin, {l.x, l.K}, packed, {l.y + begin, l.N}, nullptr);
  for (int64_t m = 0; m < l.M; ++m)
    for (int64_t n = begin; n < end; n += LANES<float>) {
      const int64_t width = end - n;
      float* y = l.y + m * l.N + n;
      const Vec<float> b = l.b ? Vec<float>::load(l.b + n, width) : Vec<float>(0.f);
      (Vec<float>::load(y, width) * Vec<float>::load(l.scale + n, width) + b).store(y, width);
    }
}

void linear_int8(const cpu::LinearInt8& l, cpu::Parallel run, int threads) {
  const bool dots = l.M <= MAX_DOT_ROWS, few = l.M <= CHUNK;
  const int64_t panel = packed_size<float>(l.K, PANEL<float>);
  // Like linear: one panel for each part if there are few rows, else all of W.
  Buffer<float> packed(dots ? 0 : few ? panel * threads : packed_size<float>(l.K, l.N));
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<float>(l.N, begin, end, threads);
    if (dots) return linear_int8_dots(l, own.begin, own.end);
    const int64_t step = few ? PANEL<float> : own.size();
    for (int64_t n = own.begin; n < own.end; n += step)
      linear_int8_panels(l, n, n + step < own.end ? n + step : own.end,
                         packed + (few ? panel * begin : l.K * n));
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
