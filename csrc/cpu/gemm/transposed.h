// The product A^T B over many rows, which is what weight gradients are: A holds the gradients of
// the outputs, B the inputs.
#pragma once
#include "cpu/gemm/pack.h"
#include "cpu/range.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// What is packed together: KC<E> elements deep, for pairs twice as many so that more products are
// complete after one pass, NC_PANELS<E> panels of B and A_TILES tiles of A.
template <class E>
constexpr int64_t KC = IN_TILE_REGISTERS<E> ? 256 : 256 * NUMBERS<E>;
template <class E>
constexpr int64_t NC_PANELS = IN_TILE_REGISTERS<E> ? 24 : 12 / NUMBERS<E>;
template <class E>
constexpr int64_t A_TILES = IN_TILE_REGISTERS<E> ? 4 : 8;

// The elements of workspace that gemm_transposed needs.
template <class E>
constexpr int64_t TRANSPOSED_SCRATCH = KC<E> * (NC_PANELS<E> * PANEL<E> + A_TILES<E> * MR<E>);

// Copies A (K, rows), rows <= A_TILES * MR, into tiles of (depth(K), MR), for tile registers into
// rows of depth(K). Several tiles are packed at once, so that a cache line of a row of A is read
// once.
template <class E, class S>
HD void pack_tiles(int64_t K, const S* A, int64_t lda, int64_t rows, E* tiles) {
  const int64_t elements = depth<E>(K);
  if constexpr (IN_TILE_REGISTERS<E>) {
    constexpr int64_t L = LANES<E>;
    for (int64_t k = 0; k < elements; k += L)
      for (int64_t i = 0; i < rows; i += L) {
        Vec<E> square[L];
        for (int64_t j = 0; j < L; ++j) {
          const int64_t first = (k + j) * NUMBERS<E>;
          square[j] = first < K ? load_across<E>(A + first * lda + i, lda, K - first, rows - i)
                                : Vec<E>(E{});
        }
        transpose(square);
        for (int64_t j = 0; j < L && i + j < rows; ++j)
          square[j].store(tiles + (i + j) * elements + k, elements - k);
      }
    return;
  }
  for (int64_t k = 0; k < elements; ++k) {
    const S* numbers = A + k * NUMBERS<E> * lda;
    const E* row;
    E buffer[A_TILES<E> * MR<E> + LANES<E>];
    if constexpr (std::is_same<E, S>::value) {
      row = numbers;
    } else {
      for (int64_t i = 0; i < rows; i += LANES<E>)
        load_across<E>(numbers + i, lda, K - k * NUMBERS<E>, rows - i).store(buffer + i);
      row = buffer;
    }
    int64_t i = 0;
    for (; i + MR<E> <= rows; i += MR<E>)
      memcpy(tiles + i * elements + k * MR<E>, row + i, MR<E> * sizeof(E));
    for (int64_t m = 0; i + m < rows; ++m)
      tiles[i * elements + k * MR<E> + m] = row[i + m];
  }
}

// The most rows of A and B whose products are complete after one pass.
template <class E>
constexpr int64_t ONE_PASS = KC<E> * NUMBERS<E>;

// Rows `own` of C (., columns) (+)= A^T B, with A (K, .), B (K, columns). Row r of C belongs to
// column r of A. scratch: TRANSPOSED_SCRATCH elements. If C is not of the type of the sums, it
// cannot accumulate, and K is at most ONE_PASS.
template <class E, class SA, class SB, class SC>
void gemm_transposed(int64_t K, int64_t columns, Range own, Matrix<const SA> A, Matrix<const SB> B,
                     Matrix<SC> C, bool accumulate, E* scratch) {
  using T = RealOf<E>;
  constexpr int64_t ROWS = A_TILES<E> * MR<E>, KC_ = ONE_PASS<E>;
  TileRegisters registers;
  const int64_t panels = (columns + PANEL<E> - 1) / PANEL<E>;
  const int64_t blocks = (panels + NC_PANELS<E> - 1) / NC_PANELS<E>;
  E* B_block = scratch;                                    // (NC_PANELS)(KC, PANEL)
  E* A_tiles = scratch + KC<E> * NC_PANELS<E> * PANEL<E>;  // (A_TILES)(KC, MR)

  // At least one pass, which writes zeros if K is 0.
  for (int64_t k0 = 0; k0 < K || k0 == 0; k0 += KC_) {
    const int64_t kc = K - k0 < KC_ ? K - k0 : KC_, elements = depth<E>(kc);
    for (int64_t block = 0; block < blocks; ++block) {
      // Pack a block of B's columns, which all tiles of A then use; the blocks have equal widths.
      const int64_t n0 = panels * block / blocks * PANEL<E>;
      const int64_t n1 = panels * (block + 1) / blocks * PANEL<E>;
      const int64_t nc = (n1 < columns ? n1 : columns) - n0;
      pack(B.p + k0 * B.ld + n0, B.ld, 1, kc, nc, B_block);

      // Multiply it by all tiles of A.
      for (int64_t r = own.begin; r < own.end; r += ROWS) {
        const int64_t rows = own.end - r < ROWS ? own.end - r : ROWS;
        pack_tiles(kc, A.p + k0 * A.ld + r, A.ld, rows, A_tiles);
        for (int64_t i = 0; i < rows; i += MR<E>)
          for (int64_t j = 0; j < nc; j += PANEL<E>) {
            const int64_t M = rows - i < MR<E> ? rows - i : MR<E>;
            const int64_t width = nc - j < PANEL<E> ? nc - j : PANEL<E>;
            const E* const tiles = A_tiles + i * elements;
            const LeftOperand<E> a = IN_TILE_REGISTERS<E> ? LeftOperand<E>{tiles, elements, 1}
                                                          : LeftOperand<E>{tiles, 1, MR<E>};
            SC* const c = C.p + (r + i) * C.ld + n0 + j;
            if constexpr (std::is_same<SC, T>::value) {
              any_tile<E, Split::rows>(registers, int(M), width, elements, a,
                                       B_block + elements * j,
                                       {c, C.ld, false, accumulate || k0 > 0});
            } else {
              alignas(64) T sums[MR<E> * PANEL<E>];
              any_tile<E, Split::rows>(registers, int(M), width, elements, a,
                                       B_block + elements * j, {sums, PANEL<E>, true, false});
              for (int64_t m = 0; m < M; ++m)
                for (int64_t n = 0; n < width; n += LANES<T>)
                  store_up_to(c + m * C.ld + n, Vec<T>::load(sums + m * PANEL<E> + n), width - n);
            }
          }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
