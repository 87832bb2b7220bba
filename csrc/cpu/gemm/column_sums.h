// The sums of the columns of a matrix, which are the gradients of biases.
#pragma once
#include "cpu/simd/row_arithmetic.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// out[j] = the sum over the M rows of A[m * lda + j]. Blocks of 64 rows are summed by themselves
// first, so that a long sum stays precise. `block` is a workspace of `columns` elements.
template <class Stored, class Real>
void column_sums(int64_t M, const Stored* A, int64_t lda, int64_t columns, Real* out, Real* block) {
  memset(out, 0, columns * sizeof(Real));
  for (int64_t m0 = 0; m0 < M; m0 += 64) {
    memset(block, 0, columns * sizeof(Real));
    for (int64_t m = m0; m < M && m < m0 + 64; ++m)
      add_row(A + m * lda, block, columns, Real(1));
    add_row((const Real*)block, out, columns, Real(1));
  }
}

// The same of the elementwise product of A and another matrix C.
template <class Real>
void product_sums(int64_t M, int64_t columns, const Real* A, int64_t lda, const Real* C,
                  int64_t ldc, Real* out, Real* block) {
  memset(out, 0, columns * sizeof(Real));
  for (int64_t m0 = 0; m0 < M; m0 += 64) {
    memset(block, 0, columns * sizeof(Real));
    for (int64_t m = m0; m < M && m < m0 + 64; ++m)
      for (int64_t j = 0; j < columns; j += LANES<Real>) {
        const int64_t n = columns - j;
        const Vec<Real> product =
            Vec<Real>::load(A + m * lda + j, n) * Vec<Real>::load(C + m * ldc + j, n);
        (Vec<Real>::load(block + j, n) + product).store(block + j, n);
      }
    add_row((const Real*)block, out, columns, Real(1));
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
