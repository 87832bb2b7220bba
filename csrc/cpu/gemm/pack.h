// Packing: copying the right operand of a product into panels that a tile reads from start to end,
// as elements E of the product, from a matrix of numbers S.
#pragma once
#include "cpu/gemm/tile.h"
#include "cpu/simd/transpose.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns the number of elements that `columns` packed columns of K rows take.
template <class E>
HD int64_t packed_size(int64_t K, int64_t columns) {
  return depth<E>(K) * round_up<E>(columns);
}

// A panel (K, width) from B, whose columns are contiguous: squares of LANES x LANES elements are
// transposed in registers.
template <class E, class S>
HD void pack_transposed_panel(const S* B, int64_t sn, int64_t K, int64_t width, E* dst) {
  constexpr int L = LANES<E>;
  const int64_t padded = round_up<E>(width), elements = depth<E>(K);
  for (int64_t j = 0; j < padded; j += L) {
    const int64_t n = width - j < L ? width - j : L;
    const S* column = B + j * sn;
    for (int64_t k = 0; k < elements; k += L) {
      const int64_t rows = elements - k < L ? elements - k : L, first = k * NUMBERS<E>;
      Vec<E> square[L];
      for (int i = 0; i < n; ++i)
        __builtin_prefetch(column + i * sn + first + 4 * L * NUMBERS<E>);
      for (int i = 0; i < L; ++i)
        square[i] = i < n ? load_along<E>(column + i * sn + first, K - first) : Vec<E>(E{});
      transpose(square);
      for (int64_t i = 0; i < rows; ++i)
        square[i].store(dst + (k + i) * padded + j);
    }
  }
}

// Packs B (K, columns) into panels of PANEL columns, the last one narrower: dst holds panel after
// panel, each (depth<E>(K), panel's columns) and zero-padded to whole vectors. Number (k, n) of B
// is B[k * sk + n * sn]; one of the strides must be 1.
template <class E, class S>
void pack(const S* B, int64_t sk, int64_t sn, int64_t K, int64_t columns, E* dst) {
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL<E>) {
    const int64_t width = columns - n0 < PANEL<E> ? columns - n0 : PANEL<E>;
    const int64_t padded = round_up<E>(width);
    if (sn == 1) {
      for (int64_t k = 0; k < depth<E>(K); ++k) {
        const int64_t first = k * NUMBERS<E>;
        for (int64_t j = 0; j < padded; j += LANES<E>)
          load_across<E>(B + first * sk + n0 + j, sk, K - first, width - j)
              .store(dst + k * padded + j);
      }
    } else {
      pack_transposed_panel(B + n0 * sn, sn, K, width, dst);
    }
    dst += depth<E>(K) * padded;
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
