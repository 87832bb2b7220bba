// Packing: copying the right operand of a product into panels that a tile reads from start to end.
#pragma once
#include "cpu/gemm/tile.h"
#include "cpu/simd/transpose.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Returns the number of elements that `columns` packed columns of K rows take.
template <class T>
HD int64_t packed_size(int64_t K, int64_t columns) {
  return K * round_up<T>(columns);
}

// A panel (K, width) from B, whose columns are contiguous: squares of LANES x LANES elements are
// transposed in registers.
template <class T>
HD void pack_transposed_panel(const T* B, int64_t sn, int64_t K, int64_t width, T* dst) {
  constexpr int L = LANES<T>;
  const int64_t padded = round_up<T>(width);
  for (int64_t j = 0; j < padded; j += L) {
    const int64_t n = width - j < L ? width - j : L;
    const T* column = B + j * sn;
    for (int64_t k = 0; k < K; k += L) {
      const int64_t rows = K - k < L ? K - k : L;
      Vec<T> square[L];
      for (int i = 0; i < n; ++i)
        __builtin_prefetch(column + i * sn + k + 4 * L);
      for (int i = 0; i < L; ++i)
        square[i] = i < n ? Vec<T>::load(column + i * sn + k, rows) : Vec<T>(T(0));
      transpose(square);
      for (int64_t i = 0; i < rows; ++i)
        square[i].store(dst + (k + i) * padded + j);
    }
  }
}

// Packs B (K, columns) into panels of PANEL columns, the last one narrower: dst holds panel after
// panel, each (K, panel's columns) and zero-padded to whole vectors. Element (k, n) of B is
// B[k * sk + n * sn]; one of the strides must be 1.
template <class T>
void pack(const T* B, int64_t sk, int64_t sn, int64_t K, int64_t columns, T* dst) {
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL<T>) {
    const int64_t width = columns - n0 < PANEL<T> ? columns - n0 : PANEL<T>;
    const int64_t padded = round_up<T>(width);
    if (sn == 1) {
      for (int64_t k = 0; k < K; ++k)
        for (int64_t j = 0; j < padded; j += LANES<T>)
          Vec<T>::load(B + k * sk + n0 + j, width - j).store(dst + k * padded + j);
    } else {
      pack_transposed_panel(B + n0 * sn, sn, K, width, dst);
    }
    dst += K * padded;
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
