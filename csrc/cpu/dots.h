// Products of few rows with the rows of a matrix as they stand: C = A B^T, each element a dot product along both rows.
// Packing B, as gemm.h does, takes longer than the product of one row.
//
// Measured (2 cores of a Zen 5 EPYC, AVX-512, weights of 0.25 to 3 MB from the third cache): 1.3 to 1.8 times the packed
// product for one row, 1.1 to 1.4 for 8; from 20 rows on the packed one, which fetches ahead, is as fast or faster.
#pragma once
#include "gemm.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Rows of A at a time, and of B: as many sums as a vector has lanes, which are added up together.
constexpr int DOT_ROWS = 2;
template <class T> constexpr int DOT_COLUMNS = LANES<T> / DOT_ROWS;
constexpr int64_t MOST_DOT_ROWS = 8;  // of A, for which this is the faster way

// sums[m * DOT_COLUMNS + n]: the lanes' parts of A[m] . B[n]
template <int M, class T> HD void dot_tile(int64_t K, const T* A, int64_t lda, const T* const* B, Vec<T>* sums) {
  constexpr int N = DOT_COLUMNS<T>;
  Vec<T> c[M][N];
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) c[m][n] = Vec<T>(T(0));
  for (int64_t k = 0; k < K; k += LANES<T>) {
    Vec<T> a[M];
#pragma GCC unroll 2
    for (int m = 0; m < M; ++m) a[m] = Vec<T>::load(A + m * lda + k);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec<T> b = Vec<T>::load(B[n] + k);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m) c[m][n] = c[m][n] + a[m] * b;
    }
  }
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m * N + n] = c[m][n];
}

// C (M, N) = A (M, K) B (N, K)^T + bias, K whole vectors; bias may be null. An element does not depend on M, N or its place.
template <class T>
void product_of_rows(int64_t M, int64_t K, const T* A, int64_t lda, const T* B, int64_t ldb, int64_t N, const T* bias, T* C, int64_t ldc) {
  constexpr int64_t DEPTH = 4096 / sizeof(T);  // of the rows of B, which stay in the first cache while those of A pass
  constexpr int COLUMNS = DOT_COLUMNS<T>;
  for (int64_t n0 = 0; n0 < N; n0 += COLUMNS) {
    const int64_t columns = N - n0 < COLUMNS ? N - n0 : COLUMNS;
    for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
      const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
      const T* b[COLUMNS];
      for (int64_t n = 0; n < COLUMNS; ++n) b[n] = B + (n0 + (n < columns ? n : 0)) * ldb + k0;
      for (int64_t m0 = 0; m0 < M; m0 += DOT_ROWS) {
        const T* a = A + m0 * lda + k0;
        Vec<T> sums[LANES<T>];
        if (m0 + DOT_ROWS <= M) {
          dot_tile<DOT_ROWS>(depth, a, lda, b, sums);
        } else {
          dot_tile<1>(depth, a, lda, b, sums);
          for (int i = COLUMNS; i < LANES<T>; ++i) sums[i] = Vec<T>(T(0));
        }
        T found[LANES<T>];
        horizontal_sums(sums).store(found);
        for (int64_t m = m0; m < m0 + DOT_ROWS && m < M; ++m)
          for (int64_t n = 0; n < columns; ++n) {
            T* c = C + m * ldc + n0 + n;
            *c = found[(m - m0) * COLUMNS + n] + (k0 ? *c : bias ? bias[n0 + n] : T(0));
          }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
