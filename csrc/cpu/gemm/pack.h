// Packing: copying the right operand of a product into panels that a tile reads from start to end,
// as elements of the product, from a matrix of numbers.
#pragma once
#include "cpu/gemm/tile.h"
#include "cpu/simd/transpose.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns the number of elements that `columns` packed columns of K rows take.
template <class Element>
HD int64_t packed_size(int64_t K, int64_t columns) {
  return depth<Element>(K) * round_up<Element>(columns);
}

// A panel (K, width) from B, whose columns are contiguous: squares of LANES x LANES elements are
// transposed in registers.
template <class Element, class Stored>
HD void pack_transposed_panel(const Stored* B, int64_t sn, int64_t K, int64_t width, Element* dst) {
  constexpr int L = LANES<Element>;
  const int64_t padded = round_up<Element>(width), elements = depth<Element>(K);
  for (int64_t j = 0; j < padded; j += L) {
    const int64_t n = width - j < L ? width - j : L;
    const Stored* column = B + j * sn;
    for (int64_t k = 0; k < elements; k += L) {
      const int64_t rows = elements - k < L ? elements - k : L, first = k * NUMBERS<Element>;
      Vec<Element> square[L];
      for (int i = 0; i < n; ++i)
        __builtin_prefetch(column + i * sn + first + 4 * L * NUMBERS<Element>);
      for (int i = 0; i < L; ++i)
        square[i] = i < n ? load_along<Element>(column + i * sn + first, K - first)
                          : Vec<Element>(Element{});
      transpose(square);
      for (int64_t i = 0; i < rows; ++i)
        square[i].store(dst + (k + i) * padded + j);
    }
  }
}

// Packs B (K, columns) into panels of PANEL columns, the last one narrower: dst holds panel after
// panel, each (depth<Element>(K), panel's columns) and zero-padded to whole vectors. Number (k, n)
// of B is B[k * sk + n * sn]; one of the strides must be 1.
template <class Element, class Stored>
void pack(const Stored* B, int64_t sk, int64_t sn, int64_t K, int64_t columns, Element* dst) {
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL<Element>) {
    const int64_t width = columns - n0 < PANEL<Element> ? columns - n0 : PANEL<Element>;
    const int64_t padded = round_up<Element>(width);
    if (sn == 1) {
      for (int64_t k = 0; k < depth<Element>(K); ++k) {
        const int64_t first = k * NUMBERS<Element>;
        for (int64_t j = 0; j < padded; j += LANES<Element>)
          load_across<Element>(B + first * sk + n0 + j, sk, K - first, width - j)
              .store(dst + k * padded + j);
      }
    } else {
      pack_transposed_panel(B + n0 * sn, sn, K, width, dst);
    }
    dst += depth<Element>(K) * padded;
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
