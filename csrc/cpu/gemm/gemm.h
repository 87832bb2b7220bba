// The matrix product for few rows and weights that are packed once and used at every time step. One
// thread computes a range of columns; nothing here knows of other threads, and a result does not
// depend on how the columns are split.
//
// What limits it: the multiply-add units. Measured on 2 cores of a Zen 5 EPYC with AVX-512, 70 or
// 20 rows times 1300 x 2600: 510 GFLOP/s, where MKL's packed GEMM does 125 and 80, and its GEMM of
// 2048^3, which takes MKL's AVX2 path on that processor, 188.
#pragma once
#include "cpu/gemm/pack.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// The rows of A that stay in the L2 cache while the panels of B pass.
constexpr int64_t CHUNK = 24 * MR;

// C (M, columns) (+)= A (M, K) times packed columns (see `pack`), + bias (columns,) if not null.
//
// next: K x PANEL elements that are prefetched meanwhile, or null; only for at most CHUNK rows and
// PANEL columns.
template <class T>
void gemm(int64_t M, int64_t K, int64_t columns, Matrix<const T> A, const T* packed, Output<T> C,
          const T* bias = nullptr, const T* next = nullptr) {
  constexpr int64_t DEPTH = 3072 / sizeof(T);  // of a panel that stays in L2 while the rows pass
  for (int64_t m0 = 0; m0 < M; m0 += CHUNK) {
    // Tiles of equal height instead of full ones and a small rest.
    const int64_t rows = M - m0 < CHUNK ? M - m0 : CHUNK, tiles = (rows + MR - 1) / MR;
    for (int64_t n0 = 0; n0 < columns; n0 += PANEL<T>) {
      const int64_t width = columns - n0 < PANEL<T> ? columns - n0 : PANEL<T>;
      const int64_t padded = round_up<T>(width);

      // A sum of no terms is zero.
      for (int64_t m = m0; K == 0 && !C.accumulate && m < m0 + rows; ++m)
        memset(C.p + m * C.ld + n0, 0, width * sizeof(T));

      // The bias is the initial value of C; the tiles then add to it.
      for (int64_t m = m0; bias && m < m0 + rows; ++m)
        memcpy(C.p + m * C.ld + n0, bias + n0, width * sizeof(T));

      // All tiles of the chunk use one part of the panel before the next part is read.
      for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
        const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
        for (int64_t i = 0; i < tiles; ++i) {
          const int64_t m = m0 + rows * i / tiles, m_end = m0 + rows * (i + 1) / tiles;
          Prefetch<T> prefetch;
          if (next)
            prefetch = {next + (k0 + depth * i / tiles) * PANEL<T>, (PANEL<T> + tiles - 1) / tiles};
          const Output<T> c{C.p + m * C.ld + n0, C.ld, C.whole_vectors,
                            C.accumulate || bias || k0 > 0};
          any_tile<T, Split::columns>(int(m_end - m), width, depth, {A.p + m * A.ld + k0, A.ld, 1},
                                      packed + K * n0 + k0 * padded, c, prefetch);
        }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
