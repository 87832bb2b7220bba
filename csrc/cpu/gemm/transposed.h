// The product A^T B over many rows, which is what weight gradients are: A holds the gradients of
// the outputs, B the inputs.
#pragma once
#include "cpu/gemm/pack.h"
#include "cpu/range.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t KC = 256;        // the rows of A and B that are packed together
constexpr int64_t NC_PANELS = 12;  // the panels of B that are packed together
constexpr int64_t A_TILES = 8;     // the tiles of A that are packed together

// The elements of workspace that gemm_transposed needs.
template <class T>
constexpr int64_t TRANSPOSED_SCRATCH = KC * (NC_PANELS * PANEL<T> + A_TILES * MR);

// Copies A (kc, rows), rows <= A_TILES * MR, into tiles of (kc, MR). Several tiles are packed at
// once, so that a cache line of a row of A is read once.
template <class T>
HD void pack_tiles(int64_t kc, const T* A, int64_t lda, int64_t rows, T* tiles) {
  for (int64_t k = 0; k < kc; ++k) {
    const T* row = A + k * lda;
    int64_t i = 0;
    for (; i + MR <= rows; i += MR)
      memcpy(tiles + i * kc + k * MR, row + i, MR * sizeof(T));
    for (int64_t m = 0; i + m < rows; ++m)
      tiles[i * kc + k * MR + m] = row[i + m];
  }
}

// Rows `own` of C (., columns) (+)= A^T B, with A (K, .), B (K, columns). Row r of C belongs to
// column r of A. scratch: TRANSPOSED_SCRATCH elements.
template <class T>
void gemm_transposed(int64_t K, int64_t columns, Range own, Matrix<const T> A, Matrix<const T> B,
                     Matrix<T> C, bool accumulate, T* scratch) {
  constexpr int64_t ROWS = A_TILES * MR;
  const int64_t panels = (columns + PANEL<T> - 1) / PANEL<T>;
  const int64_t blocks = (panels + NC_PANELS - 1) / NC_PANELS;
  T* B_block = scratch;                              // (NC_PANELS)(KC, PANEL)
  T* A_tiles = scratch + KC * NC_PANELS * PANEL<T>;  // (A_TILES)(KC, MR)

  // At least one pass, which writes zeros if K is 0.
  for (int64_t k0 = 0; k0 < K || k0 == 0; k0 += KC) {
    const int64_t kc = K - k0 < KC ? K - k0 : KC;
    for (int64_t block = 0; block < blocks; ++block) {
      // Pack a block of B's columns, which all tiles of A then use; the blocks have equal widths.
      const int64_t n0 = panels * block / blocks * PANEL<T>;
      const int64_t n1 = panels * (block + 1) / blocks * PANEL<T>;
      const int64_t nc = (n1 < columns ? n1 : columns) - n0;
      pack(B.p + k0 * B.ld + n0, B.ld, 1, kc, nc, B_block);

      // Multiply it by all tiles of A.
      for (int64_t r = own.begin; r < own.end; r += ROWS) {
        const int64_t rows = own.end - r < ROWS ? own.end - r : ROWS;
        pack_tiles(kc, A.p + k0 * A.ld + r, A.ld, rows, A_tiles);
        for (int64_t i = 0; i < rows; i += MR)
          for (int64_t j = 0; j < nc; j += PANEL<T>) {
            const Output<T> c{C.p + (r + i) * C.ld + n0 + j, C.ld, false, accumulate || k0 > 0};
            any_tile<T, Split::rows>(int(rows - i < MR ? rows - i : MR),
                                     nc - j < PANEL<T> ? nc - j : PANEL<T>, kc,
                                     {A_tiles + i * kc, 1, MR}, B_block + kc * j, c);
          }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
