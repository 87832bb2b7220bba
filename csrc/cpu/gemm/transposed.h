// The product A^T B over many rows, which is what weight gradients are: A holds the gradients of
// the outputs, B the inputs.
#pragma once
#include "cpu/gemm/pack.h"
#include "cpu/range.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// What is packed together: PACKED_PANELS panels of B and PACKED_TILES tiles of A, PACKED_DEPTH
// elements deep. Where vectors multiply pairs, the depth is twice as many elements, so that more
// products are complete after one pass.
template <class Element>
constexpr int64_t PACKED_DEPTH = IN_TILE_REGISTERS<Element> ? 256 : 256 * NUMBERS<Element>;
template <class Element>
constexpr int64_t PACKED_PANELS = IN_TILE_REGISTERS<Element> ? 24 : 12 / NUMBERS<Element>;
template <class Element>
constexpr int64_t PACKED_TILES = IN_TILE_REGISTERS<Element> ? 4 : 8;

// The elements of workspace that gemm_transposed needs.
template <class Element>
constexpr int64_t TRANSPOSED_SCRATCH =
    PACKED_DEPTH<Element> *
    (PACKED_PANELS<Element> * PANEL_COLUMNS<Element> + PACKED_TILES<Element> * TILE_ROWS<Element>);

// Copies A (K, rows), rows <= PACKED_TILES * TILE_ROWS, into tiles of (depth(K), TILE_ROWS), for
// tile registers into rows of depth(K). Several tiles are packed at once, so that a cache line of a
// row of A is read once.
template <class Element, class Stored>
HD void pack_tiles(int64_t K, const Stored* A, int64_t lda, int64_t rows, Element* tiles) {
  const int64_t elements = depth<Element>(K);
  if constexpr (IN_TILE_REGISTERS<Element>) {
    constexpr int64_t lanes = LANES<Element>;
    for (int64_t k = 0; k < elements; k += lanes)
      for (int64_t i = 0; i < rows; i += lanes) {
        Vec<Element> square[lanes];
        for (int64_t j = 0; j < lanes; ++j) {
          const int64_t first = (k + j) * NUMBERS<Element>;
          square[j] = first < K
                          ? load_across<Element>(A + first * lda + i, lda, K - first, rows - i)
                          : Vec<Element>(Element{});
        }
        transpose(square);
        for (int64_t j = 0; j < lanes && i + j < rows; ++j)
          square[j].store(tiles + (i + j) * elements + k, elements - k);
      }
    return;
  }
  for (int64_t k = 0; k < elements; ++k) {
    const Stored* numbers = A + k * NUMBERS<Element> * lda;
    const Element* row;
    Element buffer[PACKED_TILES<Element> * TILE_ROWS<Element> + LANES<Element>];
    if constexpr (std::is_same<Element, Stored>::value) {
      row = numbers;
    } else {
      for (int64_t i = 0; i < rows; i += LANES<Element>)
        load_across<Element>(numbers + i, lda, K - k * NUMBERS<Element>, rows - i)
            .store(buffer + i);
      row = buffer;
    }
    int64_t i = 0;
    for (; i + TILE_ROWS<Element> <= rows; i += TILE_ROWS<Element>)
      memcpy(tiles + i * elements + k * TILE_ROWS<Element>, row + i,
             TILE_ROWS<Element> * sizeof(Element));
    for (int64_t m = 0; i + m < rows; ++m)
      tiles[i * elements + k * TILE_ROWS<Element> + m] = row[i + m];
  }
}

// The most rows of A and B whose products are complete after one pass.
template <class Element>
constexpr int64_t ROWS_PER_PASS = PACKED_DEPTH<Element> * NUMBERS<Element>;

// Rows `own` of C (., columns) (+)= A^T B, with A (K, .), B (K, columns). Row r of C belongs to
// column r of A. scratch: TRANSPOSED_SCRATCH elements. If C is not of the type of the sums, it
// cannot accumulate, and K is at most ROWS_PER_PASS.
template <class Element, class StoredA, class StoredB, class StoredC>
void gemm_transposed(int64_t K, int64_t columns, Range own, Matrix<const StoredA> A,
                     Matrix<const StoredB> B, Matrix<StoredC> C, bool accumulate,
                     Element* scratch) {
  using Real = RealOf<Element>;
  constexpr int64_t ROWS = PACKED_TILES<Element> * TILE_ROWS<Element>;
  constexpr int64_t DEPTH = ROWS_PER_PASS<Element>;
  TileRegisters registers;
  const int64_t panels = (columns + PANEL_COLUMNS<Element> - 1) / PANEL_COLUMNS<Element>;
  const int64_t blocks = (panels + PACKED_PANELS<Element> - 1) / PACKED_PANELS<Element>;
  // B_block: (PACKED_PANELS)(PACKED_DEPTH, PANEL_COLUMNS)
  // A_tiles: (PACKED_TILES)(PACKED_DEPTH, TILE_ROWS)
  Element* B_block = scratch;
  Element* A_tiles =
      scratch + PACKED_DEPTH<Element> * PACKED_PANELS<Element> * PANEL_COLUMNS<Element>;

  // At least one pass, which writes zeros if K is 0.
  for (int64_t k0 = 0; k0 < K || k0 == 0; k0 += DEPTH) {
    const int64_t numbers = K - k0 < DEPTH ? K - k0 : DEPTH, elements = depth<Element>(numbers);
    for (int64_t block = 0; block < blocks; ++block) {
      // Pack a block of B's columns, which all tiles of A then use; the blocks have equal widths.
      const int64_t n0 = panels * block / blocks * PANEL_COLUMNS<Element>;
      const int64_t n1 = panels * (block + 1) / blocks * PANEL_COLUMNS<Element>;
      const int64_t block_columns = (n1 < columns ? n1 : columns) - n0;
      pack(B.p + k0 * B.ld + n0, B.ld, 1, numbers, block_columns, B_block);

      // Multiply it by all tiles of A.
      for (int64_t r = own.begin; r < own.end; r += ROWS) {
        const int64_t rows = own.end - r < ROWS ? own.end - r : ROWS;
        pack_tiles(numbers, A.p + k0 * A.ld + r, A.ld, rows, A_tiles);
        for (int64_t i = 0; i < rows; i += TILE_ROWS<Element>)
          for (int64_t j = 0; j < block_columns; j += PANEL_COLUMNS<Element>) {
            const int64_t M = rows - i < TILE_ROWS<Element> ? rows - i : TILE_ROWS<Element>;
            const int64_t width = block_columns - j < PANEL_COLUMNS<Element>
                                      ? block_columns - j
                                      : PANEL_COLUMNS<Element>;
            const Element* const tiles = A_tiles + i * elements;
            const LeftOperand<Element> a = IN_TILE_REGISTERS<Element>
                                               ? LeftOperand<Element>{tiles, elements, 1}
                                               : LeftOperand<Element>{tiles, 1, TILE_ROWS<Element>};
            StoredC* const c = C.p + (r + i) * C.ld + n0 + j;
            if constexpr (std::is_same<StoredC, Real>::value) {
              any_tile<Element, Split::rows>(registers, int(M), width, elements, a,
                                             B_block + elements * j,
                                             {c, C.ld, false, accumulate || k0 > 0});
            } else {
              alignas(64) Real sums[TILE_ROWS<Element> * PANEL_COLUMNS<Element>];
              any_tile<Element, Split::rows>(registers, int(M), width, elements, a,
                                             B_block + elements * j,
                                             {sums, PANEL_COLUMNS<Element>, true, false});
              for (int64_t m = 0; m < M; ++m)
                for (int64_t n = 0; n < width; n += LANES<Real>)
                  store_up_to(c + m * C.ld + n,
                              Vec<Real>::load(sums + m * PANEL_COLUMNS<Element> + n), width - n);
            }
          }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
