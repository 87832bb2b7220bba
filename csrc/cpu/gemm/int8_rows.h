// Products with weights in 8 bits: row n of a weight W (N, K) is scale[n] times the whole numbers
// W[n].
//
// What limits the dot products of few rows: reading W, a quarter as many bytes as in fp32, and the
// conversion of its numbers to floats in registers, which happens for each two rows of A again.
// They multiply by the scale at the end, when a sum is complete.
#pragma once
#include "cpu/arguments/products.h"
#include "cpu/gemm/dot_products.h"
#include "cpu/gemm/pack.h"

namespace fusedseq {
namespace FUSEDSEQ_ISA {

// Vectors of whole numbers that one step of a dot product reads of each row: a cache line, or less
// where vectors are short.
constexpr int INT8_VECTORS = 4;

// sums[m * DOT_COLUMNS + n] = A[m] . B[n], not yet summed over the lanes.
template <int ROWS>
HD void dot_tile(int64_t K, const float* A, int64_t lda, const int8_t* const* B, Vec<float>* sums) {
  constexpr int COLUMNS = DOT_COLUMNS<float>, lanes = LANES<float>;
  Vec<float> c[ROWS][COLUMNS];
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n)
      c[m][n] = Vec<float>(0.f);

  // Adds the products of a vector's lanes, of numbers k and following.
  const auto add = [&](int64_t k, auto load, auto convert) {
    Vec<float> a[ROWS];
#pragma GCC unroll 2
    for (int m = 0; m < ROWS; ++m)
      a[m] = load(A + m * lda + k);
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n) {
      const Vec<float> b = convert(B[n] + k);
#pragma GCC unroll 2
      for (int m = 0; m < ROWS; ++m)
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
  for (; k + INT8_VECTORS * lanes <= K; k += INT8_VECTORS * lanes) {
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n)
      __builtin_prefetch(B[n] + k + COLUMNS * K);  // the rows of the next tile
#pragma GCC unroll 4
    for (int i = 0; i < INT8_VECTORS; ++i)
      add(k + i * lanes, load, convert);
  }
  for (; k + lanes <= K; k += lanes)
    add(k, load, convert);
  if (k < K)
    add(
        k, [&](const float* p) { return Vec<float>::load(p, K - k); },
        [&](const int8_t* p) { return load_up_to(p, K - k); });
#pragma GCC unroll 2
  for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < COLUMNS; ++n)
      sums[m * COLUMNS + n] = c[m][n];
}

// Writes zeros past the last column of C, up to whole vectors, where the product asks for them.
HD void fill_last_vectors(const cpu::Int8Product& p) {
  if (!p.whole_vectors || p.accumulate) return;
  for (int64_t m = 0; m < p.M; ++m)
    for (int64_t n = p.N; n < round_up<float>(p.N); ++n)
      p.C[m * p.ldc + n] = 0.f;
}

// Computes a product whose values do not depend on M, N or their positions.
void product_of_int8_rows(const cpu::Int8Product& p) {
  constexpr int COLUMNS = DOT_COLUMNS<float>;
  for (int64_t n0 = 0; n0 < p.N; n0 += COLUMNS) {
    // If fewer rows of W are left than a tile has, the first one takes the empty places.
    const int64_t columns = p.N - n0 < COLUMNS ? p.N - n0 : COLUMNS;
    const int8_t* rows[COLUMNS];
    for (int64_t n = 0; n < COLUMNS; ++n)
      rows[n] = p.W + (n0 + (n < columns ? n : 0)) * p.K;
    for (int64_t m0 = 0; m0 < p.M; m0 += DOT_ROWS) {
      // Two rows of A, or the last one alone.
      const bool two = m0 + DOT_ROWS <= p.M;
      Vec<float> sums[LANES<float>];
      if (two) {
        dot_tile<DOT_ROWS>(p.K, p.A + m0 * p.lda, p.lda, rows, sums);
      } else {
        dot_tile<1>(p.K, p.A + m0 * p.lda, p.lda, rows, sums);
        for (int i = COLUMNS; i < LANES<float>; ++i)
          sums[i] = Vec<float>(0.f);
      }
      float dots[LANES<float>];
      horizontal_sums(sums).store(dots);
      for (int64_t m = 0; m < (two ? DOT_ROWS : 1); ++m)
        for (int64_t n = 0; n < columns; ++n) {
          float* c = p.C + (m0 + m) * p.ldc + n0 + n;
          const float added = p.accumulate ? *c : p.bias ? p.bias[n0 + n] : 0.f;
          *c = dots[m * COLUMNS + n] * p.scale[n0 + n] + added;
        }
    }
  }
  fill_last_vectors(p);
}

// Packs rows of W as columns, as `pack` does, multiplied by their scales.
HD void pack_scaled(const int8_t* W, const float* scales, int64_t K, int64_t columns, float* to) {
  pack(W, 1, K, K, columns, to);
  for (int64_t n0 = 0; n0 < columns; n0 += PANEL_COLUMNS<float>) {
    const int64_t width = columns - n0 < PANEL_COLUMNS<float> ? columns - n0 : PANEL_COLUMNS<float>;
    const int64_t padded = round_up<float>(width);
    for (int64_t j = 0; j < padded; j += LANES<float>) {
      const Vec<float> scale = Vec<float>::load(scales + n0 + j, width - j);
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
