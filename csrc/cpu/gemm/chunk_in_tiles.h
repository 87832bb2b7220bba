// The product of a chunk of rows with packed columns in Intel's tile registers, for gemm.h.
//
// What limits it: loads from the L2 cache, which take longer than the products. Therefore the depth
// is cut into slabs: a slab of a panel stays in the L1 cache while the tiles of the chunk pass, and
// the tiles' own slabs come from the L2 cache. The sums are in C between two slabs. Measured on a
// core of an Intel Xeon with an L2 cache of 2 MB: products of full registers alone reach 3,750
// GFLOP/s, with loads from the L1 cache 3,700, with loads from the L2 cache 2,700. With slabs a
// chunk of 288 rows reaches 2,400 for a depth of 256 numbers, and 1,700 for 2,048 numbers.
#pragma once
#include "cpu/gemm/tile.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

constexpr int64_t MOST_ROWS_IN_TILES = 288;

#if defined(__AMX_BF16__)
// C (M, columns) (+)= A (M, K) times packed columns, for a chunk of at most MOST_ROWS_IN_TILES rows
// and K > 0 pairs. C may be written up to whole vectors.
class ChunkInTiles {
 public:
  using Element = bf16_pair;

  ChunkInTiles(int64_t M, int64_t K, int64_t columns, LeftOperand<Element> A, const Element* packed,
               Matrix<float> C, bool accumulate)
      : M(M),
        K(K),
        columns(columns),
        whole(K / REGISTER_SIDE * REGISTER_SIDE),
        tiles(int((M + TILE_ROWS<Element> - 1) / TILE_ROWS<Element>)),
        A(A),
        packed(packed),
        C(C),
        accumulate(accumulate) {
    // Tiles of equal height, up to one row. All of them can use the registers of the highest.
    for (int i = 0; i <= tiles; ++i)
      first[i] = M * i / tiles;
    rows = registers.configure(int((M + tiles - 1) / tiles));
    for (int64_t m = 0; whole < K && m < M; ++m)
      Vec<Element>::load(A.p + m * A.stride_m + whole, K - whole)
          .store(rest_of_A + m * REGISTER_SIDE);
  }

  // `next` is that of `gemm`.
  void multiply(const Element* next) {
    // The depth is cut into parts, so that a part of A stays in the L2 cache while all panels pass.
    const int64_t part = steps_for(K, (M * K * int64_t(sizeof(Element)) + L2_BYTES - 1) / L2_BYTES);
    for (int64_t k = 0; k < K; k += part) {
      const int64_t end = k + part < K ? k + part : K;
      for (int64_t n = 0; n < columns; n += PANEL_COLUMNS<Element>) {
        const Element* ahead = next;
        if (n + PANEL_COLUMNS<Element> < columns)
          ahead = panel_at(n + PANEL_COLUMNS<Element>, k);
        else if (end < K)
          ahead = panel_at(0, end);
        multiply_panel(n, k, end, ahead, next);
      }
    }
  }

 private:
  static constexpr int64_t SLAB = 128, L2_BYTES = int64_t(640) << 10;

  const int64_t M, K, columns;
  const int64_t whole;  // the depth of the products that fill the registers
  const int tiles;
  const LeftOperand<Element> A;
  const Element* const packed;
  const Matrix<float> C;
  const bool accumulate;
  TileRegisters registers;
  int rows;                                                    // of a register of A
  int64_t first[MOST_ROWS_IN_TILES / TILE_ROWS<Element> + 1];  // the first rows of the tiles
  // The last pairs of the rows of A (M, REGISTER_SIDE), and the last rows of a panel
  // (REGISTER_SIDE, the panel's columns), filled up with zeros.
  alignas(64) Element rest_of_A[MOST_ROWS_IN_TILES * REGISTER_SIDE];
  alignas(64) Element rest_of_panel[REGISTER_SIDE * PANEL_COLUMNS<Element>];

  // Returns a multiple of REGISTER_SIDE that covers `depth` in `parts` parts.
  static int64_t steps_for(int64_t depth, int64_t parts) {
    return ((depth + parts - 1) / parts + REGISTER_SIDE - 1) / REGISTER_SIDE * REGISTER_SIDE;
  }

  int64_t width_at(int64_t n) const {
    return columns - n < PANEL_COLUMNS<Element> ? columns - n : PANEL_COLUMNS<Element>;
  }
  const Element* panel_at(int64_t n, int64_t k) const {
    return packed + K * n + k * round_up<Element>(width_at(n));
  }

  // C's columns from n on, from the products of depth [begin, end). `ahead` is read next.
  void multiply_panel(int64_t n, int64_t begin, int64_t end, const Element* ahead,
                      const Element* next) {
    const int64_t padded = round_up<Element>(width_at(n));
    if (end == K && whole < K) {
      memset(rest_of_panel, 0, sizeof rest_of_panel);
      memcpy(rest_of_panel, panel_at(n, whole), (K - whole) * padded * sizeof(Element));
    }
    const int64_t slab = steps_for(end - begin, (end - begin + SLAB - 1) / SLAB);
    for (int64_t k = begin; k < end; k += slab) {
      const int64_t k_end = k + slab < end ? k + slab : end;
      // Where there is one panel only, it has just been packed and is in the L2 cache, and each
      // slab fetches a part of `next`.
      const Element* fetched = k_end < end ? panel_at(n, k_end) : ahead;
      if (columns <= PANEL_COLUMNS<Element>)
        fetched = next ? next + k * PANEL_COLUMNS<Element> : nullptr;
      if (padded > REGISTER_SIDE)
        multiply_slab<true>(n, k, k_end, fetched);
      else
        multiply_slab<false>(n, k, k_end, fetched);
    }
  }

  // The same of one slab, whose panel is padded to 2 * REGISTER_SIDE columns if RIGHT, else to
  // REGISTER_SIDE.
  template <bool RIGHT>
  void multiply_slab(int64_t n, int64_t k, int64_t k_end, const Element* ahead) {
    constexpr int64_t WIDTH = RIGHT ? 2 * REGISTER_SIDE : REGISTER_SIDE;
    const int64_t steps = ((k_end < whole ? k_end : whole) - k) / REGISTER_SIDE;
    const bool rest = k_end > whole;
    const Element* const panel = panel_at(n, k);
    // Each tile fetches an equal part of what is read next.
    const int64_t lines = ahead ? ((steps + rest) * WIDTH + tiles - 1) / tiles : 0;
    for (int i = 0; i < tiles; ++i) {
      for (int64_t j = i * lines; j < (i + 1) * lines; ++j)
        __builtin_prefetch(ahead + j * REGISTER_SIDE, 0, 2);
      const int64_t m = first[i], lower = first[i + 1] - m - rows;
      const Element* const a = A.p + m * A.stride_m + k;
      float* const c = C.p + m * C.ld + n;
      begin_sums<RIGHT>(c, C.ld, lower, accumulate || k > 0);
      for (int64_t s = 0; s < steps; ++s)
        multiply_tiles<RIGHT>(a + s * REGISTER_SIDE, a + lower * A.stride_m + s * REGISTER_SIDE,
                              A.stride_m, panel + s * REGISTER_SIDE * WIDTH, WIDTH);
      if (rest) {
        const Element* const rest_of_a = rest_of_A + m * REGISTER_SIDE;
        multiply_tiles<RIGHT>(rest_of_a, rest_of_a + lower * REGISTER_SIDE, REGISTER_SIDE,
                              rest_of_panel, WIDTH);
      }
      store_tiles<RIGHT>(c, C.ld, lower);
      asm volatile("" ::: "memory");  // GCC does not know what stores of tiles write
    }
  }
};

// C (M, columns) = A (M, K) times packed columns, + bias (columns,) if not null. M is at most
// MOST_ROWS_IN_TILES and `next` that of `gemm`. C may be written up to whole vectors.
inline void chunk_in_tiles(int64_t M, int64_t K, int64_t columns, LeftOperand<bf16_pair> A,
                           const bf16_pair* packed, Matrix<float> C, const float* bias,
                           const bf16_pair* next) {
  // A sum of no terms is zero. The bias is the initial value of C, to which the tiles add.
  for (int64_t m = 0; m < M && (bias || K == 0); ++m)
    if (bias)
      memcpy(C.p + m * C.ld, bias, columns * sizeof(float));
    else
      memset(C.p + m * C.ld, 0, columns * sizeof(float));
  if (K > 0) ChunkInTiles(M, K, columns, A, packed, C, bias != nullptr).multiply(next);
}
#endif

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
