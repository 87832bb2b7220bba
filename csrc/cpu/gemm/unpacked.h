// The matrix product with an unpacked right operand, for small matrices and for few rows, where
// packing B would take about as long as the product itself.
#pragma once
#include "cpu/gemm/tile.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

#if defined(__AMX_BF16__)
// `product` in tile registers, for which the rows of A must be contiguous.
inline void product_in_tiles(int64_t M, int64_t K, int64_t N, LeftOperand<bf16_pair> A,
                             Matrix<const bf16_pair> B, Matrix<float> C, bool accumulate) {
  constexpr int64_t DEPTH = 256;
  alignas(64) bf16_pair rows_of_A[TILE_ROWS<bf16_pair> * DEPTH];
  const int64_t tiles = (M + TILE_ROWS<bf16_pair> - 1) / TILE_ROWS<bf16_pair>;
  const auto no_prefetch = [](int64_t) {
  };
  TileRegisters registers;
  for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
    const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
    const bool adds = accumulate || k0 > 0;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t m = M * i / tiles;
      const int rows = int(M * (i + 1) / tiles - m);
      LeftOperand<bf16_pair> a{A.p + m * A.stride_m + k0 * A.stride_k, A.stride_m, A.stride_k};
      if (A.stride_k != 1) {
        transpose_left(rows, depth, a, rows_of_A, DEPTH);
        a = {rows_of_A, DEPTH, 1};
      }
      for (int64_t n = 0; n < N; n += 2 * REGISTER_SIDE) {
        const Matrix<const bf16_pair> b{B.p + k0 * B.ld + n, B.ld};
        const Matrix<float> c{C.p + m * C.ld + n, C.ld};
        if (n + REGISTER_SIDE < N)
          tile_product<true>(registers, rows, depth, a.p, a.stride_m, b, c, adds, no_prefetch);
        else
          tile_product<false>(registers, rows, depth, a.p, a.stride_m, b, c, adds, no_prefetch);
      }
    }
  }
}
#endif

// C (M, N) (+)= A (M, K) B (K, N). K counts elements. N and the row lengths of B and C must be
// whole vectors. Where C has a narrower type than the sums, K is at most DEPTH: each sum is then
// complete, and rounded once.
template <class Element, class StoredB = Element, class StoredC = RealOf<Element>>
void product(int64_t M, int64_t K, int64_t N, LeftOperand<Element> A, Matrix<const StoredB> B,
             Matrix<StoredC> C, bool accumulate) {
  using Real = RealOf<Element>;
  constexpr int64_t DEPTH = 128;  // rows of B, whose panel stays in L1 while A's rows pass
  // Where a panel has two vectors, no product has three.
  constexpr int THREE = TILE_VECTORS < 3 ? TILE_VECTORS : 3;
  const int64_t tiles = (M + TILE_ROWS<Element> - 1) / TILE_ROWS<Element>;

  // A sum of no terms is zero.
  for (int64_t m = 0; K == 0 && !accumulate && m < M; ++m)
    memset(C.p + m * C.ld, 0, N * sizeof(StoredC));

  if constexpr (IN_TILE_REGISTERS<Element>) return product_in_tiles(M, K, N, A, B, C, accumulate);

  for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
    const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
    const bool adds = accumulate || k0 > 0;
    for (int64_t n = 0; n < N; n += PANEL_COLUMNS<Real>) {
      const int64_t vectors =
          (N - n < PANEL_COLUMNS<Real> ? N - n : PANEL_COLUMNS<Real>) / LANES<Real>;
      // Tiles of equal height. Together they prefetch the panel that comes next, to the right or,
      // after the last one, at the beginning of the next DEPTH rows: each tile one vector's column.
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t m = M * i / tiles;
        const int rows = int(M * (i + 1) / tiles - m);
        const LeftOperand<Element> a{A.p + m * A.stride_m + k0 * A.stride_k, A.stride_m,
                                     A.stride_k};
        const Matrix<const StoredB> b{B.p + k0 * B.ld + n, B.ld};
        const Matrix<StoredC> c{C.p + m * C.ld + n, C.ld};
        switch (vectors) {
          case 1:
            tile_rows<1, Split::columns>(rows, depth, a, b, c, adds);
            break;
          case 2:
            tile_rows<2, Split::columns>(rows, depth, a, b, c, adds);
            break;
          case 3:
            tile_rows<THREE, Split::columns>(rows, depth, a, b, c, adds);
            break;
          default: {
            const int64_t to_next_panel =
                n + PANEL_COLUMNS<Real> < N ? PANEL_COLUMNS<Real> : depth * B.ld - n;
            const Prefetch<StoredB> prefetch{b.p + to_next_panel + i % TILE_VECTORS * LANES<Real>,
                                             B.ld};
            tile_rows<TILE_VECTORS, Split::columns, true>(rows, depth, a, b, c, adds, prefetch);
          }
        }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
