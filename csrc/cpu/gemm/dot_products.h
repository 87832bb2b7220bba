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
template <class E>
HD bool fills_vectors(int64_t K) {
  return depth<E>(K) % LANES<E> == 0 || depth<E>(K) >= 4 * LANES<E>;
}

// c[m][n] += the lanes of A[m] . B[n], of elements k and those that `load` reads after it.
template <int M, class E, class Load>
HD void add_lanes(int64_t k, const E* A, int64_t lda, const E* const* B, Load load,
                  Vec<RealOf<E>> (&c)[M][DOT_COLUMNS<E>]) {
  Vec<E> a[M];
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m)
    a[m] = load(A + m * lda + k);
#pragma GCC unroll 8
  for (int n = 0; n < DOT_COLUMNS<E>; ++n) {
    const Vec<E> b = load(B[n] + k);
#pragma GCC unroll 2
    for (int m = 0; m < M; ++m)
      c[m][n] = multiply_add(c[m][n], a[m], b);
  }
}

// sums[m * DOT_COLUMNS + n] = A[m] . B[n], not yet summed over the lanes.
template <int M, class E>
HD void dot_tile(int64_t K, const E* A, int64_t lda, const E* const* B, Vec<RealOf<E>>* sums) {
  using T = RealOf<E>;
  constexpr int N = DOT_COLUMNS<E>;
  Vec<T> c[M][N];
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      c[m][n] = Vec<T>(T(0));
  int64_t k = 0;
  for (; k + LANES<E> <= K; k += LANES<E>)
    add_lanes<M>(k, A, lda, B, [](const E* p) { return Vec<E>::load(p); }, c);
  if (k < K) add_lanes<M>(k, A, lda, B, [&](const E* p) { return Vec<E>::load(p, K - k); }, c);
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      sums[m * N + n] = c[m][n];
}

// C (M, N) (+)= A (M, K) B (N, K)^T + bias (N,), which may be null. The value of an element does
// not depend on M, N or its position. K counts elements.
template <class E>
void product_of_rows(int64_t M, int64_t K, int64_t N, Matrix<const E> A, Matrix<const E> B,
                     const RealOf<E>* bias, Output<RealOf<E>> C) {
  using T = RealOf<E>;
  constexpr int64_t DEPTH = 4096 / sizeof(E);  // of B's rows that stay in L1 while A's rows pass
  constexpr int COLUMNS = DOT_COLUMNS<E>;
  for (int64_t n0 = 0; n0 < N; n0 += COLUMNS) {
    const int64_t columns = N - n0 < COLUMNS ? N - n0 : COLUMNS;
    for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
      // The rows of B; if fewer are left than a tile has, the first one takes the empty places.
      const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
      const E* b[COLUMNS];
      for (int64_t n = 0; n < COLUMNS; ++n)
        b[n] = B.p + (n0 + (n < columns ? n : 0)) * B.ld + k0;

      for (int64_t m0 = 0; m0 < M; m0 += DOT_ROWS) {
        // Two rows of A, or the last one alone.
        const E* a = A.p + m0 * A.ld + k0;
        Vec<T> sums[LANES<T>];
        if (m0 + DOT_ROWS <= M) {
          dot_tile<DOT_ROWS>(depth, a, A.ld, b, sums);
        } else {
          dot_tile<1>(depth, a, A.ld, b, sums);
          for (int i = COLUMNS; i < LANES<T>; ++i)
            sums[i] = Vec<T>(T(0));
        }

        // Sum over the lanes, and add to the result of the depths before, or to the bias.
        T dots[LANES<T>];
        horizontal_sums(sums).store(dots);
        for (int64_t m = m0; m < m0 + DOT_ROWS && m < M; ++m)
          for (int64_t n = 0; n < columns; ++n) {
            T* c = C.p + m * C.ld + n0 + n;
            T sum = dots[(m - m0) * COLUMNS + n];
            if (k0 || C.accumulate) sum += *c;
            *c = !k0 && bias ? sum + bias[n0 + n] : sum;
          }
      }
    }
  }
  if (C.whole_vectors && !C.accumulate)
    for (int64_t m = 0; m < M; ++m)
      for (int64_t n = N; n < round_up<T>(N); ++n)
        C.p[m * C.ld + n] = T(0);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
