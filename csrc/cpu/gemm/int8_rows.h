// Products with weights of 8 bits: row n of a weight W (N, K) is scale[n] times the whole numbers
// W[n].
//
// What limits the dot products of few rows: reading W, a quarter as many bytes as in fp32, and the
// conversion of its numbers to floats in registers, which happens for each two rows of A again.
// They multiply by the scale at the end, when a sum is complete.
#pragma once
#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/pack.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Rows of a weight, one behind the other, and the scale of each of them.
struct Int8Rows {
  const int8_t* numbers;
  const float* scale;
};

// Vectors of whole numbers that one step of a dot product reads of each row: a cache line, or less
// where vectors are short.
constexpr int INT8_VECTORS = 4;

// sums[m * DOT_COLUMNS + n] = A[m] . B[n], not yet summed over the lanes.
template <int M>
HD void dot_tile(int64_t K, const float* A, int64_t lda, const int8_t* const* B, Vec<float>* sums) {
  constexpr int N = DOT_COLUMNS<float>, L = LANES<float>;
  Vec<float> c[M][N];
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      c[m][n] = Vec<float>(0.f);

  // Adds the products of a vector's lanes, of numbers k and following.
  const auto add = [&](int64_t k, auto load, auto convert) {
    Vec<float> a[M];
#pragma GCC unroll 2
    for (int m = 0; m < M; ++m)
      a[m] = load(A + m * lda + k);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec<float> b = convert(B[n] + k);
#pragma GCC unroll 2
      for (int m = 0; m < M; ++m)
        c[m][n] = multiply_add(c[m][n], a[m], b);
    }
  };
  const auto load = [](const float* p) {
    return Vec<float>::load(p);
  };
  const auto convert = [](const int8_t* p) {
    return load_as(p);
  };
  int64_t k = 0;
  for (; k + INT8_VECTORS * L <= K; k += INT8_VECTORS * L) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      __builtin_prefetch(B[n] + k + N * K);  // the rows of the next tile
#pragma GCC unroll 4
    for (int i = 0; i < INT8_VECTORS; ++i)
      add(k + i * L, load, convert);
  }
  for (; k + L <= K; k += L)
    add(k, load, convert);
  if (k < K)
    add(
        k, [&](const float* p) { return Vec<float>::load(p, K - k); },
        [&](const int8_t* p) { return load_up_to(p, K - k); });
#pragma GCC unroll 2
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      sums[m * N + n] = c[m][n];
}

// C (M, N) (+)= A (M, K) W (N, K)^T + bias (N,), which may be null. The value of an element does
// not depend on M, N or its position.
HD void product_of_int8_rows(int64_t M, int64_t K, int64_t N, Matrix<const float> A, Int8Rows W,
                             const float* bias, Output<float> C) {
  constexpr int COLUMNS = DOT_COLUMNS<float>;
  for (int64_t n0 = 0; n0 < N; n0 += COLUMNS) {
    // If fewer rows of W are left than a tile has, the first one takes the empty places.
    const int64_t columns = N - n0 < COLUMNS ? N - n0 : COLUMNS;
    const int8_t* rows[COLUMNS];
    for (int64_t n = 0; n < COLUMNS; ++n)
      rows[n] = W.numbers + (n0 + (n < columns ? n : 0)) * K;
    for (int64_t m0 = 0; m0 < M; m0 += DOT_ROWS) {
      // Two rows of A, or the last one alone.
      const bool two = m0 + DOT_ROWS <= M;
      Vec<float> sums[LANES<float>];
      if (two) {
        dot_tile<DOT_ROWS>(K, A.p + m0 * A.ld, A.ld, rows, sums);
      } else {
        dot_tile<1>(K, A.p + m0 * A.ld, A.ld, rows, sums);
        for (int i = COLUMNS; i < LANES<float>; ++i)
          sums[i] = Vec<float>(0.f);
      }
      float dots[LANES<float>];
      horizontal_sums(sums).store(dots);
      for (int64_t m = 0; m < (two ? DOT_ROWS : 1); ++m)
        for (int64_t n = 0; n < columns; ++n) {
          float* c = C.p + (m0 + m) * C.ld + n0 + n;
          const float added = C.accumulate ? *c : bias ? bias[n0 + n] : 0.f;
          *c = dots[m * COLUMNS + n] * W.scale[n0 + n] + added;
        }
    }
  }
  if (C.whole_vectors && !C.accumulate)
    for (int64_t m = 0; m < M; ++m)
      for (int64_t n = N; n < round_up<float>(N); ++n)
        C.p[m * C.ld + n] = 0.f;
}

// Packs rows of W as columns, as `pack` does, multiplied by their scales.
HD void pack_scaled(Int8Rows W, int64_t K, int64_t columns, float* to) {
  pack(W.numbers, 1, K, K, columns, to);
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL<float>) {
    const int64_t width = columns - n0 < PANEL<float> ? columns - n0 : PANEL<float>;
    const int64_t padded = round_up<float>(width);
    for (int64_t j = 0; j < padded; j += LANES<float>) {
      const Vec<float> scale = Vec<float>::load(W.scale + n0 + j, width - j);
      for (int64_t k = 0; k < K; ++k) {
        float* p = to + k * padded + j;
        (Vec<float>::load(p) * scale).store(p);
      }
    }
    to += K * padded;
  }
}

}  // namespace FUSEDSEQ_ISA
}  // namespace fusedseq
