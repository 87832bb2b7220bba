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

// The rows of A that stay in the L2 cache while the panels of B pass: twice as many where their
// elements have half the size and are multiplied faster, so that B is read less often.
template <class E>
constexpr int64_t CHUNK = IN_TILE_REGISTERS<E> ? MOST_ROWS_IN_TILES : 144;

// The distance of the rows of a left operand that is copied. For tile registers it is an odd number
// of cache lines, else the 16 rows of a tile could share few sets of the L1 cache.
template <class E>
HD int64_t left_stride(int64_t K) {
  const int64_t elements = depth<E>(K);
  if (!IN_TILE_REGISTERS<E>) return elements;
  const int64_t lines = (elements + LANES<E> - 1) / LANES<E>;
  return (lines | 1) * LANES<E>;
}

// Returns whether rows of K numbers, ld apart, are read where they are.
template <class E, class S>
HD bool stays_in_place(int64_t K, int64_t ld) {
  if (std::is_same<E, S>::value) return true;
  const bool shares_sets = IN_TILE_REGISTERS<E> && ld * int64_t(sizeof(S)) % 2048 == 0;
  return std::is_same<S, bfloat16>::value && K % 2 == 0 && ld % 2 == 0 && !shares_sets;
}

// The elements of workspace that `gemm` needs for a left operand that it copies.
template <class E, class S>
HD int64_t left_size(int64_t K) {
  return std::is_same<E, S>::value ? 0 : CHUNK<E> * left_stride<E>(K);
}

// Returns M <= CHUNK rows of a left operand (M, K) as elements E: the numbers themselves, bfloat16
// numbers that are pairs already, or else a copy in `scratch`, left_size elements.
template <class E, class S>
LeftOperand<E> left_operand(int64_t M, int64_t K, Matrix<const S> A, E* scratch) {
  if constexpr (std::is_same<E, S>::value) {
    return {A.p, A.ld, 1};
  } else {
    if (stays_in_place<E, S>(K, A.ld)) return {reinterpret_cast<const E*>(A.p), A.ld / 2, 1};
    const int64_t elements = depth<E>(K), stride = left_stride<E>(K);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t k = 0; k < elements; k += LANES<E>)
        load_along<E>(A.p + m * A.ld + k * NUMBERS<E>, K - k * NUMBERS<E>)
            .store(scratch + m * stride + k, elements - k);
    return {scratch, stride, 1};
  }
}

// C (M, columns) (+)= A times packed columns (see `pack`), + bias (columns,) if not null. M is at
// most CHUNK, K counts elements, and `next` is that of `gemm`.
template <class E>
void gemm_chunk(int64_t M, int64_t K, int64_t columns, LeftOperand<E> A, const E* packed,
                Output<RealOf<E>> C, const RealOf<E>* bias, const E* next) {
  // The depth of a panel, which stays in the L2 cache while the rows pass.
  constexpr int64_t DEPTH = (IN_TILE_REGISTERS<E> ? 2048 : 3072) / sizeof(E);
  const int64_t tiles = (M + MR<E> - 1) / MR<E>;  // of equal height, not full ones and a rest
  TileRegisters registers;
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL<E>) {
    const int64_t width = columns - n0 < PANEL<E> ? columns - n0 : PANEL<E>;
    const int64_t padded = round_up<E>(width);

    // A sum of no terms is zero.
    for (int64_t m = 0; K == 0 && !C.accumulate && m < M; ++m)
      memset(C.p + m * C.ld + n0, 0, width * sizeof(RealOf<E>));

    // The bias is the initial value of C; the tiles then add to it.
    for (int64_t m = 0; bias && m < M; ++m)
      memcpy(C.p + m * C.ld + n0, bias + n0, width * sizeof(RealOf<E>));

    // All tiles of the chunk use one part of the panel before the next part is read.
    for (int64_t k0 = 0; k0 < K; k0 += DEPTH) {
      const int64_t deep = K - k0 < DEPTH ? K - k0 : DEPTH;

      // Together, they prefetch what is read next, else the first tile waits for the L3 cache: the
      // next part of this panel, the first part of the next panel, or `next`. A panel alone has
      // just been packed and is in the L2 cache; each of its parts prefetches a part of `next`.
      const bool alone = columns <= PANEL<E>;
      const E* ahead = nullptr;
      if (k0 + DEPTH < K && !alone)
        ahead = packed + K * n0 + (k0 + DEPTH) * padded;
      else if (n0 + PANEL<E> < columns)
        ahead = packed + K * (n0 + PANEL<E>);
      else if (next)
        ahead = next + (alone ? k0 * PANEL<E> : 0);

      for (int64_t i = 0; i < tiles; ++i) {
        const int64_t m = M * i / tiles, m_end = M * (i + 1) / tiles;
        Prefetch<E> prefetch;
        if (ahead) prefetch = {ahead + deep * i / tiles * PANEL<E>, (PANEL<E> + tiles - 1) / tiles};
        const Output<RealOf<E>> c{C.p + m * C.ld + n0, C.ld, C.whole_vectors,
                                  C.accumulate || bias || k0 > 0};
        any_tile<E, Split::columns>(registers, int(m_end - m), width, deep,
                                    {A.p + m * A.sm + k0 * A.sk, A.sm, A.sk},
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
template <class E, class F>
void gemm_in_blocks(int64_t rows, int64_t K, int64_t columns, LeftOperand<E> A, const E* packed,
                    const RealOf<E>* bias, const E* next, F f) {
  constexpr int64_t WIDTH = IN_TILE_REGISTERS<E> ? 4 * PANEL<E> : PANEL<E>;
  constexpr int64_t LD = IN_TILE_REGISTERS<E> ? WIDTH + 16 : WIDTH;
  alignas(64) RealOf<E> sums[CHUNK<E> * LD];
  for (int64_t n = 0; n < columns; n += WIDTH) {
    const int64_t width = columns - n < WIDTH ? columns - n : WIDTH;
    const E* const panels = packed + K * n;
    const bool last = n + WIDTH >= columns;
    const E* const ahead = last ? next : panels + K * WIDTH;
    if constexpr (IN_TILE_REGISTERS<E>)
      chunk_in_tiles(rows, K, width, A, panels, {sums, LD}, bias ? bias + n : nullptr, ahead);
    else
      gemm_chunk<E>(rows, K, width, A, panels, {sums, LD, true, false}, bias ? bias + n : nullptr,
                    ahead);
    f(n, width, (const RealOf<E>*)sums, LD);
  }
}

// Calls f(first row, rows, left operand) with the rows of A (M, K) in chunks of equal size.
// scratch: left_size elements.
template <class E, class S, class F>
HD void each_chunk(int64_t M, int64_t K, Matrix<const S> A, E* scratch, F f) {
  const int64_t chunks = (M + CHUNK<E> - 1) / CHUNK<E>;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t m = M * i / chunks, rows = M * (i + 1) / chunks - m;
    f(m, rows, left_operand(rows, K, Matrix<const S>{A.p + m * A.ld, A.ld}, scratch));
  }
}

// C (M, columns) (+)= A (M, K) times packed columns (see `pack`), + bias (columns,) if not null.
//
// next: what is read after the last panel, or null: up to depth(K) x PANEL elements from there on
// are prefetched. Only for at most CHUNK rows. scratch: left_size elements.
template <class E, class S>
void gemm(int64_t M, int64_t K, int64_t columns, Matrix<const S> A, const E* packed,
          Output<RealOf<E>> C, E* scratch, const RealOf<E>* bias = nullptr,
          const E* next = nullptr) {
  each_chunk(M, K, A, scratch, [&](int64_t m, int64_t rows, LeftOperand<E> left) {
    gemm_chunk(rows, depth<E>(K), columns, left, packed,
               {C.p + m * C.ld, C.ld, C.whole_vectors, C.accumulate}, bias, next);
  });
}
template <class T>
void gemm(int64_t M, int64_t K, int64_t columns, Matrix<const T> A, const T* packed, Output<T> C,
          const T* bias = nullptr, const T* next = nullptr) {
  gemm<T, T>(M, K, columns, A, packed, C, nullptr, bias, next);
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
