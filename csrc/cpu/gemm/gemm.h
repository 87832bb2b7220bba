// The matrix product for few rows and weights that are packed once and used at every time step. One
// thread computes a range of columns; nothing here knows of other threads, and a result does not
// depend on how the columns are split.
//
// What limits it: the multiply-add units. Measured on 2 cores of a Zen 5 EPYC with AVX-512, 70 or
// 20 rows times 1300 x 2600: 510 GFLOP/s, where MKL's packed GEMM does 125 and 80, and its GEMM of
// 2048^3, which takes MKL's AVX2 path on that processor, 188.
#pragma once
#include "cpu/gemm/chunk_in_tiles.h"
#include "cpu/gemm/pack.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// A chunk: the rows of A that stay in the L2 cache while the panels of B pass. For tile registers
// it has twice as many rows, because a pair has half the size of two floats and is multiplied
// faster: B is then read less often.
template <class Element>
constexpr int64_t CHUNK_ROWS = IN_TILE_REGISTERS<Element> ? MOST_ROWS_IN_TILES : 144;

// The distance of the rows of a left operand that is copied. For tile registers it is an odd number
// of cache lines, else the 16 rows of a tile could share few sets of the L1 cache.
template <class Element>
HD int64_t left_stride(int64_t K) {
  const int64_t elements = depth<Element>(K);
  if (!IN_TILE_REGISTERS<Element>) return elements;
  const int64_t lines = (elements + LANES<Element> - 1) / LANES<Element>;
  return (lines | 1) * LANES<Element>;
}

// Returns whether rows of K numbers, ld apart, are read where they are.
template <class Element, class Stored>
HD bool stays_in_place(int64_t K, int64_t ld) {
  if (std::is_same<Element, Stored>::value) return true;
  const bool shares_sets = IN_TILE_REGISTERS<Element> && ld * int64_t(sizeof(Stored)) % 2048 == 0;
  return std::is_same<Stored, bfloat16>::value && K % 2 == 0 && ld % 2 == 0 && !shares_sets;
}

// The elements of workspace that `gemm` needs for a left operand that it copies.
template <class Element, class Stored>
HD int64_t left_copy_size(int64_t K) {
  return std::is_same<Element, Stored>::value ? 0 : CHUNK_ROWS<Element> * left_stride<Element>(K);
}

// Returns M <= CHUNK_ROWS rows of a left operand (M, K) as elements of the product: the numbers
// themselves, bfloat16 numbers that are pairs already, or else a copy in `scratch`, left_copy_size
// elements.
template <class Element, class Stored>
LeftOperand<Element> left_operand(int64_t M, int64_t K, Matrix<const Stored> A, Element* scratch) {
  if constexpr (std::is_same<Element, Stored>::value) {
    return {A.p, A.ld, 1};
  } else {
    if (stays_in_place<Element, Stored>(K, A.ld))
      return {reinterpret_cast<const Element*>(A.p), A.ld / 2, 1};
    const int64_t elements = depth<Element>(K), stride = left_stride<Element>(K);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < elements; k += LANES<Element>)
        load_along<Element>(A.p + m * A.ld + k * NUMBERS<Element>, K - k * NUMBERS<Element>)
            .store(scratch + m * stride + k, elements - k);
    return {scratch, stride, 1};
  }
}

// C (M, columns) (+)= A times packed columns (see `pack`), + bias (columns,) if not null. M is at
// most CHUNK_ROWS, K counts elements, and `next` is that of `gemm`.
template <class Element>
void gemm_chunk(int64_t M, int64_t K, int64_t columns, LeftOperand<Element> A,
                const Element* packed, Output<RealOf<Element>> C, const RealOf<Element>* bias,
                const Element* next) {
  // The depth of a panel, which stays in the L2 cache while the rows pass.
  constexpr int64_t DEPTH = (IN_TILE_REGISTERS<Element> ? 2048 : 3072) / sizeof(Element);
  // The tiles have equal heights: they are not full ones and a rest.
  const int64_t tiles = (M + TILE_ROWS<Element> - 1) / TILE_ROWS<Element>;
  TileRegisters registers;
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL_COLUMNS<Element>) {
    const int64_t width =
        columns - n0 < PANEL_COLUMNS<Element> ? columns - n0 : PANEL_COLUMNS<Element>;
    const int64_t padded = round_up<Element>(width);

    // A sum of no terms is zero.
    for (int64_t m = 0; K == 0 && !C.accumulate && m < M; ++m)
      memset(C.p + m * C.ld + n0, 0, width * sizeof(RealOf<Element>));

    // The bias is the initial value of C; the tiles then add to it.
    for (int64_t m = 0; bias && m < M; ++m)
      memcpy(C.p + m * C.ld + n0, bias + n0, width * sizeof(RealOf<Element>));

    // All tiles of the chunk use one part of the panel before the next part is read.
    for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
      const int64_t deep = K - k0 < DEPTH ? K - k0 : DEPTH;

      // Together, they prefetch what is read next, else the first tile waits for the L3 cache: the
      // next part of this panel, the first part of the next panel, or `next`. Where there is one
      // panel only, it has just been packed and is in the L2 cache, and each of its parts
      // prefetches a part of `next`.
      const bool alone = columns <= PANEL_COLUMNS<Element>;
      const Element* ahead = nullptr;
      if (k0 + DEPTH < K && !alone)
        ahead = packed + K * n0 + (k0 + DEPTH) * padded;
      else if (n0 + PANEL_COLUMNS<Element> < columns)
        ahead = packed + K * (n0 + PANEL_COLUMNS<Element>);
      else if (next)
        ahead = next + (alone ? k0 * PANEL_COLUMNS<Element> : 0);

      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t m = M * i / tiles, m_end = M * (i + 1) / tiles;
        Prefetch<Element> prefetch;
        if (ahead)
          prefetch = {ahead + deep * i / tiles * PANEL_COLUMNS<Element>,
                      (PANEL_COLUMNS<Element> + tiles - 1) / tiles};
        const Output<RealOf<Element>> c{C.p + m * C.ld + n0, C.ld, C.whole_vectors,
                                        C.accumulate || bias || k0 > 0};
        any_tile<Element, Split::columns>(
            registers, int(m_end - m), width, deep,
            {A.p + m * A.stride_m + k0 * A.stride_k, A.stride_m, A.stride_k},
            packed + K * n0 + k0 * padded, c, prefetch);
      }
    }
  }
}

// The product of a chunk of A with packed columns, + bias, without C: calls f(first column, width,
// sums, ld) with blocks of its columns, of which the rows are `ld` apart. K counts elements, and
// `next` is that of `gemm`.
//
// The rows of a block are a few cache lines, far from each other in C: memory takes two lines at
// twice the rate of one. For tile registers, 16 more columns keep the rows from sharing few sets of
// the caches.
template <class Element, class Function>
void gemm_in_blocks(int64_t rows, int64_t K, int64_t columns, LeftOperand<Element> A,
                    const Element* packed, const RealOf<Element>* bias, const Element* next,
                    Function f) {
  constexpr int64_t WIDTH =
      IN_TILE_REGISTERS<Element> ? 4 * PANEL_COLUMNS<Element> : PANEL_COLUMNS<Element>;
  constexpr int64_t LD = IN_TILE_REGISTERS<Element> ? WIDTH + 16 : WIDTH;
  alignas(64) RealOf<Element> sums[CHUNK_ROWS<Element> * LD];
  for (int64_t n = 0; n < columns; n += WIDTH) {
    const int64_t width = columns - n < WIDTH ? columns - n : WIDTH;
    const Element* const panels = packed + K * n;
    const bool last = n + WIDTH >= columns;
    const Element* const ahead = last ? next : panels + K * WIDTH;
    if constexpr (IN_TILE_REGISTERS<Element>)
      chunk_in_tiles(rows, K, width, A, panels, {sums, LD}, bias ? bias + n : nullptr, ahead);
    else
      gemm_chunk<Element>(rows, K, width, A, panels, {sums, LD, true, false},
                          bias ? bias + n : nullptr, ahead);
    f(n, width, (const RealOf<Element>*)sums, LD);
  }
}

// Calls f(first row, rows, left operand) with the rows of A (M, K) in chunks of equal size.
// scratch: left_copy_size elements.
template <class Element, class Stored, class Function>
HD void each_chunk(int64_t M, int64_t K, Matrix<const Stored> A, Element* scratch, Function f) {
  const int64_t chunks = (M + CHUNK_ROWS<Element> - 1) / CHUNK_ROWS<Element>;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t m = M * i / chunks, rows = M * (i + 1) / chunks - m;
    f(m, rows, left_operand(rows, K, Matrix<const Stored>{A.p + m * A.ld, A.ld}, scratch));
  }
}

// C (M, columns) (+)= A (M, K) times packed columns (see `pack`), + bias (columns,) if not null.
//
// next: what is read after the last panel, or null: up to depth(K) x PANEL_COLUMNS elements from
// there on are prefetched. Only for at most CHUNK_ROWS rows. scratch: left_copy_size elements.
template <class Element, class Stored>
void gemm(int64_t M, int64_t K, int64_t columns, Matrix<const Stored> A, const Element* packed,
          Output<RealOf<Element>> C, Element* scratch, const RealOf<Element>* bias = nullptr,
          const Element* next = nullptr) {
  each_chunk(M, K, A, scratch, [&](int64_t m, int64_t rows, LeftOperand<Element> left) {
    gemm_chunk(rows, depth<Element>(K), columns, left, packed,
               {C.p + m * C.ld, C.ld, C.whole_vectors, C.accumulate}, bias, next);
  });
}
template <class Real>
void gemm(int64_t M, int64_t K, int64_t columns, Matrix<const Real> A, const Real* packed,
          Output<Real> C, const Real* bias = nullptr, const Real* next = nullptr) {
  gemm<Real, Real>(M, K, columns, A, packed, C, nullptr, bias, next);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
