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
  alignas(64) bf16_pair rows_of_A[MR<bf16_pair> * DEPTH];
  const int64_t tiles = (M + MR<bf16_pair> - 1) / MR<bf16_pair>;
  const auto no_prefetch = [](int64_t) {
  };
  TileRegisters registers;
  for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
    const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
    const bool acc = accumulate || k0 > 0;
    for (int64_t i = 0; i < tiles; ++i) {
      const int64_t m = M * i / tiles;
      const int rows = int(M * (i + 1) / tiles - m);
      LeftOperand<bf16_pair> a{A.p + m * A.sm + k0 * A.sk, A.sm, A.sk};
      if (A.sk != 1) {
        transpose_left(rows, depth, a, rows_of_A, DEPTH);
        a = {rows_of_A, DEPTH, 1};
      }
      for (int64_t n = 0; n < N; n += 2 * TILE) {
        const Matrix<const bf16_pair> b{B.p + k0 * B.ld + n, B.ld};
        const Matrix<float> c{C.p + m * C.ld + n, C.ld};
        if (n + TILE < N)
          tile_product<true>(registers, rows, depth, a.p, a.sm, b, c, acc, no_prefetch);
        else
          tile_product<false>(registers, rows, depth, a.p, a.sm, b, c, acc, no_prefetch);
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
  constexpr int64_t DEPTH = 128;          // rows of B, whose panel stays in L1 while A's rows pass
  constexpr int THREE = NV < 3 ? NV : 3;  // a panel of NV = 2 vectors has no third case
  const int64_t tiles = (M + MR<Element> - 1) / MR<Element>;

  // A sum of no terms is zero.
  for (int64_t m = 0; K == 0 && !accumulate && m < M; ++m)
    memset(C.p + m * C.ld, 0, N * sizeof(StoredC));

  if constexpr (IN_TILE_REGISTERS<Element>) return product_in_tiles(M, K, N, A, B, C, accumulate);

  for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
    const int64_t depth = K - k0 < DEPTH ? K - k0 : DEPTH;
    const bool acc = accumulate || k0 > 0;
    for (int64_t n = 0; n < N; n += PANEL<Real>) {
      const int64_t vectors = (N - n < PANEL<Real> ? N - n : PANEL<Real>) / LANES<Real>;
      // Tiles of equal height. Together they prefetch the panel that comes next, to the right or,
      // after the last one, at the beginning of the next DEPTH rows: each tile one vector's column.
      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t m = M * i / tiles;
        const int rows = int(M * (i + 1) / tiles - m);
        const LeftOperand<Element> a{A.p + m * A.sm + k0 * A.sk, A.sm, A.sk};
        const Matrix<const StoredB> b{B.p + k0 * B.ld + n, B.ld};
        const Matrix<StoredC> c{C.p + m * C.ld + n, C.ld};
        switch (vectors) {
          case 1:
            tile_rows<1, Split::columns>(rows, depth, a, b, c, acc);
            break;
          case 2:
            tile_rows<2, Split::columns>(rows, depth, a, b, c, acc);
            break;
          case 3:
            tile_rows<THREE, Split::columns>(rows, depth, a, b, c, acc);
            break;
          default: {
            const int64_t to_next_panel = n + PANEL<Real> < N ? PANEL<Real> : depth * B.ld - n;
            const Prefetch<StoredB> prefetch{b.p + to_next_panel + i % NV * LANES<Real>, B.ld};
            tile_rows<NV, Split::columns, true>(rows, depth, a, b, c, acc, prefetch);
          }
        }
      }
    }
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
