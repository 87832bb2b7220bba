// The linear map on the product of gemm.h, whose rate on some processors is twice that of torch's library.
#pragma once
#include "dots.h"
#include "pointwise.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// y's columns [begin, end), which W's rows of that number make, packed.    next: gemm's
template <class T> void linear_columns(const cpu::Linear<T>& l, int64_t begin, int64_t end, T* packed, const T* next = nullptr) {
  pack(l.W + begin * l.K, 1, l.K, l.K, end - begin, packed);
  gemm(l.M, l.K, l.x, l.K, (const T*)packed, end - begin, l.y + begin, l.N, false, false, l.b ? l.b + begin : nullptr, next);
}

// The last rows of x, too few for a vector in `linear_transposed`, are left to dot products.
template <class T> int64_t transposed_rest(int64_t M, int64_t K) {
  const int64_t rest = M % LANES<T>;
  return K % LANES<T> == 0 && rest <= MOST_DOT_ROWS && rest < M ? rest : 0;
}

// Whether that is the faster way: it wants whole vectors, or nearly. Measured (2 cores of a Zen 5 EPYC, AVX-512, weights of 4 MB),
// beside the packed product: 1.2 to 1.3 times for 16, 32 or 48 rows, 1.1 for 20, 40 or 64.
template <class T> bool is_transposed(int64_t M, int64_t K) {
  constexpr int L = LANES<T>;
  return M <= PANEL<T> && (M % L == 0 || M % L >= L - L / 4 || transposed_rest<T>(M, K));
}

// y's columns [begin, end) by the transposed product: the rows of W, as they stand, times x^T, which is packed in one panel. Of
// the next rows of W, each step fetches a part.
template <class T> void linear_transposed(const cpu::Linear<T>& l, const T* panel, int64_t begin, int64_t end) {
  constexpr int L = LANES<T>;
  constexpr int64_t ROWS = 3 * L;  // of W at a time, of which y then gets whole vectors
  const int64_t rest = transposed_rest<T>(l.M, l.K), M = l.M - rest, padded = round_up<T>(M);
  T block[ROWS * PANEL<T>];
  for (int64_t n0 = begin; n0 < end; n0 += ROWS) {
    const int64_t rows = end - n0 < ROWS ? end - n0 : ROWS;
    for (int64_t n = 0; n < rows; n += MR) {
      const T* W = l.W + (n0 + n) * l.K;
      any_tile<T, true>(int(rows - n < MR ? rows - n : MR), padded, l.K, W, l.K, 1, panel, block + n * padded, padded, true, false,
                        {W + MR * l.K, MR});
    }
    for (int64_t n = 0; n < rows; n += L)
      for (int64_t m = 0; m < M; m += L) {
        const int64_t width = rows - n < L ? rows - n : L;
        Vec<T> square[L];
        for (int i = 0; i < L; ++i) square[i] = Vec<T>::load(block + (n + (n + i < rows ? i : 0)) * padded + m);
        transpose(square);
        const Vec<T> b = l.b ? Vec<T>::load(l.b + n0 + n, width) : Vec<T>(T(0));
        for (int i = 0; i < L && m + i < M; ++i) (square[i] + b).store(l.y + (m + i) * l.N + n0 + n, width);
      }
    if (rest)
      product_of_rows(rest, l.K, l.x + M * l.K, l.K, l.W + n0 * l.K, l.K, rows, l.b ? l.b + n0 : nullptr, l.y + M * l.N + n0, l.N);
  }
}

// Very few rows are multiplied with W as it stands, by dot products if its rows are whole vectors, or transposed; few with a
// panel of W as soon as it is packed, while it is in the second cache, and the next one is fetched.
template <class T> void linear(const cpu::Linear<T>& l, cpu::Parallel run, int threads) {
  const bool few = l.M <= CHUNK, dots = l.M <= MOST_DOT_ROWS && l.K % LANES<T> == 0;
  if (!dots && is_transposed<T>(l.M, l.K)) {
    const int64_t M = l.M - transposed_rest<T>(l.M, l.K);
    Buffer<T> panel(packed_size<T>(l.K, M));
    pack(l.x, 1, l.K, l.K, M, (T*)panel);
    return parallel(run, threads, [&](int64_t begin, int64_t end) {
      const Range own = own_columns<T>(l.N, begin, end, threads);
      linear_transposed(l, (const T*)panel, own.begin, own.end);
    });
  }
  const int64_t panel = packed_size<T>(l.K, PANEL<T>);
  Buffer<T> packed(dots ? 0 : few ? panel * threads : packed_size<T>(l.K, l.N));
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    const Range own = own_columns<T>(l.N, begin, end, threads);
    if (dots)
      return product_of_rows(l.M, l.K, l.x, l.K, l.W + own.begin * l.K, l.K, own.size(), l.b ? l.b + own.begin : nullptr, l.y + own.begin, l.N);
    if (!few) return linear_columns(l, own.begin, own.end, packed + l.K * own.begin);
    for (int64_t n = own.begin; n < own.end; n += PANEL<T>)
      linear_columns(l, n, n + PANEL<T> < own.end ? n + PANEL<T> : own.end, packed + panel * begin, l.W + (n + PANEL<T>) * l.K);
  });
}

// out[j] = the sum over M rows of A[m * lda + j], by blocks of rows, so that a long sum keeps its precision.
template <class T> void column_sums(int64_t M, const T* A, int64_t lda, int64_t columns, T* out, T* block) {
  memset(out, 0, columns * sizeof(T));
  for (int64_t m0 = 0; m0 < M; m0 += 64) {
    memset(block, 0, columns * sizeof(T));
    for (int64_t m = m0; m < M && m < m0 + 64; ++m) add_row(A + m * lda, block, columns, T(1));
    add_row((const T*)block, out, columns, T(1));
  }
}

template <class T> void linear_backward(const cpu::Linear<T>& l, cpu::Parallel run, int threads) {
  const bool few = l.M <= CHUNK && l.K % LANES<T> == 0;
  Buffer<T> packed(l.dx && !few ? packed_size<T>(l.N, l.K) : 0), sums(l.db ? l.N : 0);
  const int64_t scratch_size = round_up<T>(TRANSPOSED_SCRATCH<T>);
  Buffer<T> scratch(l.dW ? scratch_size * threads : 0);
  parallel(run, threads, [&](int64_t begin, int64_t end) {
    if (l.dx) {
      const Range own = own_columns<T>(l.K, begin, end, threads);
      if (few) {
        product(l.M, l.N, l.dy, l.N, 1, l.W + own.begin, l.K, own.size(), l.dx + own.begin, l.K, false);
      } else {
        T* columns = packed + l.N * own.begin;
        pack(l.W + own.begin, l.K, 1, l.N, own.size(), columns);
        gemm(l.M, l.N, l.dy, l.N, (const T*)columns, own.size(), l.dx + own.begin, l.K, false, false);
      }
    }
    if (l.dW)
      gemm_transposed(l.M, l.dy, l.N, l.N * begin / threads, l.N * end / threads, l.x, l.K, l.K, l.dW, l.K, false,
                      scratch + scratch_size * begin);
    if (l.db) {
      const Range own = own_columns<T>(l.N, begin, end, threads);
      column_sums(l.M, l.dy + own.begin, l.N, own.size(), l.db + own.begin, sums + own.begin);
    }
  });
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
