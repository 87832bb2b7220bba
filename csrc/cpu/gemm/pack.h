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
HD void pack_transposed_panel(const Stored* B, int64_t stride_n, int64_t K, int64_t width,
                              Element* packed) {
  constexpr int lanes = LANES<Element>;
  const int64_t padded = round_up<Element>(width), elements = depth<Element>(K);
  for (int64_t j = 0; j < padded; j += lanes) {
    const int64_t n = width - j < lanes ? width - j : lanes;
    const Stored* column = B + j * stride_n;
    for (int64_t k = 0; k < elements; k += lanes) {
      const int64_t rows = elements - k < lanes ? elements - k : lanes,
                    first = k * NUMBERS<Element>;
      Vec<Element> square[lanes];
      for (int i = 0; i < n; ++i)
        __builtin_prefetch(column + i * stride_n + first + 4 * lanes * NUMBERS<Element>);
      for (int i = 0; i < lanes; ++i)
        square[i] = i < n ? load_along<Element>(column + i * stride_n + first, K - first)
                          : Vec<Element>(Element{});
      transpose(square);
      for (int64_t i = 0; i < rows; ++i)
        square[i].store(packed + (k + i) * padded + j);
    }
  }
}

// Packs B (K, columns) into panels of PANEL_COLUMNS columns, the last one narrower: `packed` holds
// panel after panel, each (depth<Element>(K), panel's columns) and zero-padded to whole vectors.
// Number (k, n) of B is B[k * stride_k + n * stride_n]; one of the strides must be 1.
template <class Element, class Stored>
void pack(const Stored* B, int64_t stride_k, int64_t stride_n, int64_t K, int64_t columns,
          Element* packed) {
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL_COLUMNS<Element>) {
    const int64_t width =
        columns - n0 < PANEL_COLUMNS<Element> ? columns - n0 : PANEL_COLUMNS<Element>;
    const int64_t padded = round_up<Element>(width);
    if (stride_n == 1) {
      for (int64_t k = 0; k < depth<Element>(K); ++k) {
        const int64_t first = k * NUMBERS<Element>;
        for (int64_t j = 0; j < padded; j += LANES<Element>)
          load_across<Element>(B + first * stride_k + n0 + j, stride_k, K - first, width - j)
              .store(packed + k * padded + j);
      }
    } else {
      pack_transposed_panel(B + n0 * stride_n, stride_n, K, width, packed);
    }
    packed += depth<Element>(K) * padded;
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
