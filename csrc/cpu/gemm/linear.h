// y = x W^T + b and its gradients on the products of this folder, whose rate on some processors is
// twice that of torch's library.
//
// What limits it: for many rows the multiply-add units, for few rows reading W. Hence three ways of
// computing y, by the number of rows M:
//   - dot_products.h, at most MAX_DOT_ROWS rows: W is read where it is.
//   - the transposed product W x^T, for one to four vectors' worth of rows: W is read where it is,
//     too, and x^T is packed in one panel.
//   - gemm.h, all others. For at most CHUNK rows each panel of W is used as soon as it is packed,
//     while it is in the L2 cache, and the next panel is prefetched meanwhile.
#pragma once
#include "cpu/buffer.h"
#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/gemm.h"
#include "cpu/gemm/transposed.h"
#include "cpu/gemm/unpacked.h"
#include "cpu/simd/row_arithmetic.h"
#include "cpu/team.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Columns [begin, end) of y: packs these rows of W and multiplies. `next` is that of `gemm`.
template <class T>
void linear_columns(const cpu::Linear<T>& l, int64_t begin, int64_t end, T* packed,
                    const T* next = nullptr) {
  pack(l.W + begin * l.K, 1, l.K, l.K, end - begin, packed);
  gemm<T>(l.M, l.K, end - begin, {l.x, l.K}, packed, {l.y + begin, l.N, false, false},
          l.b ? l.b + begin : nullptr, next);
}

// Returns the number of last rows of x that the transposed product leaves to dot products, because
// they are few and do not fill a vector.
template <class T>
int64_t rows_left_to_dot_products(int64_t M, int64_t K) {
  const int64_t rest = M % LANES<T>;
  return K % LANES<T> == 0 && rest <= MAX_DOT_ROWS && rest < M ? rest : 0;
}

// Returns whether the transposed product is faster: it needs whole vectors of rows, or nearly.
// Measured on 2 cores of a Zen 5 EPYC with AVX-512, weights of 4 MB: 1.2 to 1.3 times as fast as
// the packed product for 16, 32 or 48 rows, 1.1 times for 20, 40 or 64.
template <class T>
bool is_transposed(int64_t M, int64_t K) {
  constexpr int L = LANES<T>;
  return M <= PANEL<T> && (M % L == 0 || M % L >= L - L / 4 || rows_left_to_dot_products<T>(M, K));
}

// Stores a block (rows, M) of W x^T, with rows `padded` apart, as y (M, rows) + b (rows,).
template <class T>
HD void store_transposed(const T* block, int64_t rows, int64_t M, int64_t padded, const T* b, T* y,
                         int64_t ldy) {
  constexpr int L = LANES<T>;
  for (int64_t n = 0; n < rows; n += L)
    for (int64_t m = 0; m < M; m += L) {
      const int64_t width = rows - n < L ? rows - n : L;
      Vec<T> square[L];
      for (int i = 0; i < L; ++i)
        square[i] = Vec<T>::load(block + (n + (n + i < rows ? i : 0)) * padded + m);
      transpose(square);
      const Vec<T> bias = b ? Vec<T>::load(b + n, width) : Vec<T>(T(0));
      for (int i = 0; i < L && m + i < M; ++i)
        (square[i] + bias).store(y + (m + i) * ldy + n, width);
    }
}

// Columns [begin, end) of y by the transposed product: rows of W, where they are, times the panel
// of packed x^T (K, M).
template <class T>
void linear_transposed(const cpu::Linear<T>& l, const T* panel, int64_t begin, int64_t end) {
  constexpr int64_t ROWS = 3 * LANES<T>;  // rows of W at a time, which are whole vectors of y
  const int64_t rest = rows_left_to_dot_products<T>(l.M, l.K), M = l.M - rest;
  const int64_t padded = round_up<T>(M);
  T block[ROWS * PANEL<T>];  // (rows, padded)
  for (int64_t n0 = begin; n0 < end; n0 += ROWS) {
    // Each tile of MR rows of W prefetches the MR rows that follow.
    const int64_t rows = end - n0 < ROWS ? end - n0 : ROWS;
    for (int64_t n = 0; n < rows; n += MR) {
      const T* W = l.W + (n0 + n) * l.K;
      any_tile<T, Split::rows, true>(int(rows - n < MR ? rows - n : MR), padded, l.K, {W, l.K, 1},
                                     panel, {block + n * padded, padded, true, false},
                                     {W + MR * l.K, MR});
    }
    store_transposed((const T*)block, rows, M, padded, l.b ? l.b + n0 : nullptr, l.y + n0, l.N);
    if (rest)
      product_of_rows<T>(rest, l.K, rows, {l.x + M * l.K, l.K}, {l.W + n0 * l.K, l.K},
                         l.b ? l.b + n0 : nullptr, {l.y + M * l.N + n0, l.N});
  }
}

template <class T>
void linear(const cpu::Linear<T>& l, cpu::Parallel run, int threads) {
  const bool few = l.M <= CHUNK, dots = l.M <= MAX_DOT_ROWS && l.K % LANES<T> == 0;

  if (!dots && is_transposed<T>(l.M, l.K)) {
    const int64_t M = l.M - rows_left_to_dot_products<T>(l.M, l.K);
    Buffer<T> panel(packed_size<T>(l.K, M));
    pack(l.x, 1, l.K, l.K, M, (T*)panel);
    return parallel(run, threads, [&](int64_t begin, int64_t end) {
      const Range own = own_columns<T>(l.N, begin, end, threads);
      linear_transposed(l, (const T*)panel, own.begin, own.end);
    });
  }

  // The workspace: none for dot products, one panel for each part if there are few rows, else W.
  const int64_t panel = packed_size<T>(l.K, PANEL<T>);
  Buffer<T> packed(dots ? 0 : few ? panel * threads : packed_size<T>(l.K, l.N));
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<T>(l.N, begin, end, threads);
    if (dots)
      return product_of_rows<T>(l.M, l.K, own.size(), {l.x, l.K}, {l.W + own.begin * l.K, l.K},
                                l.b ? l.b + own.begin : nullptr, {l.y + own.begin, l.N});
    if (!few) return linear_columns(l, own.begin, own.end, packed + l.K * own.begin);
    for (int64_t n = own.begin; n < own.end; n += PANEL<T>) {
      const int64_t next = n + PANEL<T>, n_end = next < own.end ? next : own.end;
      linear_columns(l, n, n_end, packed + panel * begin, l.W + next * l.K);
    }
  });
}

// out[j] = the sum over the M rows of A[m * lda + j]. Blocks of 64 rows are summed by themselves
// first, so that a long sum stays precise. `block` is a workspace of `columns` elements.
template <class T>
void column_sums(int64_t M, const T* A, int64_t lda, int64_t columns, T* out, T* block) {
  memset(out, 0, columns * sizeof(T));
  for (int64_t m0 = 0; m0 < M; m0 += 64) {
    memset(block, 0, columns * sizeof(T));
    for (int64_t m = m0; m < M && m < m0 + 64; ++m)
      add_row(A + m * lda, block, columns, T(1));
    add_row((const T*)block, out, columns, T(1));
  }
}

template <class T>
void linear_backward(const cpu::Linear<T>& l, cpu::Parallel run, int threads) {
  const bool few = l.M <= CHUNK && l.K % LANES<T> == 0;
  const int64_t scratch_size = round_up<T>(TRANSPOSED_SCRATCH<T>);
  Buffer<T> packed(l.dx && !few ? packed_size<T>(l.N, l.K) : 0);
  Buffer<T> sums(l.db ? l.N : 0);
  Buffer<T> scratch(l.dW ? scratch_size * threads : 0);
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    // dx = dy W: each part computes columns of dx. For few rows W is not packed.
    if (l.dx) {
      const Range own = own_columns<T>(l.K, begin, end, threads);
      if (few) {
        product<T>(l.M, l.N, own.size(), {l.dy, l.N, 1}, {l.W + own.begin, l.K},
                   {l.dx + own.begin, l.K}, false);
      } else {
        T* columns = packed + l.N * own.begin;
        pack(l.W + own.begin, l.K, 1, l.N, own.size(), columns);
        gemm<T>(l.M, l.N, own.size(), {l.dy, l.N}, columns, {l.dx + own.begin, l.K, false, false});
      }
    }

    // dW = dy^T x: each part computes rows of dW.
    if (l.dW)
      gemm_transposed<T>(l.M, l.K, {l.N * begin / threads, l.N * end / threads}, {l.dy, l.N},
                         {l.x, l.K}, {l.dW, l.K}, false, scratch + scratch_size * begin);

    // db: the column sums of dy.
    if (l.db) {
      const Range own = own_columns<T>(l.N, begin, end, threads);
      column_sums(l.M, l.dy + own.begin, l.N, own.size(), l.db + own.begin, sums + own.begin);
    }
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
