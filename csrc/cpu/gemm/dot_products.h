// The product C = A B^T of few rows of A, with the rows of B where they are: each element of C is a
// dot product along two rows. Packing B, as gemm.h does, takes longer than the product of one row.
//
// What limits it: reading B. Measured on 2 cores of a Zen 5 EPYC with AVX-512, weights of 0.25 to
// 3 MB in the L3 cache: 1.3 to 1.8 times as fast as the packed product for one row, 1.1 to 1.4
// times for 8 rows. From 20 rows on the packed product, which prefetches, is as fast or faster.
#pragma once
#include "cpu/gemm/operands.h"
#include "cpu/simd/bf16_pair.h"
#include "cpu/simd/transpose.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// A tile has DOT_ROWS rows of A and DOT_COLUMNS rows of B: as many dot products as a vector has
// lanes, because horizontal_sums adds up that many vectors at once.
constexpr int DOT_ROWS = 2;
template <class T>
constexpr int DOT_COLUMNS = LANES<T> / DOT_ROWS;

// Up to this many rows of A, dot products are faster than the packed product.
constexpr int64_t MAX_DOT_ROWS = 8;

// Returns whether K numbers are whole vectors of elements, or so many that the rest costs little.
template <class Element>
HD bool fills_vectors(int64_t K) {
  return depth<Element>(K) % LANES<Element> == 0 || depth<Element>(K) >= 4 * LANES<Element>;
}

// c[m][n] += the lanes of A[m] . B[n], of the vector of elements that `load` reads from k on.
template <int ROWS, class Element, class Load>
HD void add_lanes(int64_t k, const Element* A, int64_t lda, const Element* const* B, Load load,
                  Vec<RealOf<Element>> (&c)[ROWS][DOT_COLUMNS<Element>]) {
  Vec<Element> a[ROWS];
#pragma GCC unroll 2
  for (int m = 0; m < ROWS; ++m)
    a[m] = load(A + m * lda + k);
#pragma GCC unroll 8
  for (int n = 0; n < DOT_COLUMNS<Element>; ++n) {
    const Vec<Element> b = load(B[n] + k);
#pragma GCC unroll 2
    for (int m = 0; m < ROWS; ++m)
      c[m][n] = multiply_add(c[m][n], a[m], b);
  }
}

// sums[m * DOT_COLUMNS + n] = A[m] . B[n], not yet summed over the lanes.
template <int ROWS, class Element>
HD void dot_tile(int64_t K, const Element* A, int64_t lda, const Element* const* B,
                 Vec<RealOf<Element>>* sums) {
  using Real = RealOf<Element>;
  constexpr int COLUMNS = DOT_COLUMNS<Element>;
  Vec<Real> c[ROWS][COLUMNS];
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n)
      c[m][n] = Vec<Real>(Real(0));
  int64_t k = 0;
  for (; k + LANES<Element> <= K; k += LANES<Element>)
    add_lanes<ROWS>(k, A, lda, B, [](const Element* p) { return Vec<Element>::load(p); }, c);
  if (k < K)
    add_lanes<ROWS>(
        k, A, lda, B, [&](const Element* p) { return Vec<Element>::load(p, K - k); }, c);
#pragma GCC unroll 2
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n)
      sums[m * COLUMNS + n] = c[m][n];
}

// C (M, N) (+)= A (M, K) B (N, K)^T + bias (N,), which may be null. The value of an element does
// not depend on M, N or its position. K counts elements.
template <class Element>
void product_of_rows(int64_t M, int64_t K, int64_t N, Matrix<const Element> A,
                     Matrix<const Element> B, const RealOf<Element>* bias,
                     Output<RealOf<Element>> C) {
  using Real = RealOf<Element>;
  constexpr int64_t DEPTH =
      4096 / sizeof(Element);  // of B's rows that stay in L1 while A's rows pass
  constexpr int COLUMNS = DOT_COLUMNS<Element>;
  for (int64_t n0 = 0; n0 < N; n0 += COLUMNS) {
    const int64_t columns = N - n0 < COLUMNS ? N - n0 : COLUMNS;
    for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
      // The rows of B; if fewer are left than a tile has, the first one takes the empty places.
      const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
      const Element* b[COLUMNS];
      for (int64_t n = 0; n < COLUMNS; ++n)
        b[n] = B.p + (n0 + (n < columns ? n : 0)) * B.ld + k0;

      for (int64_t m0 = 0; m0 < M; m0 += DOT_ROWS) {
        // Two rows of A, or the last one alone.
        const Element* a = A.p + m0 * A.ld + k0;
        Vec<Real> sums[LANES<Real>];
        if (m0 + DOT_ROWS <= M) {
          dot_tile<DOT_ROWS>(depth, a, A.ld, b, sums);
        } else {
          dot_tile<1>(depth, a, A.ld, b, sums);
          for (int i = COLUMNS; i < LANES<Real>; ++i)
            sums[i] = Vec<Real>(Real(0));
        }

        // Sum over the lanes, and add to the result of the depths before, or to the bias.
        Real dots[LANES<Real>];
        horizontal_sums(sums).store(dots);
        for (int64_t m = m0; m < m0 + DOT_ROWS && m < M; ++m)
          for (int64_t n = 0; n < columns; ++n) {
            Real* c = C.p + m * C.ld + n0 + n;
            Real sum = dots[(m - m0) * COLUMNS + n];
            if (k0 || C.accumulate) sum += *c;
            *c = !k0 && bias ? sum + bias[n0 + n] : sum;
          }
      }
    }
  }
  if (C.whole_vectors && !C.accumulate)
    for (int64_t m = 0; m < M; ++m)
      for (int64_t n = N; n < round_up<Real>(N); ++n)
        C.p[m * C.ld + n] = Real(0);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
